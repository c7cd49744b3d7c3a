"""A shard's memory: flat buckets, the versions of them that peers may still be sent, and the sums of a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import backup_name, grad_name
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.transport.buffers import as_tensor, byte_view, fault_of
from graphft.runtime.transport.port import Sent


@dataclass(slots=True)
class Bucket:
    """One bucket: the live values (`flat`, of which the scope holds views) and the sum of a round's contributions."""

    index: int
    reduce: str
    names: tuple[str, ...]
    flat: Tensor
    total: Tensor


class _Published:
    """A copy of a bucket at one version, its bytes, and the sends that still read it."""

    def __init__(self, flat: Tensor, version: int, frame: memoryview) -> None:
        self.flat, self.version, self.frame = flat, version, frame
        self.sends: list[Sent] = []

    @property
    def idle(self) -> bool:
        self.sends = [s for s in self.sends if not s.done]
        return not self.sends


class ShardBuffers:
    """One shard's values. Owned by its loop's thread. Peers are sent copies (`published`), so that the optimizer may
    change the live values while ZeroMQ still reads what an answer refers to. The current version's copy and the one
    before are kept, and those that gradients are still to be compensated with."""

    def __init__(self, scope: MutableMapping[str, Tensor]) -> None:
        self.scope = scope
        self.buckets: dict[int, Bucket] = {}
        self._published: dict[int, list[_Published]] = {}

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        """Lays the variables out in one flat buffer; the scope then holds views of it, and of its sum (`x@GRAD`). The
        variables are of one dtype."""
        values = [self.scope[n] for n in names]
        flat = torch.cat([v.reshape(-1) for v in values]).contiguous()
        bucket = Bucket(index, reduce, tuple(names), flat, torch.zeros_like(flat))
        sizes = [v.numel() for v in values]
        for name, value, view, total in zip(names, values, flat.split(sizes), bucket.total.split(sizes), strict=True):
            self.scope[name] = view.view(value.shape)
            self.scope[grad_name(name)] = total.view(value.shape)
        self.buckets[index] = bucket
        self._published[index] = []

    def fault(self, index: int, frame: memoryview | None) -> str:
        """Says what is wrong with a frame for a bucket; "" if nothing is."""
        bucket = self.buckets.get(index)
        if bucket is None:
            return "there is no such bucket"
        return fault_of(frame, bucket.flat.nbytes, bucket.flat.dtype)

    # -- a round ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self, contributions: Sequence[Contribution]) -> None:
        """Folds the contributions, in slot order, into each bucket's sum. There is at least one."""
        samples = sum(c.samples for c in contributions)
        for bucket in self.buckets.values():
            parts = [
                as_tensor(c.payloads[bucket.index], bucket.flat.dtype).to(bucket.flat.device) for c in contributions
            ]
            if bucket.reduce == "first":
                bucket.total.copy_(parts[0])
                continue
            weights = [
                c.samples / samples if bucket.reduce == "weighted_mean" else 1 / len(contributions)
                for c in contributions
            ]
            _weighted_sum(bucket.total, parts, weights)

    # -- versions -----------------------------------------------------------------------------------------------

    def publish(self, version: int, keep: Collection[int] = ()) -> None:
        """Copies the live values as `version`; the copies of `version - 1` and `keep` stay, others are reused."""
        stay = {version - 1, *keep}
        for index, bucket in self.buckets.items():
            copies = self._published[index]
            kept = [p for p in copies if p.version in stay]
            spare = next((p for p in copies if p.version not in stay and p.idle), None)
            if spare is None:
                flat = torch.empty_like(bucket.flat, device="cpu", pin_memory=not bucket.flat.is_cpu)
                spare = _Published(flat, version, byte_view(flat))
            spare.flat.copy_(bucket.flat)
            spare.version = version
            # Copies that are still being sent stay alive through their frames; we only stop counting on them.
            self._published[index] = [*kept, spare]

    def published(self, index: int, version: int) -> _Published:
        """Returns the copy of this version; whoever sends its frame appends to `sends`. KeyError: it is not kept."""
        for copy in self._published[index]:
            if copy.version == version:
                return copy
        raise KeyError(f"bucket {index} of version {version}")

    def back_up(self, version: int) -> None:
        """Lets the scope's `x@BACKUP` be a view of parameter x as of a version that is kept; -1: of the live one."""
        for index, bucket in self.buckets.items():
            if bucket.reduce == "weighted_mean":
                flat = bucket.flat if version < 0 else self.published(index, version).flat.to(bucket.flat.device)
                live = [self.scope[n] for n in bucket.names]
                for name, value, view in zip(bucket.names, live, flat.split([v.numel() for v in live]), strict=True):
                    self.scope[backup_name(name)] = view.view(value.shape)

    # -- whole states -------------------------------------------------------------------------------------------

    def clone(self, names: Sequence[str]) -> dict[str, Tensor]:
        return {n: self.scope[n].to("cpu", copy=True) for n in names}

    @torch.no_grad()
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Writes the values into the scope's tensors, in place (they are views of the buckets). Raises GraphftError,
        changing nothing, for a value that the scope does not have, or has otherwise."""
        for name, value in values.items():
            found = self.scope.get(name)
            if found is None or (found.shape, found.dtype) != (value.shape, value.dtype):
                here = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise GraphftError(
                    f"%{name} is restored as {value.dtype} {list(value.shape)}, the shard has {here}",
                    rule="restore",
                    help="use the job directory that the checkpoint was written with",
                )
        for name, value in values.items():
            self.scope[name].copy_(value)


def _weighted_sum(total: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """total = sum of weight * part, in the order given. A single contribution is taken as it is, bit by bit. Every
    kernel here rounds once (no `add_(alpha=)`, which is fused or not depending on where in a vector an element lies),
    so that an element's bits do not depend on its place in the bucket, hence not on the number of shards."""
    total.copy_(parts[0])
    if len(parts) == 1:
        return
    if len(set(weights)) == 1:
        for part in parts[1:]:
            total.add_(part)
        total.mul_(weights[0])
        return
    total.mul_(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part * weight)
