"""Lets the roles find each other, and notice who lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphft.ir import Operator, Program
from graphft.transpiler.programs import Programs, order_blocks

PROGRESS_PART = 0.9
"""Of `chunk_timeout`: how long a main thread may go without a mark. A process that hangs ends itself a little before
others take its claims away, so that it can still say which batch was at fault."""


@dataclass(frozen=True)
class InsertLiveness:
    """Every role registers in etcd when it starts; trainers wait for all pservers. A daemon block, which runs every
    `interval` seconds beside the others, watches the job's state and reports its own.

    With `ft`, what a process registers hangs on its lease, which its daemon keeps alive while the main thread makes
    progress. In sync mode trainers then claim slots (logical trainers) of those that died, and hand surplus ones over
    at the end of a step; a shard takes a slot of which nothing comes from its trainer.
    """

    name: ClassVar[str] = "insert-liveness"
    slots: int = 1
    sync: bool = True
    ft: bool = True
    on_trainer_loss: Literal["takeover", "wait"] = "takeover"
    interval: float = 0.5
    chunk_timeout: float = 60.0

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        shards, takes_slots = len(job.pservers), self.ft and self.sync
        self._start(
            job.trainer,
            Operator("etcd_register", (), self._role("trainer")),
            Operator("wait_pservers", (), {"count": shards}),
            *([Operator("find_coordinator")] if job.trainer.find_op("get_task") is not None else []),
        )
        self._daemon(
            job.trainer,
            Operator("etcd_claim_slots", (), {"slots": self.slots, "on_trainer_loss": self.on_trainer_loss})
            if takes_slots
            else None,
        )
        if takes_slots:
            job.trainer.blocks["step"].append_op("etcd_release_slots")
        for index, program in enumerate(job.pservers):
            self._start(program, Operator("etcd_register", (), {**self._role("pserver"), "index": index}))
            self._daemon(program)
            if takes_slots:
                program.blocks["serve"].ops[-1].attrs["idle_timeout"] = self.chunk_timeout
        if job.coordinator is not None:
            put_job = Operator("etcd_put_job", (), {"pservers": shards})
            if job.coordinator.find_op("serve_tasks") is not None:
                self._start(job.coordinator, Operator("etcd_register", (), self._role("coordinator")), put_job)
            else:
                self._start(job.coordinator, put_job)
                job.coordinator.block("serve").append_op("await_job")
            self._daemon(job.coordinator)
            order_blocks(job.coordinator, "init", "serve")
        return job

    def _role(self, role: str) -> dict[str, str | bool]:
        return {"role": role} if self.ft else {"role": role, "lease": False}

    def _start(self, program: Program, *ops: Operator) -> None:
        init = program.block("init")
        init.ops = [*ops, *init.ops]
        order_blocks(program, "init")

    def _daemon(self, program: Program, claim: Operator | None = None) -> None:
        """Puts the daemon's ops before those that are there."""
        daemon = program.block("daemon", interval=self.interval)
        keep = [Operator("etcd_keep_alive", (), {"progress_timeout": PROGRESS_PART * self.chunk_timeout})]
        daemon.ops = [*keep * self.ft, Operator("etcd_state_watch"), *([claim] if claim else []), *daemon.ops]
        order_blocks(program, *(n for n in program.blocks if n != "daemon"))
