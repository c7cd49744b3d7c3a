"""What is left out of the data, from etcd's records to the batches that are computed."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from graphft.ops.context import ChunkWork
from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import read_left_out
from graphft.runtime.etcd import KV
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.chunk_queue import chunk_of
from graphft.runtime.protocol.left_out import ChunkOmissions, LeftOut


def omissions_of(plan: Plan, kv: KV) -> ChunkOmissions:
    """What the record says of its chunk."""
    return ChunkOmissions(plan, chunk_of(kv.key), msgspec.json.decode(kv.value, type=LeftOut))


def read_omissions(store: Store, keys: Keys, plan: Plan) -> dict[int, ChunkOmissions]:
    """By chunk; chunks of which nothing is left out are not among them."""
    return {chunk: ChunkOmissions(plan, chunk, found) for chunk, found in read_left_out(store, keys).items()}


def leave_out(work: ChunkWork, omissions: ChunkOmissions | None) -> ChunkWork:
    """The batch (or unit) without the records that its pass leaves out; perhaps it has no samples then."""
    without = omissions.records(work.pass_index) if omissions is not None else frozenset()
    if omissions is None or not without:
        return work
    return replace(work, samples=omissions.samples(work.pass_index, work.batch), without=without)
