"""Checkpoints, and recovery from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from graphft.ir import Kind, Program
from graphft.transpiler.programs import Programs, order_blocks


@dataclass(frozen=True)
class InsertCheckpoints:
    """Every pserver has a block `checkpoint`, which saves all that it owns. It runs when the job ends: the final model
    is made from it.

    With `ft` it runs every `every` steps as well, with `passes` at the end of every pass, and when the newest committed
    checkpoint is `seconds` old, for which the daemons look (0: never). A pserver that starts loads the newest committed
    one, and `listen_and_serv` meets the others again (its recovery attributes).
    """

    name: ClassVar[str] = "insert-checkpoints"
    ft: bool = True
    every: int = 50
    seconds: float = 30.0
    keep: int = 3
    recovery_timeout: float = 10.0
    on_barrier_timeout: Literal["rollback", "proceed"] = "rollback"
    passes: bool = False

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        for program in job.pservers:
            self._save(program)
        return job

    def _save(self, program: Program) -> None:
        owned = program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)
        program.block("checkpoint").append_op("save_check_point", *owned, keep=self.keep)
        serve = program.blocks["serve"].ops[-1]
        serve.attrs["checkpoint_block"] = "checkpoint"
        if self.ft:
            serve.attrs.update(
                checkpoint_every=self.every,
                **({"checkpoint_passes": True} if self.passes else {}),
                recovery=True,
                recovery_timeout=self.recovery_timeout,
                on_barrier_timeout=self.on_barrier_timeout,
            )
            program.blocks["init"].append_op("load_check_point")
            if self.seconds:
                program.blocks["daemon"].append_op("checkpoint_notify", seconds=self.seconds)
        order_blocks(program, *(n for n in program.blocks if n != "daemon"))
