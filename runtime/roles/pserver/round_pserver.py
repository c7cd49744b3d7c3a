"""A sync shard: closes a step when the contributions of all slots are in."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from graphft.ops.context import ServeOptions
from graphft.runtime.coordination.records import Asked, Barred, Generation
from graphft.runtime.etcd import EtcdError, Session, Store, create_is, delete_op, put_op
from graphft.runtime.protocol.async_shard import AsyncShardEvent
from graphft.runtime.protocol.events import Count, Received
from graphft.runtime.protocol.idle_slots import IdleSlots
from graphft.runtime.protocol.messages import AnyMessage, Empty, Partials, Push
from graphft.runtime.protocol.sync_events import (
    ApplyRound,
    CheckpointAt,
    ComputePartials,
    Finished,
    PartialsReady,
    RequestRollback,
    Rollback,
    RoundApplied,
    RoundSkipped,
    SendShard,
    ShardEvent,
    Started,
    SyncOptions,
)
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.roles.pserver.norms import PartialSumsExchange
from graphft.runtime.roles.pserver.pserver import POLL_SECONDS, Pserver
from graphft.runtime.roles.role import log
from graphft.runtime.transport.buffers import byte_view

if TYPE_CHECKING:
    from graphft.transpiler import Job

NOTICE_SECONDS = 1.0
"""For how long a shard may not have heard of a checkpoint that is asked for."""


class RoundPserver(Pserver):
    """A sync shard's process."""

    machine: SyncShard

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int, session: Session | None = None) -> None:
        super().__init__(job, job_dir, etcd, index, session)
        self.norms: PartialSumsExchange | None = None
        self.idle, self._look_at = IdleSlots(math.inf), 0.0
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}
        self._asked: Asked | None = None
        """The checkpoint that the machine was asked for last."""
        self._awaited: tuple[Asked | None, float] = (None, 0.0)
        """A checkpoint that should be committed by now, and since when."""
        self.effects |= {
            ComputePartials: self._compute_partials,
            ApplyRound: self._apply,
            RoundSkipped: self._skipped,
            SendShard: self._send_shard,
            RequestRollback: self._request_rollback,
            Finished: self._finished,
        }

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self.norms is not None:
                self.norms.close()

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def load_check_point(self) -> None:
        """Joins the job's generation: as it is on a first start; raising the generation on a restart."""
        self.when_storage_answers(self.join_generation)
        if self.restarted:
            self.events.emit(
                "restarted",
                f"pserver {self.index} is back; generation {self.generation.number} goes on "
                f"from step {self.generation.step}",
                step=self.generation.step,
            )
        self.load()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values; the saver writes and commits them while steps go on."""
        values = self.buffers.clone(names)
        step = self.machine.version
        self._snapshots = {s: v for s, v in self._snapshots.items() if s == self.commits_step()} | {step: values}
        self.saver.submit(self.machine.generation, step, values, keep)

    def serve(self, options: ServeOptions) -> None:
        self.options, self.idle = options, IdleSlots(options.idle_timeout)
        self.commits.ensure_generation(resume=False)  # where one was to be gone on with, load_check_point did
        self.buffers.publish(self.generation.step)
        self.machine = SyncShard(
            SyncOptions(
                options.shard,
                options.shards,
                options.slots,
                tuple(self.buffers.buckets),
                options.total_steps,
                self.job.run_id,
                self.secret,
                options.checkpoint_every,
                self._exchanges(),
                options.recovery and self.restarted,
                options.recovery_timeout,
                options.on_barrier_timeout,
                max_peers=self.max_peers,
            ),
            incarnation=self.id,
            generation=self.generation.number,
            version=self.generation.step,
        )
        if self._exchanges():
            self.norms = PartialSumsExchange(
                self.id, self.index, self.program.blocks.get("reduce"), self.limits, self.login
            )
        self.step(Started())
        self.progress.begin("serving")
        while not self.over():
            self.serve_once()

    def fault(self, message: AnyMessage, frame: memoryview | None) -> str:
        if isinstance(message, Partials) and self.norms is not None:
            return self.norms.fault(message.shard, frame)
        return super().fault(message, frame)

    def notify_checkpoint(self, seconds: float) -> None:
        """Asks for a checkpoint when the newest is too old, at a step that no shard reaches before it has heard of it.

        Asks again when `seconds` after that step it is not committed: a shard heard of it too late.
        """
        view, machine = self.view, self.machine
        generation, asked, committed = view.generation, view.asked, view.committed
        if (
            machine is None
            or generation is None
            or generation.number != machine.generation
            or self.age(committed) < seconds
        ):
            return
        reached = committed.step if committed is not None else -1
        if asked is not None and asked.generation == generation.number and asked.step > reached:
            if machine.version < asked.step:
                return
            if self._awaited[0] != asked:
                self._awaited = (asked, time.monotonic())
            if time.monotonic() - self._awaited[1] < seconds:
                return
        step = machine.version + 2 + math.ceil(NOTICE_SECONDS * self.rate)
        if step < self.options.total_steps:
            self.commits.ask(Asked(generation.number, step), asked)

    # -- slots that nothing comes of ----------------------------------------------------------------------------

    def serve_once(self) -> None:
        super().serve_once()
        if self.options.idle_timeout:
            self._look_for_idle_slots()

    def step(self, event: ShardEvent | AsyncShardEvent) -> None:
        if isinstance(event, Received) and isinstance(event.message, Push | Empty):
            self.idle.heard(event.message.slot)
        super().step(event)

    def _look_for_idle_slots(self) -> None:
        """While all shards serve, what this one waits for is the trainers'."""
        view, machine, now = self.view, self.machine, time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + POLL_SECONDS
        waits = (
            machine.phase == "collecting"
            and not machine.finished
            and len(view.trainers) > 1
            and len(view.pservers) == self.config.pservers
        )
        holders = {
            slot: (trainer, view.claims[slot]) for slot, trainer in view.slots.items() if trainer in view.trainers
        }
        for slot in self.idle.look(
            now, (machine.generation, machine.version), machine.round.missing() if waits else (), holders
        ):
            self._take(slot, *holders[slot])

    def _take(self, slot: int, trainer: str, claim: int) -> None:
        """Takes a slot from a trainer, whatever is the matter with it, and bars it, so that another gets the slot."""
        reason = f"nothing of slot {slot} came to pserver {self.index} for {self.idle.timeout:.0f} s"
        bar = put_op(self.keys.barred(trainer), msgspec.json.encode(Barred(reason, self.id)), self.view.leases[trainer])
        key = self.keys.slot(slot)
        try:
            taken = self.etcd.txn([create_is(key, claim)], [delete_op(key), bar]).ok
        except EtcdError as error:  # or its lease has ended: then so has its claim
            log.warning("slot %d: %s", slot, error.message)
            return
        if taken:
            self.events.emit(
                "idle-slot",
                f"slot {slot} was taken from trainer {trainer}: nothing came of it for {self.idle.timeout:.0f} s",
                slot=slot,
                trainer=trainer,
            )

    # -- going back ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        super().follow()
        generation, asked = self.seen.generation, self.seen.asked
        self.overtake(generation)
        if generation is not None and generation.number > self.machine.generation:
            self._go_back(generation)
        if asked is not None and asked != self._asked and asked.generation == self.machine.generation:
            self._asked = asked
            self.step(CheckpointAt(asked.step))

    def _go_back(self, generation: Generation) -> None:
        """Goes back to where a newer generation began."""
        log.info(
            "generation %d: back from version %d to step %d (%s)",
            generation.number,
            self.machine.version,
            generation.step,
            generation.reason,
        )
        self.counters["rollbacks"] += 1
        self.counters["steps-repeated"] += max(0, self.machine.version - generation.step)
        self.generation = generation
        self.load()
        self.buffers.publish(generation.step)
        if self.norms is not None:
            self.norms.connect(self.view)
        self.step(Rollback(self.generation.number, self.generation.step))

    def restore(self, generation: Generation) -> None:
        self.buffers.restore(self._state_at(generation))

    def _state_at(self, generation: Generation) -> Mapping[str, torch.Tensor]:
        if generation.step in self._snapshots:
            return self._snapshots[generation.step]
        manifest = self.commits.manifest_of(generation)
        if manifest is None:
            return self.initial_values()
        return self.store.read_part(manifest, self.index)[0]

    def commits_step(self) -> int:
        """Step of the newest committed checkpoint; -1 before the first."""
        committed = self.view.committed
        return committed.step if committed is not None else -1

    # -- effects ------------------------------------------------------------------------------------------------

    def _compute_partials(self, effect: ComputePartials) -> None:
        assert self.norms is not None
        self.buffers.reduce(effect.contributions)
        sums = self.blocks.run("reduce", fetch=(self.norms.partials,)) if self.norms.partials else ()
        payload = byte_view(sums[0]) if sums else None
        self.step(PartialsReady(effect.generation, effect.step, payload))

    def _apply(self, effect: ApplyRound) -> None:
        """One round's optimization; the published copy of the version before stays for trainers that must recompute."""
        if self.norms is not None:
            self.norms.fill(self.ctx.scope, effect.partials)
        else:
            self.buffers.reduce(effect.contributions)
        if self.options.reduce_block and self.norms is None:
            self.blocks.run(self.options.reduce_block)
        self.run_optimizer(effect.step + 1)
        self.step(RoundApplied(effect.generation, effect.step))

    def _skipped(self, effect: RoundSkipped) -> None:
        self.buffers.publish(effect.step + 1)
        self.count(Count("empty-rounds", effect.reason))

    def _send_shard(self, effect: SendShard) -> None:
        assert self.norms is not None
        self.norms.send(self.view, effect.shard, effect.message, effect.payload)

    def _request_rollback(self, effect: RequestRollback) -> None:
        generation = self.view.generation
        if generation is not None and generation.number == effect.generation:
            raised = self.when_storage_answers(lambda: self.commits.rollback(effect.reason))
            self.events.emit(
                "rollback",
                f"generation {raised.number}: everyone returns to step {raised.step} ({effect.reason})",
                step=raised.step,
            )

    def _finished(self, effect: Finished) -> None:
        log.info("reached the last version, %d", effect.step)

    def _exchanges(self) -> bool:
        """Whether shards exchange partial sums each round (clipping by global norm)."""
        programs = [self.job.pserver_program(i) for i in range(self.config.pservers)]
        return any("reduce" in p.blocks and "order" in p.blocks["reduce"].attrs for p in programs)
