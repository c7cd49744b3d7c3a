"""The best model so far, in `best/` of the run's storage, or of its folder if it has none.

    best/step-00000400.safetensors    a state_dict
    best/step-00000400.json           {step, value}, sealed: written last, so the model is whole if this is there

A model is written before it is recorded as the best; then worse ones are deleted. So a slow process deletes no better
one, and the best is known where etcd's data are lost, or in another folder.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.disk.sealed_json import seal, unseal
from graphft.errors import describe
from graphft.runtime.checkpoint.versioned_store import storage
from graphft.runtime.coordination.job_files import url_of
from graphft.runtime.fs import LocalFS, file_system
from graphft.transpiler.criteria import Mode

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("graphft")


class RunFiles:
    """A folder of files in the run's storage, with copies in the run's folder; or in that alone."""

    def __init__(self, job_dir: Path, name: str) -> None:
        url, self.folder = url_of(job_dir), job_dir / name
        self.fs, root = file_system(url) if url else (LocalFS(), str(job_dir))
        self.path, self._stored = posixpath.join(root, name), bool(url)

    def at(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def write(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str] | None = None) -> None:
        """Raises StorageUnavailable."""
        from graphft.disk.tensor_file import write_tensors

        with storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self.folder / name, tensors, dict(meta or {}))
            if self._stored:
                self.fs.upload(self.folder / name, self.at(name))

    def fetch(self, name: str) -> Path:
        """Returns a file in the run's folder; it need not be there."""
        file = self.folder / name
        if self._stored and not file.exists():
            with contextlib.suppress(FileNotFoundError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.fs.download(self.at(name), file)
        return file

    def delete(self, name: str) -> None:
        """Deletes a file as far as it can be deleted."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)
            self.fs.delete(self.at(name))


@dataclass(frozen=True)
class Kept:
    """A model that is there."""

    step: int
    value: float

    def rank(self, mode: Mode) -> tuple[float, int]:
        """Returns its key in a sort with the best first; of equal ones, the first step is the best."""
        return (self.value if mode == "min" else -self.value), self.step

    @property
    def model(self) -> str:
        return f"step-{self.step:08d}.safetensors"

    @property
    def note(self) -> str:
        return f"step-{self.step:08d}.json"


class BestModels:
    """The models of one run."""

    def __init__(self, job_dir: Path, mode: Mode) -> None:
        self.files, self.mode = RunFiles(job_dir, "best"), mode

    def write(self, kept: Kept, state: Mapping[str, Tensor]) -> None:
        """Raises StorageUnavailable."""
        self.files.write(kept.model, state, {"format": "pt"})
        with storage(self.files.folder), self.files.fs.writing(self.files.at(kept.note)) as file:
            file.write(seal({"step": kept.step, "value": repr(kept.value)}))

    def best(self, before: int | None = None) -> Kept | None:
        """Returns the best of those that can be read, `before` a step."""
        found = [kept for kept in self._all() if before is None or kept.step < before]
        return min(found, key=lambda kept: kept.rank(self.mode), default=None)

    def forget_worse(self, than: Kept) -> None:
        """Deletes those that are worse; what cannot be deleted stays."""
        for kept in self._all():
            if kept.rank(self.mode) > than.rank(self.mode):
                for name in (kept.note, kept.model):
                    self.files.delete(name)

    def has(self, kept: Kept) -> bool:
        """True if its file is there."""
        with contextlib.suppress(OSError):
            return bool(self.files.fs.size(self.files.at(kept.model)))
        return (self.files.folder / kept.model).is_file()

    def fetch(self, kept: Kept) -> Path | None:
        """Returns its file in the run's folder; None if it is nowhere."""
        with contextlib.suppress(OSError):
            file = self.files.fetch(kept.model)
            return file if file.exists() else None
        return None

    def adopt(self, other: BestModels) -> None:
        """Copies the best model of another run. Raises GraphftError, OSError."""
        from graphft.disk.tensor_file import read_tensors

        kept = other.best()
        if kept is None:
            return
        file = other.fetch(kept)
        if file is None:
            raise OSError(f"the model of step {kept.step}, the best one, is gone")
        self.write(kept, read_tensors(file)[0])

    def _all(self) -> Iterator[Kept]:
        files = self.files
        with contextlib.suppress(OSError):
            for name in files.fs.ls_dir(files.path):
                if name.endswith(".json"):
                    with contextlib.suppress(OSError), files.fs.open(files.at(name)) as file:
                        yield from _parse(files.at(name), file.read())


def _parse(file: str, note: bytes) -> Iterator[Kept]:
    """Yields the model of a note; of a damaged one nothing, and warns of it, as another model may be the best then."""
    try:
        found = unseal(note)
        yield Kept(int(found["step"]), float(found["value"]))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged, and the model beside it does not count: %s", file, describe(error))
