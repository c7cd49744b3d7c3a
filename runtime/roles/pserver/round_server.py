"""What a sync shard serves: it closes a step when the contributions of all slots are in."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from graphft.ops.context import ServeOptions
from graphft.runtime.checkpoint.metadata import QUEUE, VALIDATE, sync_queue
from graphft.runtime.coordination.job_view import wanted_steps
from graphft.runtime.coordination.records import Asked, Generation
from graphft.runtime.etcd import LeaseLost
from graphft.runtime.protocol.async_shard import AsyncShardEvent
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
    RoundApplied,
    RoundSkipped,
    SendShard,
    ShardEvent,
    Started,
    StepsWanted,
    SyncOptions,
)
from graphft.runtime.protocol.messages import AnyMessage, Empty, Partials, Push
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.roles.pserver.idle_slot_watch import IdleSlotWatch
from graphft.runtime.roles.pserver.norms import PartialSumsExchange
from graphft.runtime.roles.pserver.shard_server import ShardServer
from graphft.runtime.transport import Limits
from graphft.runtime.transport.buffers import byte_view
from graphft.transpiler.layout import RATE_SCALE
from graphft.transpiler.validation import validated_steps

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
        self.idle_slots: IdleSlotWatch
        self.norms: PartialSumsExchange | None = None
        self.validated: frozenset[int] = frozenset()
        """After how many steps the model is validated."""
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}
        self._wanted = self.config.total_steps
        """Steps that are wanted, as the machine was told last."""
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

    def close(self) -> None:
        super().close()
        if self.norms is not None:
            self.norms.close()

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def load_check_point(self) -> None:
        """Joins the job's generation: as it is on a first start; raising the generation on a restart."""
        self.recovery.when_storage_answers(self.recovery.join)
        if self.recovery.restarted:
            self.member.events.emit(
                "restarted",
                f"pserver {self.member.index} is back; generation {self.recovery.generation.number} goes on "
                f"from step {self.recovery.generation.step}",
                step=self.recovery.generation.step,
            )
        self.recovery.load()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values; the saver writes and commits them while steps go on."""
        values = self.buffers.clone(names)
        step = self.machine.version
        self._snapshots = {s: v for s, v in self._snapshots.items() if s == self.commits_step()} | {step: values}
        queue = sync_queue(self.config.plan, step)
        meta = {QUEUE: queue} | ({VALIDATE: True} if step in self.validated else {})
        self.saver.submit(self.machine.generation, step, values, keep, meta=meta)

    def serve(self, options: ServeOptions) -> None:
        self.options, self.idle_slots = options, IdleSlotWatch(self.member, options.idle_timeout)
        self.validated = validated_steps(self.config.plan, options.validate_every, options.validate_passes)
        self.commits.ensure_generation(resume=False)  # where one was to be gone on with, load_check_point did
        self.buffers.publish(self.recovery.generation.step)
        self.machine = SyncShard(
            SyncOptions(
                options.shard,
                options.shards,
                options.slots,
                tuple(self.buffers.buckets),
                options.total_steps,
                self.member.job.run_id,
                self.member.secret,
                options.checkpoint_every,
                self.validated | frozenset(self.config.plan.start_steps[1:] if options.checkpoint_passes else ()),
                self._exchanges(),
                options.recovery and self.recovery.restarted,
                options.recovery_timeout,
                options.on_barrier_timeout,
                bool(options.skip_block),
                max_peers=self.max_peers,
                values=len(options.metrics),
            ),
            incarnation=self.member.id,
            generation=self.recovery.generation.number,
            version=self.recovery.generation.step,
        )
        if self._exchanges():
            me, block = self.member, self.blocks.program.blocks.get("reduce")
            self.norms = PartialSumsExchange(me.id, me.index, block, self.limits, me.login)
        self.record_metrics(self.machine.version)
        self.step(Started())
        self.member.progress.begin("serving")
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
        view, machine = self.member.view, self.machine
        generation, asked, committed = view.generation, view.asked, view.committed
        if (
            machine is None
            or generation is None
            or generation.number != machine.generation
            or self.recovery.age(committed) < seconds
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

    # -- the loop -----------------------------------------------------------------------------------------------

    def serve_once(self) -> None:
        super().serve_once()
        self.idle_slots.look(self.machine)

    def step(self, event: ShardEvent | AsyncShardEvent) -> None:
        if isinstance(event, Received) and isinstance(event.message, Push | Empty):
            self.idle_slots.heard(event.message.slot)
        super().step(event)

    # -- going back ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        super().follow()
        seen, mine = self.view.seen, self.machine.generation
        generation, asked = seen.generation, seen.asked
        self.recovery.overtake(mine, self.saver.committed_in(mine), generation, seen.committed)
        self.saver.look_after_part(mine, seen.committed)
        if generation is not None and generation.number > self.machine.generation:
            self._go_back(generation)
        if (wanted := wanted_steps(self.config, seen)) != self._wanted:
            self._wanted = wanted
            self.step(StepsWanted(wanted))
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
        self.recovery.generation = generation
        self.recovery.load()
        self.buffers.publish(generation.step)
        if self.norms is not None:
            self.norms.connect(self.member.view)
        self.record_metrics(self.recovery.generation.step)
        self.step(Rollback(self.recovery.generation.number, self.recovery.generation.step))

    def epochs_over(self) -> int:
        return self.config.plan.pass_of(self.machine.version)

    def restore(self, generation: Generation) -> None:
        self.buffers.restore(self._state_at(generation))

    def _state_at(self, generation: Generation) -> Mapping[str, torch.Tensor]:
        if generation.step in self._snapshots:
            return self._snapshots[generation.step]
        manifest = self.commits.manifest_of(generation)
        if manifest is None:
            return self.initial_values()
        return self.commits.store.read_part(manifest, self.member.index)[0]

    def commits_step(self) -> int:
        """Step of the newest committed checkpoint; -1 before the first."""
        committed = self.member.view.committed
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
            self.norms.fill(self.blocks.ctx.scope, effect.partials)
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
        self.step(RoundApplied(effect.generation, effect.step))

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
        """Of the first step behind a validation: from here on learning rates are those that follow from it. Trainers
        have seen what was decided, so etcd knows it; what this process watches may be behind."""
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
        self.norms.send(self.member.view, effect.shard, effect.message, effect.payload)

    def _request_rollback(self, effect: RequestRollback) -> None:
        generation = self.member.view.generation
        if generation is not None and generation.number == effect.generation:
            raised = self.recovery.when_storage_answers(lambda: self.commits.rollback(effect.reason))
            self.member.events.emit(
                "rollback",
                f"generation {raised.number}: everyone returns to step {raised.step} ({effect.reason})",
                step=raised.step,
            )

    def _finished(self, effect: Finished) -> None:
        log.info("reached the last version, %d", effect.step)

    def _exchanges(self) -> bool:
        """Whether shards exchange partial sums each round (clipping by global norm)."""
        programs = [self.member.job.pserver_program(i) for i in range(self.config.pservers)]
        return any("reduce" in p.blocks and "order" in p.blocks["reduce"].attrs for p in programs)
