"""Buckets as bytes: slices of tensors, packed one after the other into flat buffers and back.

A frame that is being sent must not change until the transport lets go of it, so each bucket has a few buffers in
rotation and reuses one only when its `Sent` is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.transport.port import Sent

Slices = Sequence[tuple[int, int]]
"""Per tensor, the [start, end) range of its flattened elements that travels."""


def byte_view(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor of any dtype, without a copy; keeps the tensor's memory alive."""
    flat = tensor.detach().view(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # it may have any stride: one from `expand` has 0
    return flat.view(torch.uint8).numpy().data


def fault_of(frame: memoryview | None, nbytes: int, dtype: torch.dtype) -> str:
    """Says what is wrong with a frame that should be `nbytes` of values of `dtype`; "" if nothing is."""
    size = frame.nbytes if frame is not None else 0
    if size != nbytes:
        return f"expected {nbytes} bytes, got {size}"
    if dtype == torch.bool and frame is not None and size and int(torch.frombuffer(frame, dtype=torch.uint8).max()) > 1:
        return "a frame of bools holds other bytes than 0 and 1"
    return ""


def as_tensor(frame: memoryview, dtype: torch.dtype) -> Tensor:
    """Returns the frame as a flat tensor that shares its memory (a copy where the bytes are not aligned for `dtype`).
    `fault_of` has found nothing wrong with it."""
    if not frame.nbytes:
        return torch.empty(0, dtype=dtype)
    raw = torch.frombuffer(frame, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


@torch.no_grad()
def pack(flat: Tensor, tensors: Sequence[Tensor], slices: Slices) -> None:
    """Copies the tensors' slices into `flat`, one after the other. The tensors may have any strides."""
    sources = [_elements(t, start, end) for t, (start, end) in zip(tensors, slices, strict=True)]
    torch._foreach_copy_(_views(flat, sources), sources)


@torch.no_grad()
def unpack(frame: memoryview, tensors: Sequence[Tensor], slices: Slices) -> None:
    """Copies a bucket's bytes into the slices of the tensors, which may have any strides. Raises GraphftError, changing
    nothing, for a frame of another size."""
    flat = as_tensor(frame, tensors[0].dtype)
    if flat.numel() != sum(end - start for start, end in slices):
        raise GraphftError(
            f"a bucket's frame of {frame.nbytes} bytes does not hold its slices",
            rule="frame",
            help="the sender runs another program; start all roles from one job directory",
        )
    spread(flat, tensors, slices)


@torch.no_grad()
def spread(flat: Tensor, tensors: Sequence[Tensor], slices: Slices) -> None:
    """Copies `flat` into the slices of the tensors, one after the other: the inverse of `pack`."""
    targets = [_elements(t, start, end) for t, (start, end) in zip(tensors, slices, strict=True)]
    torch._foreach_copy_(targets, _views(flat, targets))
    for tensor, target, (start, end) in zip(tensors, targets, slices, strict=True):
        if target is not tensor and not tensor.is_contiguous():
            # A part of a strided tensor has no flat view: `target` was a copy.
            whole = tensor.reshape(-1).clone()
            whole[start:end] = target
            tensor.copy_(whole.view(tensor.shape))


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Returns views of a flat buffer, one after the other, in the shapes of `like`, as DDP makes its own."""
    return torch._C._nn.unflatten_dense_tensors(flat, like)


def _elements(tensor: Tensor, start: int, end: int) -> Tensor:
    """Returns elements [start, end): the tensor itself when that is all, else flat (a view if it is contiguous)."""
    return tensor if end - start == tensor.numel() else tensor.reshape(-1)[start:end]


class CopyStream:
    """Copies between an accelerator and pinned memory of the host, on a stream of their own: the device goes on with
    what it computes. Owned by one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device)

    def copy(self, target: Tensor, source: Tensor) -> torch.Event:
        """Begins a copy, behind what the device has been given to compute so far. Returns the event of its end."""
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class DeviceBucket:
    """A received bucket's way to an accelerator: pinned memory, from which one copy goes to one flat tensor there."""

    def __init__(self, stream: CopyStream, numel: int, dtype: torch.dtype) -> None:
        self._stream = stream
        self._copied: torch.Event | None = None
        self._pinned = torch.empty(numel, dtype=dtype, pin_memory=True)
        self._flat = torch.empty(numel, dtype=dtype, device=stream.device)

    def unpack(self, frame: memoryview, tensors: Sequence[Tensor], slices: Slices) -> None:
        """As `unpack`. The frame may be reused when it returns; what the device computes next sees the values."""
        if self._copied is not None:
            self._copied.synchronize()
        unpack(frame, [self._pinned], [(0, self._pinned.numel())])
        self._copied = self._stream.copy(self._flat, self._pinned)
        torch.accelerator.current_stream(self._stream.device).wait_event(self._copied)
        spread(self._flat, tensors, slices)


class BucketBuffers:
    """The flat buffers of one bucket, in rotation: of the slices of its tensors, all of one dtype.

        frame = buffers.pack(gradients)
        buffers.pin(client.send(shard, Push(...), frame))

    Owned by one thread. `copies` is how many sends may be under way at once. With a `stream`, of the accelerator that
    the tensors are on, a frame is whole only at the event `copied`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], slices: Slices, copies: int = 2, stream: CopyStream | None = None
    ) -> None:
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) != 1 or any(
            not 0 <= start <= end <= tensor.numel() for tensor, (start, end) in zip(tensors, slices, strict=True)
        ):
            shapes = [f"{t.dtype} {list(t.shape)}" for t in tensors]
            raise GraphftError(
                f"a bucket holds slices {list(slices)} of tensors of one dtype, got {shapes}",
                rule="bucket",
                help="give the tensors of the bucket in its program's order",
            )
        self._slices, numel = slices, sum(end - start for start, end in slices)
        dtype, self._stream = tensors[0].dtype, stream
        self._buffers = [torch.empty(numel, dtype=dtype, pin_memory=stream is not None) for _ in range(copies)]
        self._gathered = (
            [torch.empty(numel, dtype=dtype, device=stream.device) for _ in range(copies)] if stream else []
        )
        self.copied: torch.Event | None = None
        self._sent: list[list[Sent]] = [[] for _ in range(copies)]
        self._current = 0

    def pack(self, tensors: Sequence[Tensor], timeout_s: float | None = None) -> memoryview:
        """Returns the tensors' slices as one frame, in the buffer that was used longest ago.

        Waits until the transport has let go of it; raises GraphftError when `timeout_s` pass before.
        """
        oldest = (self._current + 1) % len(self._buffers)
        if not all(sent.wait(timeout_s) for sent in self._sent[oldest]):
            raise GraphftError(
                f"a bucket's buffer was not released within {timeout_s} s: its shard takes no data",
                rule="buffer-in-use",
                help="reconnect to the shard, which drops what is queued for it",
            )
        self._current = oldest
        self._sent[oldest] = []
        if self._stream is None:
            pack(self._buffers[oldest], tensors, self._slices)
        else:
            pack(self._gathered[oldest], tensors, self._slices)
            self.copied = self._stream.copy(self._buffers[oldest], self._gathered[oldest])
        return byte_view(self._buffers[oldest])

    def pin(self, sent: Sent) -> None:
        """The frame packed last is being sent: its buffer is used again only when `sent` is done. Repeatable."""
        self._sent[self._current].append(sent)
