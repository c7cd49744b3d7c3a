"""Connects trainers and pservers: receives, sends and barriers there, buckets and `listen_and_serv` here."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from graphft.ir import Block, Kind, Operator, Program, Ref
from graphft.ir.dependence import alias_classes, memory_writes
from graphft.transpiler.layout import Bucket, buckets_of, pushed_as
from graphft.transpiler.programs import Programs, order_blocks


@dataclass(frozen=True)
class InsertCommunication:
    """A trainer's step receives each bucket right before the first op that touches one of its tensors, and sends it
    right behind the op that produces the last of its gradients (of a bucket of buffers: behind their last update).
    `fetch_barrier` stands behind the last receive, `send_barrier` behind the last send; in async mode the latter waits
    for the shards' answers, `push_timeout` seconds at most.

    A pserver lays its buckets out in `init`, and runs `listen_and_serv` in `serve`.
    """

    name: ClassVar[str] = "insert-communication"
    slots: int = 1
    sync: bool = True
    total_steps: int = 1
    max_staleness: int = -1
    push_timeout: float = 10.0
    max_skipped: int = 16

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        buckets = buckets_of(job.trainer)
        self._transfer(job.trainer.blocks["step"], buckets, len(job.pservers))
        for shard, program in enumerate(job.pservers):
            self._serve(program, shard, len(job.pservers), [b for b in buckets if b.shard == shard])
        return job

    def _transfer(self, block: Block, buckets: tuple[Bucket, ...], shards: int) -> None:
        waits = {} if self.sync else {"push_timeout": self.push_timeout, "max_skipped": self.max_skipped}
        _insert_transfers(
            block,
            buckets,
            Operator("fetch_barrier", (), {"shards": shards}),
            Operator("send_barrier", (), {"shards": shards, **waits}),
        )

    def _serve(self, program: Program, shard: int, shards: int, buckets: list[Bucket]) -> None:
        init = program.block("init")
        for b in buckets:
            init.append_op("bucket", *(Ref(s.name) for s in b.slices), index=b.index, reduce=b.reduce)
        program.block("serve").append_op(
            "listen_and_serv",
            shard=shard,
            shards=shards,
            sync=self.sync,
            slots=self.slots,
            total_steps=self.total_steps,
            max_staleness=self.max_staleness,
            schedule_block="schedule" if "schedule" in program.blocks else "",
            reduce_block="reduce" if "reduce" in program.blocks else "",
            optimize_blocks=tuple(n for n in program.blocks if n.startswith("optimize.")),
        )
        order_blocks(program, "init", "serve")


def _insert_transfers(block: Block, buckets: tuple[Bucket, ...], fetch: Operator, end: Operator) -> None:
    before: dict[int, list[Operator]] = defaultdict(list)
    behind: dict[int, list[Operator]] = defaultdict(list)
    last_write = _last_writes(block)
    receives = sorted(((_first_use(block, b), b) for b in buckets), key=lambda p: p[0])
    for at, b in receives:
        before[at].append(_transfer(block, "recv", b))
    before[receives[-1][0]].append(fetch)
    for b in buckets:
        op = _transfer(block, "send", b)
        written = [last_write.get(name, -1) for name in op.reads]
        behind[max(*written, receives[-1][0])].append(op)
    ops = []
    for i, op in enumerate(block.ops):
        ops += [*before[i], op, *behind[i]]
    block.ops = [*ops, end]


def _transfer(block: Block, type: str, bucket: Bucket) -> Operator:
    """`recv` into a bucket's parameters and buffers, or `send` of its gradients and updated buffers."""
    variables = block.program.variables
    operands, refresh = [], False
    for s in bucket.slices:
        v = variables[s.variable]
        refresh = refresh or v.kind is Kind.BUFFER
        operands.append(Ref(pushed_as(v) if type == "send" else v.name))
    attrs = {"shard": bucket.shard, "bucket": bucket.index, "slices": tuple((s.start, s.end) for s in bucket.slices)}
    return Operator(type, tuple(operands), attrs | ({"refresh": True} if type == "recv" and refresh else {}))


def _first_use(block: Block, bucket: Bucket) -> int:
    """Index of the first op that reads a tensor of the bucket, or changes it; the first op if none does."""
    names = {s.variable for s in bucket.slices}
    return next((i for i, op in enumerate(block.ops) if names.intersection((*op.reads, *op.writes))), 0)


def _last_writes(block: Block) -> dict[str, int]:
    """By variable, the last op that produces it or changes its memory, under whatever name."""
    same_memory = alias_classes(block)
    changed: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(block.ops):
        changed.update({same_memory(n): i for n in memory_writes(op, block)})
        last.update(dict.fromkeys(op.writes, i))
    return {n: max(last.get(n, -1), changed.get(same_memory(n), -1)) for n in block.program.variables}
