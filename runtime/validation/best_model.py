"""The best model so far, in `best/` of the run's folder, and of its storage.

    best/step-00000400.safetensors    a state_dict
    best/step-00000400.json           {step, value}, sealed: written last, so the model is whole if this is there

A model is written before it is recorded as the best; then worse ones are deleted. So a slow process deletes no better
one, and the best is known where etcd's data are lost, or in another folder.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.disk.fileio import write_atomically
from graphft.disk.sealed_json import seal, unseal
from graphft.errors import describe
from graphft.runtime.checkpoint.versioned_store import storage
from graphft.runtime.coordination.job_files import url_of
from graphft.runtime.fs import file_system
from graphft.transpiler.criteria import Mode

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("graphft")

FOLDER = "best"


@dataclass(frozen=True)
class Kept:
    """A model that is there."""

    step: int
    value: float

    def rank(self, mode: Mode) -> tuple[float, int]:
        """Returns its key in a sort with the best first; of equal ones, the first step is the best."""
        return (self.value if mode == "min" else -self.value), self.step

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"


class BestModels:
    """The models of one run. Raises StorageUnavailable where files cannot be written."""

    def __init__(self, job_dir: Path, mode: Mode) -> None:
        self.folder, self.mode, url = job_dir / FOLDER, mode, url_of(job_dir)
        fs, path = file_system(url) if url else (None, "")
        self._fs, self._path = fs, posixpath.join(path, FOLDER)

    def write(self, kept: Kept, state: Mapping[str, Tensor]) -> None:
        from graphft.disk.tensor_file import write_tensors

        with storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._model(kept), state, {"format": "pt"})
            self._add_note(kept)

    def _add_note(self, kept: Kept) -> None:
        """Makes a model count whose file is written."""
        note, name = seal({"step": kept.step, "value": repr(kept.value)}), f"{kept.name}.json"
        if self._fs is not None:
            self._fs.upload(self._model(kept), self._at(self._model(kept).name))
            with self._fs.writing(self._at(name)) as file:
                file.write(note)
        write_atomically(self.folder / name, note)

    def best(self, before: int | None = None) -> Kept | None:
        """Returns the best of those that can be read, `before` a step."""
        found = [kept for kept in self._all() if before is None or kept.step < before]
        return min(found, key=lambda kept: kept.rank(self.mode), default=None)

    def forget_worse(self, than: Kept) -> None:
        """Deletes those that are worse; what cannot be deleted stays."""
        for kept in self._all():
            if kept.rank(self.mode) > than.rank(self.mode):
                for ending in (".json", ".safetensors"):
                    with contextlib.suppress(OSError):
                        (self.folder / f"{kept.name}{ending}").unlink()
                    if self._fs is not None:
                        with contextlib.suppress(OSError):
                            self._fs.delete(self._at(f"{kept.name}{ending}"))

    def has(self, kept: Kept) -> bool:
        """True if its file is in the run's folder, or can be fetched."""
        file = self._model(kept)
        if file.is_file() and file.stat().st_size:
            return True
        with contextlib.suppress(OSError):
            return self._fs is not None and bool(self._fs.size(self._at(file.name)))
        return False

    def fetch(self, kept: Kept) -> Path | None:
        """Returns its file in the run's folder; None if it is nowhere."""
        file = self._model(kept)
        if not file.exists() and self._fs is not None:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                self._fs.download(self._at(file.name), file)
        return file if file.exists() else None

    def adopt(self, other: BestModels) -> None:
        """Copies the best model of another run. Raises OSError."""
        kept = other.best()
        if kept is None:
            return
        file = other.fetch(kept)
        if file is None:
            raise OSError(f"the model of step {kept.step}, the best one, is gone")
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self._model(kept))
        self._add_note(kept)

    def _all(self) -> list[Kept]:
        return list({kept.step: kept for kept in (*self._there(), *self._here())}.values())

    def _here(self) -> Iterator[Kept]:
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError):
                yield from _parse(file, file.read_bytes())

    def _there(self) -> Iterator[Kept]:
        fs = self._fs
        with contextlib.suppress(OSError):
            for name in fs.ls_dir(self._path) if fs is not None else ():
                if fs is not None and name.endswith(".json"):
                    with contextlib.suppress(OSError), fs.open(self._at(name)) as file:
                        yield from _parse(self._at(name), file.read())

    def _model(self, kept: Kept) -> Path:
        return self.folder / f"{kept.name}.safetensors"

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)


def _parse(file: object, note: bytes) -> Iterator[Kept]:
    """Yields the model of a note; of a damaged one nothing, and warns of it, as another model may be the best then."""
    try:
        found = unseal(note)
        yield Kept(int(found["step"]), float(found["value"]))
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged, and the model beside it does not count: %s", file, describe(error))
