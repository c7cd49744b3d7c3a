"""Packing and unpacking buckets: any dtype, any strides, any slices; nothing changes on an error."""

from __future__ import annotations

import pytest
import torch

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Query
from graphft.runtime.transport.buffers import BucketBuffers, as_tensor, byte_view, fault_of, unpack
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
            values((2, 2), dtype),
        ]

    slices = [(0, 15), (3, 20), (0, 1), (0, 4), (0, 24), (2, 5), (4, 4)]
    sent, received = make(), make()
    before = [t.clone() for t in received]
    frame = BucketBuffers(sent, slices).pack(sent)
    unpack(memoryview(bytearray(frame)), received, slices)
    for s, r, b, (start, end) in zip(sent, received, before, slices, strict=True):
        flat, old = r.reshape(-1), b.reshape(-1)
        assert torch.equal(flat[start:end], s.reshape(-1)[start:end])
        assert torch.equal(flat[:start], old[:start])
        assert torch.equal(flat[end:], old[end:])


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
    assert tensor.is_contiguous()
    made_anew = torch.tensor(tensor.reshape(-1).tolist(), dtype=tensor.dtype)
    assert bytes(byte_view(tensor)) == bytes(made_anew.view(torch.uint8).tolist())


def test_a_frame_of_another_size_changes_nothing() -> None:
    target = torch.nn.Parameter(torch.arange(4.0))
    for size in (0, 12, 20):
        with pytest.raises(GraphftError, match=r"^error\[frame\]"):
            unpack(memoryview(bytearray(size)), [target], [(0, 4)])
    assert target.tolist() == [0, 1, 2, 3]
    unpack(byte_view(torch.ones(4)), [target], [(0, 4)])
    assert target.tolist() == [1, 1, 1, 1]


def test_foreign_bytes_have_a_fault() -> None:
    assert fault_of(memoryview(bytearray(b"\x01\x02\x00")), 3, torch.bool)
    assert fault_of(memoryview(bytearray(b"\x01\x01\x00")), 3, torch.bool) == fault_of(None, 0, torch.bool) == ""
    assert fault_of(memoryview(bytearray(b"12345")), 8, torch.float64)


@pytest.mark.parametrize(
    ("dtypes", "slices"),
    [((torch.float32, torch.float64), [(0, 2), (0, 2)]), ((torch.float32,), [(0, 3)]), ((torch.float32,), [(2, 1)])],
)
def test_a_bucket_has_one_dtype_and_slices_of_its_tensors(
    dtypes: tuple[torch.dtype, ...], slices: list[tuple[int, int]]
) -> None:
    with pytest.raises(GraphftError, match=r"^error\[bucket\]"):
        BucketBuffers([torch.zeros(2, dtype=dtype) for dtype in dtypes], slices)


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
        client._links[shard].doubtful = False  # it has answered
    tensor = torch.zeros(100_000)
    buffers = BucketBuffers([tensor], [(0, 100_000)])
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
