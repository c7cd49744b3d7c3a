"""Feeds the step from the chunk queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from graphft.ir import Kind, Operator, Ref, Type, Variable
from graphft.transpiler.programs import Programs, order_blocks


@dataclass(frozen=True)
class InsertQueue:
    """A step begins by getting its batch: which one, its columns, its random seed.

    With `ft`, the queue in etcd records the progress: block `pass` makes the pass's records, the step claims chunks
    and completes those that every shard has applied (`etcd_get_chunk`, `etcd_complete_chunk`: in sync mode behind the
    receives, which wait for the step before; in async mode behind the sends), and the daemons of trainers and
    coordinator return stale ones to todo. Without, the step computes what the plan says (`get_chunk`).

    With `dispatch` "coordinator", a coordinator keeps the queue: the step gets tasks from it and finishes them
    (`get_task`, `finish_task`), block `failed` tells it of a batch that cannot be computed, the daemon says that the
    trainer is at work; the coordinator's program takes the lock, loads the queue, says where it is, and serves.

    With `on_demand` block `pass` begins with `etcd_await_pass`: a pass begins when it is asked for.
    """

    name: ClassVar[str] = "insert-queue"
    sync: bool = True
    ft: bool = True
    chunk_timeout: float = 60.0
    max_failures: int = 3
    max_discarded: int = 0
    dispatch: Literal["etcd", "coordinator"] = "etcd"
    on_demand: bool = False

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
        if self.on_demand:
            job.trainer.block("pass").append_op("etcd_await_pass")
            order_blocks(job.trainer, "pass")
        if self.ft:
            barrier = "fetch_barrier" if self.sync else "send_barrier"
            at = next(i for i, op in enumerate(step.ops) if op.type == barrier)
            step.ops.insert(at + 1, Operator("finish_task" if self._tasks else "etcd_complete_chunk"))
            (self._with_coordinator if self._tasks else self._with_etcd)(job)
        return job

    @property
    def _tasks(self) -> bool:
        return self.dispatch == "coordinator"

    def _with_etcd(self, job: Programs) -> None:
        job.trainer.block("pass").append_op("etcd_enqueue_todo")
        order_blocks(job.trainer, "pass")
        for program in (job.trainer, job.coordinator):
            if program is not None:
                program.block("daemon").append_op("etcd_enqueue_timeout", timeout=self.chunk_timeout)

    def _with_coordinator(self, job: Programs) -> None:
        job.trainer.block("failed").append_op("fail_task")
        job.trainer.block("daemon").append_op("renew_tasks", timeout=self.chunk_timeout)
        assert job.coordinator is not None
        serve = job.coordinator.block("serve")
        for type in ("acquire_coordinator_lock", "load_tasks", "publish_coordinator"):
            serve.append_op(type)
        serve.append_op("serve_tasks", **self._terms)

    @property
    def _terms(self) -> dict[str, Any]:
        """Of claims."""
        return {"timeout": self.chunk_timeout, "max_failures": self.max_failures, "max_discarded": self.max_discarded}

    def _get_chunk(self, result: str) -> Operator:
        if not self.ft:
            return Operator("get_chunk", (), {}, (result,))
        if self._tasks:
            return Operator("get_task", (), {}, (result,))
        return Operator("etcd_get_chunk", (), self._terms, (result,))
