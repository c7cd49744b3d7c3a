"""Packing and unpacking buckets: any dtype, any strides, any slices; nothing changes on an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphft.errors import GraphftError
from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.protocol.messages import Query
from graphft.runtime.transport.buffers import BucketBuffers, BucketLayout, as_tensor, byte_view, pack, unpack
from tests.sim.transport import SimNetwork

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else torch.randn(shape).mul(50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_of_any_dtype_and_strides_comes_back(dtype: torch.dtype) -> None:
    def make() -> list[torch.Tensor]:
        return [
            values((3, 5), dtype),
            values((4, 6), dtype).t(),
            values((), dtype),
            values((7,), dtype)[::2],
            values((2, 3, 4), dtype).permute(2, 0, 1),
            torch.nn.Parameter(values((8,), dtype), False),
        ]

    slices = [(0, 15), (3, 20), (0, 1), (0, 4), (0, 24), (2, 5)]
    sent, received = make(), make()
    before = [t.clone() for t in received]
    frame = BucketBuffers(BucketLayout.of(sent, slices)).pack(sent)
    unpack(memoryview(bytearray(frame)), received, slices)
    for s, r, b, (start, end) in zip(sent, received, before, slices, strict=True):
        flat, old = r.reshape(-1), b.reshape(-1)
        assert torch.equal(flat[start:end], s.reshape(-1)[start:end])
        assert torch.equal(flat[:start], old[:start])
        assert torch.equal(flat[end:], old[end:])


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(0, 24), st.integers(0, 24)),
        min_size=1,
        max_size=6,
    )
)
def test_random_slices_come_back(spec: list[tuple[int, int, bool, int, int]]) -> None:
    def make(start: int) -> list[torch.Tensor]:
        tensors = [torch.arange(start, start + r * c, dtype=torch.int32).view(r, c) for r, c, *_ in spec]
        return [t.t().clone().t() if strided else t for t, (_, _, strided, *_) in zip(tensors, spec, strict=True)]

    slices = [tuple(sorted((a % (r * c + 1), b % (r * c + 1)))) for r, c, _, a, b in spec]
    sent, received = make(0), make(1000)
    layout = BucketLayout.of(sent, slices)
    flat = torch.empty(layout.numel, dtype=torch.int32)
    pack(flat, sent, layout)
    assert torch.equal(flat, torch.cat([t.reshape(-1)[a:b] for t, (a, b) in zip(sent, slices, strict=True)]))
    unpack(byte_view(flat), received, slices)
    for s, r, (a, b) in zip(sent, received, slices, strict=True):
        expected = torch.arange(1000, 1000 + r.numel(), dtype=torch.int32)
        expected[a:b] = s.reshape(-1)[a:b]
        assert torch.equal(r.reshape(-1), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.0),
        torch.tensor(2.0).expand(1, 1),
        torch.arange(6.0)[5:],
        torch.empty(0),
        torch.ones(1, 3)[:, 1],
        torch.tensor([True]),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(3, dtype=torch.bfloat16),
    ],
)
def test_any_contiguous_tensor_has_bytes(tensor: torch.Tensor) -> None:
    """One element, as `expand` gives it, is contiguous, and has stride 0."""
    assert tensor.is_contiguous()
    made_anew = torch.tensor(tensor.reshape(-1).tolist(), dtype=tensor.dtype)
    assert bytes(byte_view(tensor)) == bytes(made_anew.view(torch.uint8).tolist())


def test_parameters_that_need_gradients_are_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    unpack(byte_view(torch.ones(4)), [parameter], [(0, 4)])
    assert parameter.tolist() == [1, 1, 1, 1]
    assert parameter.requires_grad


@pytest.mark.parametrize(
    ("size", "slices", "message"),
    [
        (12, [(0, 4)], "expected 16 bytes .*got 12"),
        (20, [(0, 4)], "got 20"),
        (16, [(0, 4), (0, 1)], "2 slices got 1"),
        (20, [(0, 5)], "a tensor of 4 elements"),
        (0, [(0, 4)], "got 0"),
    ],
)
def test_a_frame_that_does_not_fit_changes_nothing(size: int, slices: list[tuple[int, int]], message: str) -> None:
    target = torch.arange(4.0)
    with pytest.raises(GraphftError, match=message):
        unpack(memoryview(bytearray(size)), [target], slices)
    assert target.tolist() == [0, 1, 2, 3]


def test_foreign_bools_and_broken_elements_are_refused() -> None:
    flags = torch.ones(3, dtype=torch.bool)
    with pytest.raises(GraphftError, match="other bytes than 0 and 1"):
        unpack(memoryview(bytearray(b"\x01\x02\x00")), [flags], [(0, 3)])
    assert flags.all()
    with pytest.raises(GraphftError, match="5 bytes holds no whole number"):
        as_tensor(memoryview(bytearray(5)), torch.float32)


def test_mixed_or_changed_dtypes_are_refused() -> None:
    mixed = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    with pytest.raises(GraphftError, match="holds one dtype"):
        BucketLayout.of(mixed, [(0, 2), (0, 2)])
    buffers = BucketBuffers(BucketLayout(torch.float32, ((0, 2),)))
    with pytest.raises(GraphftError, match=r"operand 0.*float32.*float64"):
        buffers.pack([mixed[1]])


def test_a_frame_is_read_in_place_where_it_is_aligned() -> None:
    memory = bytearray(8 * 9)
    aligned = as_tensor(memoryview(memory)[:64], torch.float64)
    shifted = as_tensor(memoryview(memory)[1:65], torch.float64)
    memory[:] = b"\x3f" * 72
    assert aligned.data_ptr() % 8 == shifted.data_ptr() % 8 == 0
    assert aligned.count_nonzero() == 8
    assert shifted.count_nonzero() == 0  # a copy
    assert as_tensor(memoryview(b""), torch.int64).shape == (0,)


def test_buffers_rotate_and_are_not_reused_while_lent() -> None:
    network = SimNetwork(latency=1.0)  # a frame is read when it arrives, a second later
    client = network.client("t0")
    for shard in range(2):
        client.connect(shard, network.server().bind())
    tensor = torch.zeros(100_000)
    buffers = BucketBuffers(BucketLayout.of([tensor], [(0, 100_000)]), copies=2)
    frames = []
    for i in range(2):
        frames.append(buffers.pack([tensor + i], timeout_s=0))
        buffers.pin(client.send(0, Query(), frames[i]))
    network.advance(0.5)
    buffers.pin(client.send(1, Query(), frames[1]))  # the same frame to a second shard
    with pytest.raises(GraphftError, match="buffer-in-use"):
        buffers.pack([tensor + 2], timeout_s=0)
    network.advance(0.6)
    assert [as_tensor(f, torch.float32)[0] for f in frames] == [0, 1]
    assert as_tensor(buffers.pack([tensor + 2], timeout_s=0), torch.float32)[0] == 2
    with pytest.raises(GraphftError, match="buffer-in-use"):
        buffers.pack([tensor + 3], timeout_s=0)
    assert as_tensor(buffers.pack([tensor + 3], timeout_s=0.5), torch.float32)[0] == 3


FAULTS = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def touch():
    blocks = [libc.malloc(16 << 20) for _ in range(4)]
    for b in blocks: ctypes.memset(b, 1, 16 << 20)
    for b in blocks: libc.free(b)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5): touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_with_the_role_environment_freed_buckets_are_reused_without_page_faults() -> None:
    def faults(extra: dict[str, str]) -> int:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        return int(
            subprocess.run(
                [sys.executable, "-c", FAULTS], env=plain | extra, capture_output=True, text=True, check=True
            ).stdout
        )

    assert faults(role_environment()) < 0.1 * faults({})
