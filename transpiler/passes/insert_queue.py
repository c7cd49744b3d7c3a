"""Feeds the step from the chunk queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphft.ir import Kind, Operator, Ref, Type, Variable
from graphft.transpiler.programs import Programs, order_blocks


@dataclass(frozen=True)
class InsertQueue:
    """A step begins by getting its batch: which one, its columns, its random seed.

    With `ft`, the queue in etcd records the progress: block `pass` makes the pass's records, the step claims chunks
    and completes those that every shard has applied (`etcd_get_chunk`, `etcd_complete_chunk`: in sync mode behind the
    receives, which wait for the step before; in async mode behind the sends), and the daemons of trainers and
    coordinator return stale ones to todo. Without, the step computes what the plan says (`get_chunk`).
    """

    name: ClassVar[str] = "insert-queue"
    sync: bool = True
    ft: bool = True
    chunk_timeout: float = 60.0
    max_failures: int = 3
    max_discarded: int = 0

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        step = job.trainer.blocks["step"]
        columns = tuple(v.name for v in job.trainer.of_kind(Kind.INPUT))
        chunk = job.trainer.fresh("chunk")
        job.trainer.variables[chunk] = Variable(chunk, Type("chunk"), Kind.TEMP, {}, job.trainer)
        head = [
            self._get_chunk(chunk),
            Operator("read_chunk", (Ref(chunk),), {"columns": columns}, columns),
            Operator("seed_rng", (Ref(chunk),)),
        ]
        step.ops = [*head, *step.ops]
        if self.ft:
            barrier = "fetch_barrier" if self.sync else "send_barrier"
            at = next(i for i, op in enumerate(step.ops) if op.type == barrier)
            step.ops.insert(at + 1, Operator("etcd_complete_chunk"))
            job.trainer.block("pass").append_op("etcd_enqueue_todo")
            order_blocks(job.trainer, "pass")
            for program in (job.trainer, job.coordinator):
                if program is not None:
                    program.block("daemon").append_op("etcd_enqueue_timeout", timeout=self.chunk_timeout)
        return job

    def _get_chunk(self, result: str) -> Operator:
        if not self.ft:
            return Operator("get_chunk", (), {}, (result,))
        terms = {"timeout": self.chunk_timeout, "max_failures": self.max_failures, "max_discarded": self.max_discarded}
        return Operator("etcd_get_chunk", (), terms, (result,))
