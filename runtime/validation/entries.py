"""What has an entry for each record, of each range, until a reducer reads all of it: a file for each range.

    <job>/entries/<step>.g<generation>/<range>.safetensors

In the job's folder, or in its storage. A range that two computed is written twice, with the same contents; each file
appears wholly or not at all.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphft.disk.tensor_file import read_tensors, write_tensors
from graphft.errors import GraphftError, describe
from graphft.runtime.checkpoint.versioned_store import StorageUnavailable, storage
from graphft.runtime.coordination.job_storage import ENTRIES, delete_entries, storage_of
from graphft.runtime.coordination.records import Validating
from graphft.runtime.fs import file_system


class LostEntries(Exception):
    """Those of a range cannot be read."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class Entries:
    """The entries of one validation. Raises StorageUnavailable where files cannot be read or written."""

    def __init__(self, job_dir: Path, step: int, of: Validating) -> None:
        name = f"{ENTRIES}/{step:08d}.g{of.generation}"
        self._job_dir, self._name = job_dir, name
        self._folder, url = job_dir / name, storage_of(job_dir)
        fs, path = file_system(url) if url else (None, "")
        self._fs, self._path = fs, posixpath.join(path, name)

    def write(self, number: int, entries: Mapping[str, Sequence[Tensor]]) -> None:
        """`entries`: by result, those of the range's batches."""
        with storage(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._file(number), {name: torch.cat(list(parts)) for name, parts in entries.items()})
            if self._fs is not None:
                self._fs.upload(self._file(number), self._at(number))

    def read(self, count: int) -> dict[str, Tensor]:
        """Returns, by result, the entries of all records, in the order of the data. Raises LostEntries for a file that
        is damaged or not there."""
        parts = []
        for number in range(count):
            try:
                parts.append(self._read(number))
            except StorageUnavailable:
                raise
            except (OSError, GraphftError) as error:
                raise LostEntries(number, describe(error)) from error
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read(self, number: int) -> dict[str, Tensor]:
        with storage(self._folder):
            file = self._file(number)
            if self._fs is None:
                return read_tensors(file)[0]
            with contextlib.suppress(OSError, GraphftError):  # it is not here, or damaged: the storage's counts
                return read_tensors(file)[0]
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fs.download(self._at(number), file)
            return read_tensors(file)[0]

    def delete(self) -> None:
        """As far as it can be deleted."""
        delete_entries(self._job_dir, self._name)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:08d}.safetensors"

    def _at(self, number: int) -> str:
        return posixpath.join(self._path, f"{number:08d}.safetensors")
