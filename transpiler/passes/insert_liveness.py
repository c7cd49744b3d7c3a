"""Lets the roles find each other, and notice who lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphft.ir import Operator, Program
from graphft.transpiler.programs import Programs, order_blocks


@dataclass(frozen=True)
class InsertLiveness:
    """Every role registers in etcd when it starts; trainers wait for all pservers. A daemon block, which runs every
    `interval` seconds beside the others, watches the job's state and reports its own.

    With `ft`, what a process registers hangs on its lease, which its daemon keeps alive, and in sync mode trainers
    claim slots (logical trainers) of those who died, and hand surplus ones over at the end of a step.
    """

    name: ClassVar[str] = "insert-liveness"
    slots: int = 1
    sync: bool = True
    ft: bool = True
    on_trainer_loss: Literal["takeover", "wait"] = "takeover"
    interval: float = 0.5

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        shards, takes_slots = len(job.pservers), self.ft and self.sync
        self._start(
            job.trainer,
            Operator("etcd_register", (), self._role("trainer")),
            Operator("wait_pservers", (), {"count": shards}),
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
        if job.coordinator is not None:
            self._start(job.coordinator, Operator("etcd_put_job", (), {"pservers": shards}))
            job.coordinator.block("serve").append_op("await_job")
            self._daemon(job.coordinator, process=False)
            order_blocks(job.coordinator, "init", "serve")
        return job

    def _role(self, role: str) -> dict[str, str | bool]:
        return {"role": role} if self.ft else {"role": role, "lease": False}

    def _start(self, program: Program, *ops: Operator) -> None:
        init = program.block("init")
        init.ops = [*ops, *init.ops]
        order_blocks(program, "init")

    def _daemon(self, program: Program, claim: Operator | None = None, process: bool = True) -> None:
        """Puts the daemon's ops around those that are there. The coordinator is no `process` of the job's own."""
        daemon = program.block("daemon", interval=self.interval)
        keep = [Operator("etcd_keep_alive")] if self.ft and process else []
        report = [Operator("etcd_report_status")] if process else []
        daemon.ops = [*keep, Operator("etcd_state_watch"), *([claim] if claim else []), *daemon.ops, *report]
        order_blocks(program, *(n for n in program.blocks if n != "daemon"))
