"""The best model so far, in `best/` of the run's folder, and of its storage.

    best/step-00000400.safetensors    a state_dict
    best/step-00000400.json           {step, value}, sealed: written last, so the model is whole if this is there

It is written before it is decided that it is the best; then those that are worse are deleted. So a process that is
slow, and takes its own for the best, deletes no better one; and the best is known where etcd's data are lost, or in
another folder.
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

from graphft.disk.fileio import read_regular, write_atomically
from graphft.disk.sealed_json import seal, unseal
from graphft.errors import describe
from graphft.runtime.checkpoint.versioned_store import storage
from graphft.runtime.coordination.job_storage import storage_of
from graphft.runtime.fs import FS, file_system
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
        """The lowest is the best; of equal ones, the first."""
        return (self.value if mode == "min" else -self.value), self.step

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"


class BestModels:
    """The models of one run. Raises StorageUnavailable where files cannot be written."""

    def __init__(self, job_dir: Path, mode: Mode) -> None:
        self.folder, self.mode, url = job_dir / FOLDER, mode, storage_of(job_dir)
        fs, path = file_system(url) if url else (None, "")
        self._fs, self._path = fs, posixpath.join(path, FOLDER)

    def write(self, kept: Kept, state: Mapping[str, Tensor]) -> None:
        from graphft.disk.tensor_file import write_tensors

        with storage(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._model(kept), state, {"format": "pt"})
            note = _note(kept)
            if self._fs is not None:
                self._fs.upload(self._model(kept), self._at(f"{kept.name}.safetensors"))
                with self._fs.writing(self._at(f"{kept.name}.json")) as file:
                    file.write(note)
            write_atomically(self.folder / f"{kept.name}.json", note)

    def best(self, before: int | None = None) -> Kept | None:
        """Returns the best of those that are there, `before` a step. What cannot be read is none."""
        found = [kept for kept in self._all() if before is None or kept.step < before]
        return min(found, key=lambda kept: kept.rank(self.mode), default=None)

    def forget_worse(self, than: Kept) -> None:
        """Deletes those that are worse, as far as they can be deleted."""
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
        """Takes the best one of another run along. Raises OSError."""
        kept = other.best()
        if kept is None:
            return
        file = other.fetch(kept)
        if file is None:
            raise OSError(f"the model of step {kept.step}, the best one, is gone")
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self._model(kept))
        note = _note(kept)
        if self._fs is not None:
            self._fs.upload(self._model(kept), self._at(file.name))
            with self._fs.writing(self._at(f"{kept.name}.json")) as written:
                written.write(note)
        write_atomically(self.folder / f"{kept.name}.json", note)

    def _all(self) -> list[Kept]:
        return list({kept.step: kept for kept in (*self._there(), *self._here())}.values())

    def _here(self) -> Iterator[Kept]:
        for file in sorted(self.folder.glob("*.json")):
            with _told(file), contextlib.suppress(OSError):
                yield _parse(read_regular(file))

    def _there(self) -> Iterator[Kept]:
        fs: FS | None = self._fs
        if fs is None:
            return
        with contextlib.suppress(OSError):
            for name in fs.ls_dir(self._path):
                if name.endswith(".json"):
                    with _told(self._at(name)), contextlib.suppress(OSError), fs.open(self._at(name)) as file:
                        yield _parse(file.read())

    def _model(self, kept: Kept) -> Path:
        return self.folder / f"{kept.name}.safetensors"

    def _at(self, name: str) -> str:
        return posixpath.join(self._path, name)


@contextlib.contextmanager
def _told(file: object) -> Iterator[None]:
    """Warns of a note that is damaged: its model is none, and another one may be the best then."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged, and the model beside it does not count: %s", file, describe(error))


def _note(kept: Kept) -> bytes:
    return seal({"step": kept.step, "value": repr(kept.value)})


def _parse(data: bytes) -> Kept:
    found = unseal(data)
    return Kept(int(found["step"]), float(found["value"]))
