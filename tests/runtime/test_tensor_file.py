"""Tensors on disk: the bytes that safetensors would write, but in pieces, and without a second copy in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _SIZE, load_file, save

from graphft.disk import fileio
from graphft.disk.tensor_file import _DTYPES, read_tensors, write_tensors
from graphft.errors import GraphftError


def example() -> dict[str, torch.Tensor]:
    known = {n: d for n, d in _DTYPES.items() if d in _SIZE}  # all since 0.8
    names = {f"{i}-{n}": (n, d) for i, (n, d) in enumerate(known.items())}
    return {name: torch.arange(5).to(dtype) for name, (_, dtype) in names.items()} | {
        "matrix": torch.arange(6.0).view(2, 3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
    }


@pytest.mark.parametrize("metadata", [None, {"ledger": '{"0": [[0, 3]], "é": "\\u0001/\\n"}'}])
def test_the_bytes_are_those_of_safetensors(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "file"
    write_tensors(path, example(), metadata)
    (header, data), (expected, bytes_) = parts_of(path.read_bytes()), parts_of(save(example(), metadata))
    checksums = json.loads(header["__metadata__"].pop("checksums"))
    assert checksums.keys() == example().keys() | {""}
    assert (header, data) == ({"__metadata__": {}} | expected, bytes_)
    tensors, found = read_tensors(path)
    assert found == (metadata or {})
    for name, value in example().items():
        assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape)
        assert tensors[name].reshape(-1).view(torch.uint8).tolist() == value.reshape(-1).view(torch.uint8).tolist()


def parts_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the tensors' bytes."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, {"w": torch.arange(3.0), "n": torch.tensor(7)}, {"skipped_steps": "12", "format": "pt"})
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(GraphftError, match=r"^error\[tensor-file\]"):
            read_tensors(path)


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    shared = {"all": flat, "view": flat[2:6].view(2, 2), "tied": flat, "transposed": flat.view(3, 4).t()}
    write_tensors(tmp_path / "file", shared)
    found = load_file(tmp_path / "file")
    assert {n: v.tolist() for n, v in found.items()} == {n: v.tolist() for n, v in shared.items()}


def test_no_call_holds_the_interpreter_for_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.write, list[int]()

    def write(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    state = {"w": torch.zeros(5_000_000)}
    write_tensors(tmp_path / "file", state)
    assert max(sizes) <= fileio.PIECE
    assert sum(sizes) == (tmp_path / "file").stat().st_size > 20_000_000
    assert torch.equal(read_tensors(tmp_path / "file")[0]["w"], state["w"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b"{       ",
        *(
            len(h).to_bytes(8, "little") + h + b"12345678"
            for h in (
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
                b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,8]}}',
                b'{"a":{"dtype":"F32","shape":[2]}}',
                b'{"a":7}',
                b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}',
                b'{"a":' + b"[" * 100_000,
            )
        ),
    ],
)
def test_what_is_no_tensor_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(GraphftError, match=r"^error\[tensor-file\]"):
        read_tensors(tmp_path / "file")


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="complex128"):
        write_tensors(tmp_path / "file", {"z": torch.zeros(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_made_to_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    synced: list[Path] = []
    monkeypatch.setattr(fileio, "fsync", synced.append)
    fileio.make_folder(tmp_path / "job" / "checkpoints" / "step")
    assert synced == [tmp_path / "job", tmp_path / "job" / "checkpoints"]
    synced.clear()
    fileio.make_folder(tmp_path / "job" / "checkpoints" / "step")
    assert synced == [tmp_path / "job" / "checkpoints"]
