"""Shards exchange partial sums, so that clipping by global norm has the same bits on any number of shards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from graphft.ir import Block
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.protocol.events import SendShard
from graphft.runtime.transport import Limits, Login, ZmqClient
from graphft.runtime.transport.buffers import as_tensor
from graphft.transpiler.layout import ALL_NORMS

ANSWERS = 64
"""Answers that are thrown away at a time: more than there are."""


class PartialSumsExchange:
    """One shard's connections to the others, and the layout of the sums (attributes of block `reduce`). A shard that
    owns nothing of what is clipped has no such block, and takes part without sums of its own."""

    def __init__(self, identity: str, shard: int, block: Block | None, limits: Limits, login: Login) -> None:
        self.partials: str = block.attrs["partials"].name if block is not None else ""
        self.order: Sequence[tuple[int, int, int]] = block.attrs["order"] if block is not None else ()
        self.shard = shard
        self.client = ZmqClient(identity, limits, login)
        self._connected: dict[int, str] = {}

    def fault(self, shard: int, frame: memoryview | None) -> str:
        """Says what is wrong with another shard's partial sums; "" if nothing is. No frame: it had no contribution."""
        if not self.order:
            return ""  # this shard needs none of them
        wanted = 8 * max((start + count for s, start, count in self.order if s == shard), default=0)
        if frame is None or 0 < wanted == frame.nbytes:
            return ""
        return f"partial sums of shard {shard}: expected {wanted} bytes, got {frame.nbytes}"

    def fill(self, scope: MutableMapping[str, Any], partials: Sequence[Any], device: str = "cpu") -> None:
        """Lays all shards' partial sums out in canonical order. A shard without a contribution counts as zeros."""
        sums = {s: as_tensor(partials[s], torch.float64) for s, *_ in self.order if partials[s] is not None}
        norms = lay_out(self.order, sums)
        if norms is not None:
            scope[ALL_NORMS] = norms.to(device)

    def connect(self, view: JobView) -> None:
        """(Re)connects to shards that are new or have moved."""
        for shard, record in view.pservers.items():
            if shard != self.shard and self._connected.get(shard) != record.id:
                self._connected[shard] = record.id
                self.client.connect(shard, record.keyed_address)

    def send(self, view: JobView, effect: SendShard) -> None:
        """Sends, best effort: what is lost is asked for again. Answers are not read."""
        self.connect(view)
        self.client.send(effect.shard, effect.message, effect.payload)
        for _ in range(ANSWERS):  # not as long as there are some: a faulty shard might never stop
            if self.client.receive(0) is None:
                break

    def close(self) -> None:
        self.client.close()


def lay_out(order: Sequence[tuple[int, int, int]], sums: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Returns the shards' partial sums in the canonical order of (shard, start, count), zeros for a shard without any;
    None if there are none to lay out."""
    pieces = []
    for shard, start, count in order:
        values = sums.get(shard)
        pieces.append(torch.zeros(count, dtype=torch.float64) if values is None else values[start : start + count])
    return torch.cat(pieces) if pieces else None
