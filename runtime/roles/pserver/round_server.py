"""A sync shard: it closes a step when the contributions of all slots are in, and takes slots from idle trainers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from graphft.runtime.checkpoint.manifest import VALIDATE
from graphft.runtime.checkpoint.writer import Snapshot
from graphft.runtime.coordination.job_view import wanted_steps
from graphft.runtime.coordination.records import Asked, Barred, Generation
from graphft.runtime.etcd import EtcdError, LeaseLost, create_is, delete_op, put_op
from graphft.runtime.protocol.decisions import Decided
from graphft.runtime.protocol.events import (
    ApplyRound,
    CheckpointAt,
    ComputePartials,
    Count,
    Finished,
    PartialsReady,
    Received,
    RequestRollback,
    Rollback,
    RoundSkipped,
    SendShard,
    Started,
    StepsWanted,
    SyncOptions,
)
from graphft.runtime.protocol.failure_detection import IdleSlots
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.messages import AnyMessage, Empty, Partials, Push
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.roles.pserver.norms import PartialSumsExchange
from graphft.runtime.roles.pserver.shard_server import ShardServer
from graphft.runtime.transport import Limits
from graphft.runtime.transport.buffers import byte_view
from graphft.transpiler.layout import RATE_SCALE

log = logging.getLogger("graphft")

NOTICE_SECONDS = 1.0
"""For how long a shard may not have heard of a checkpoint that is asked for."""


@dataclass(eq=False, repr=False)
class RoundServer(ShardServer):
    """The ServerPort of a sync shard. `limits`: of its connections to other shards."""

    limits: Limits

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine: SyncShard
        self.norms: PartialSumsExchange | None = None
        self.validated: frozenset[int] = frozenset()
        """Steps after which the model is validated."""
        self._idle = IdleSlots(self.config.chunk_timeout)
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}
        self._wanted = self.config.total_steps
        """Steps that the machine was asked for last."""
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
            Finished: lambda effect: log.info("reached the last version, %d", effect.step),
        }

    def close(self) -> None:
        super().close()
        if self.norms is not None:
            self.norms.close()

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def load_check_point(self) -> None:
        self.recovery.join()
        self.recovery.load()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values; the saver writes and commits them meanwhile."""
        values = self.buffers.clone(names)
        step, committed = self.machine.version, self.member.view.committed
        kept = {s: v for s, v in self._snapshots.items() if committed is not None and s == committed.step}
        self._snapshots = kept | {step: values}
        meta = {VALIDATE: True} if step in self.validated else {}
        self.saver.submit(Snapshot(self.machine.generation, step, values, keep, meta=meta))

    def begin(self) -> None:
        options, exchanges = self.options, self._exchanges()
        self.validated = self.config.validated
        self.buffers.publish(self.recovery.generation.step)
        passes = frozenset(self.config.plan.start_steps[1:] if options.checkpoint_passes else ())
        self.machine = SyncShard(
            SyncOptions(
                shard=options.shard,
                shards=options.shards,
                slots=options.slots,
                buckets=tuple(self.buffers.buckets),
                total_steps=options.total_steps,
                run=self.member.job.run_id,
                checkpoint_every=options.checkpoint_every,
                checkpoint_steps=self.validated | passes,
                reduce=exchanges,
                recovery=options.recovery and self.recovery.restarted,
                recovery_timeout=options.recovery_timeout,
                on_barrier_timeout=options.on_barrier_timeout,
                skips=bool(options.skip_block),
                values=len(options.metrics),
            ),
            incarnation=self.member.id,
            generation=self.recovery.generation.number,
            version=self.recovery.generation.step,
        )
        if exchanges:
            me, block = self.member, self.blocks.program.blocks.get("reduce")
            self.norms = PartialSumsExchange(me.id, me.index, block, self.limits, me.login)
        self.record_metrics(self.machine.version)
        self.step(Started())

    def fault(self, message: AnyMessage, frame: memoryview | None) -> str:
        if isinstance(message, Partials) and self.norms is not None:
            return self.norms.fault(message.shard, frame)
        return super().fault(message, frame)

    def notify_checkpoint(self, seconds: float) -> None:
        """Asks for a checkpoint when the newest is too old, at a step that no shard reaches before it has heard of it.
        Asks again when `seconds` after that step it is not committed: a shard heard of it too late."""
        view, machine = self.member.view, self.machine
        generation, asked, committed = view.generation, view.asked, view.committed
        if machine is None or generation is None or generation.number != machine.generation:
            return
        if self.recovery.age(committed) < seconds:
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

    # -- idle slots ---------------------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, Push | Empty):
            self._idle.heard.add(event.message.slot)
        super().step(event)

    def _look_at_slots(self) -> None:
        """Takes slots of which nothing comes from their trainers: while all shards serve, it waits for these only."""
        view, machine = self.member.view, self.machine
        waits = machine.phase == "collecting" and not (machine.finished or machine.paused)
        waits = waits and len(view.trainers) > 1 and len(view.pservers) == self.config.pservers
        holders = {slot: (name, view.claims[slot]) for slot, name in view.slots.items() if name in view.trainers}
        at, missing = (machine.generation, machine.version), machine.round.missing() if waits else ()
        for slot in self._idle.look(time.monotonic(), at, missing, holders):
            self._take_slot(slot, *holders[slot])

    def _take_slot(self, slot: int, trainer: str, claim: int) -> None:
        """Takes a slot from a trainer, and puts that into quarantine, so that another gets the slot."""
        member, seconds = self.member, self._idle.timeout
        reason = f"nothing of slot {slot} came to pserver {member.index} for {seconds:.0f} s"
        key, record = member.keys.slot(slot), msgspec.json.encode(Barred(reason, member.id))
        bar = put_op(member.keys.barred(trainer), record, member.view.leases[trainer])
        try:
            taken = member.etcd.txn([create_is(key, claim)], [delete_op(key), bar]).ok
        except EtcdError as error:  # or its lease has ended: then so has its claim
            log.warning("slot %d: %s", slot, error.message)
            return
        if taken:
            text = f"slot {slot} was taken from trainer {trainer}: nothing came of it for {seconds:.0f} s"
            member.events.emit("idle-slot", text, slot=slot, trainer=trainer)

    # -- going back ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        super().follow()
        self._look_at_slots()
        seen, asked = self.view.seen, self.view.seen.asked
        if (wanted := wanted_steps(self.config, seen)) != self._wanted:
            self._wanted = wanted
            self.step(StepsWanted(wanted))
        if asked is not None and asked != self._asked and asked.generation == self.machine.generation:
            self._asked = asked
            self.step(CheckpointAt(asked.step))

    def go_back(self) -> None:
        self.counters["rollbacks"] += 1
        self.counters["steps-repeated"] += max(0, self.machine.version - self.recovery.generation.step)
        self.recovery.load()
        self.buffers.publish(self.recovery.generation.step)
        if self.norms is not None:
            self.norms.connect(self.member.view)
        self.record_metrics(self.recovery.generation.step)
        self.step(Rollback(self.recovery.generation.number, self.recovery.generation.step))

    def epochs_over(self) -> int:
        return self.config.plan.pass_of(self.machine.version)

    def restore(self, generation: Generation) -> None:
        values = self._snapshots.get(generation.step)
        if values is None:
            manifest = self.commits.manifest_of(generation)
            read = self.commits.store.read_part(manifest, self.member.index) if manifest is not None else None
            values = read[0] if read is not None else self.initial_values()
        self.buffers.restore(values)

    # -- effects ------------------------------------------------------------------------------------------------

    def _compute_partials(self, effect: ComputePartials) -> None:
        assert self.norms is not None
        self.buffers.reduce(effect.contributions)
        sums = self.blocks.run("reduce", fetch=(self.norms.partials,)) if self.norms.partials else ()
        payload = byte_view(sums[0].cpu()) if sums else None
        self.step(PartialsReady(effect.step, payload))

    def _apply(self, effect: ApplyRound) -> None:
        """Optimizes; the published copy of the version before stays for trainers that must recompute."""
        if self.norms is not None:
            self.norms.fill(self.blocks.ctx.scope, effect.partials, self.blocks.ctx.device)
        else:
            self.buffers.reduce(effect.contributions)
        if self.options.reduce_block and self.norms is None:
            self.blocks.run(self.options.reduce_block)
        self._take_decision(effect.step)
        for block in self.options.update_blocks:
            self.blocks.run(block)
        self.buffers.publish(effect.step + 1)
        if self.metrics is not None:
            self.metrics.add(effect.step, effect.contributions)
        self.note_update()

    def _skipped(self, effect: RoundSkipped) -> None:
        if self.metrics is not None:
            self.metrics.add(effect.step, effect.contributions, applied=False)
        if effect.nonfinite:
            self._take_decision(effect.step)
            self.leave_out(effect.step + 1)
        else:
            self.buffers.publish(effect.step + 1)
            self.count(Count("empty-rounds", effect.reason))

    def _take_decision(self, step: int) -> None:
        """In the first step behind a validation, takes on the learning rates that follow from it. Trainers have seen
        what was decided, so etcd knows it; the view of this process may be behind."""
        if not self.options.scaled_rates or step not in self.validated:
            return
        kv = self.member.retry_while_leased(lambda: self.member.etcd.get(self.member.keys.decided))
        decided = msgspec.json.decode(kv.value, type=Decided) if kv is not None else Decided()
        if decided.step != step:
            raise LeaseLost(
                f"etcd knows what was decided after step {decided.step}, and this step is behind {step}: etcd was "
                "restored from a backup, or everyone goes back",
                rule="etcd-lease",
                help="start the process again",
            )
        self.blocks.ctx.scope[RATE_SCALE].fill_(decided.scale)

    def _send_shard(self, effect: SendShard) -> None:
        assert self.norms is not None
        self.norms.send(self.member.view, effect)

    def _request_rollback(self, effect: RequestRollback) -> None:
        generation = self.member.view.generation
        if generation is not None and generation.number == effect.generation:
            raised = self.recovery.when_storage_answers(lambda: self.commits.rollback(effect.reason))
            self.member.events.emit(
                "rollback",
                f"generation {raised.number}: everyone returns to step {raised.step} ({effect.reason})",
                step=raised.step,
            )

    def _exchanges(self) -> bool:
        """True if shards exchange partial sums each round (clipping by global norm)."""
        programs = [self.member.job.pserver_program(i) for i in range(self.config.pservers)]
        return any("reduce" in p.blocks and "order" in p.blocks["reduce"].attrs for p in programs)
