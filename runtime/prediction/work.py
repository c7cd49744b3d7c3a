"""What is to be predicted, in a folder: whoever dies, what is computed stays.

request.json      data, sizes, device; and a key, by which the same request is known again
program/          the program, with the trained weights
data/             arrays that were given
results/<chunk>.safetensors     an entry for each record of this chunk, in the order of the data
logs/             of the workers
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.data import DataSpec
from graphft.errors import GraphftError
from graphft.fileio import write_atomically
from graphft.ir import Program
from graphft.sealed_json import parse_json
from graphft.storage import load_program, save_program
from graphft.tensor_file import read_tensors, write_tensors
from graphft.transpiler.fingerprint import fingerprint_values, without_lines

REQUEST, PROGRAM, RESULTS, LOGS = "request.json", "program", "results", "logs"


@dataclass(frozen=True)
class Work:
    """One request. `threads`: of torch, in each worker: the bits depend on it."""

    folder: Path
    data: DataSpec
    batch_size: int
    device: str
    threads: int

    def begin(self, program: Program) -> bool:
        """Writes what workers need: also what may be there from before, for nobody knows what has become of it since.
        Whether there may be results of this very request."""
        key, same = self._key(program), False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            same = parse_json((self.folder / REQUEST).read_bytes())["key"] == key
        for name in (PROGRAM, "data", *([] if same else [REQUEST, RESULTS])):
            path = self.folder / name
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        self.data.store(self.folder)
        save_program(program, self.folder / PROGRAM, sealed=True)
        write_atomically(self.folder / REQUEST, json.dumps(self._request() | {"key": key}).encode())
        return same

    @staticmethod
    def open(folder: Path) -> tuple[Work, Program]:
        """What `begin` wrote."""
        request = parse_json((folder / REQUEST).read_bytes())
        data = DataSpec.from_json(request.pop("data"))
        request.pop("key")
        return Work(folder, data, **request), load_program(folder / PROGRAM)

    def _request(self) -> dict[str, Any]:
        return {
            "data": self.data.to_json(),
            "batch_size": self.batch_size,
            "device": self.device,
            "threads": self.threads,
        }

    def _key(self, program: Program) -> str:
        """Of all that the results' bits depend on."""
        parts = [
            str(without_lines(program)),
            fingerprint_values({"": program}),
            self._request(),
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # -- results ------------------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The chunks that have no result yet."""
        return [chunk for chunk in range(len(self.data.chunks)) if not self._result(chunk).exists()]

    def put(self, chunk: int, results: dict[str, Tensor]) -> None:
        write_tensors(self._result(chunk), results, self._label(chunk))

    def results(self) -> Iterator[dict[str, Tensor]]:
        """Of all chunks, in order. Raises GraphftError for one that is damaged: then it is deleted."""
        for chunk in range(len(self.data.chunks)):
            try:
                found, metadata = read_tensors(self._result(chunk))
                if not self._label(chunk).items() <= metadata.items():
                    raise GraphftError(f"{self._result(chunk)} holds other records", rule="tensor-file")
                yield found
            except GraphftError as error:
                self._result(chunk).unlink()
                again = "run it again: this part is computed anew"
                raise GraphftError(error.message, rule=error.rule, help=again) from error

    def _label(self, chunk: int) -> dict[str, str]:
        return {"records": self.where(chunk)}

    def _result(self, chunk: int) -> Path:
        return self.folder / RESULTS / f"{chunk:06}.safetensors"

    def where(self, chunk: int) -> str:
        """The records of a chunk, in words."""
        first = self.data.first_records()[chunk]
        return f"records {first} to {first + self.data.chunks[chunk].records}"
