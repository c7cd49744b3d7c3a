"""A shard's services that sync and async mode share: the state machine between the socket and the blocks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from graphft.ir import Kind
from graphft.ops.context import ServeOptions, ServerPort
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.writer import Saver
from graphft.runtime.coordination.job_files import fetch_metrics, put_metrics
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Committed, Generation, ShardStatus
from graphft.runtime.coordination.result_files import epoch_of_table
from graphft.runtime.etcd import EtcdError
from graphft.runtime.process.metric_table import TableWriter
from graphft.runtime.process.progress import rate
from graphft.runtime.protocol.events import Count, PeerLeft, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.messages import AnyMessage, BatchPush, Parameters, Push
from graphft.runtime.protocol.round import Contribution, means_of
from graphft.runtime.roles.logs import tell_event
from graphft.runtime.roles.programs import learning_rates_of
from graphft.runtime.roles.pserver.recovery import Recovery
from graphft.runtime.roles.pserver.shard_buffers import ShardBuffers
from graphft.runtime.roles.role import Blocks, SeenView
from graphft.runtime.roles.session import ProcessEnd
from graphft.runtime.transport import ServerTransport
from graphft.transpiler.layout import SKIPPED_STEPS

log = logging.getLogger("graphft")

UPLOAD_PART = 0.05
"""Uploads of the table, which is one file, take at most this part of the time."""


class StepMetrics:
    """`names`: of the reported values; `version`: the shard's, so many rows there are. `newest`: of the newest step."""

    def __init__(self, member: Member, job_dir: Path, names: Sequence[str], version: int) -> None:
        self.member, self.job_dir, self.names = member, job_dir, tuple(names)
        self.newest: dict[str, float] = {}
        with contextlib.suppress(OSError):  # then the rows are lacking: nothing else depends on them
            fetch_metrics(job_dir)
        self._table = TableWriter(job_dir, names, version)
        self._next_upload = 0.0
        self._recorded: int | None = None
        """Epochs that etcd knows. A process that begins tells the newest one again."""

    def add(self, step: int, contributions: Sequence[Contribution], applied: bool = True) -> None:
        """Adds the row of a step: of contributions in slot order, which are not `applied` if it is discarded."""
        told = [(one.samples, one.values) for one in contributions if one.values]
        samples, values = sum(count for count, _ in told), means_of(told) or (math.nan,) * len(self.names)
        self._table.append(step, samples if applied else -samples, values)
        if told:
            self.newest = dict(zip(self.names, values, strict=True))

    def cut(self, version: int) -> None:
        """The shard has gone back to this version."""
        self._table.cut(version)
        self._recorded = None

    def record(self, over: int) -> None:
        """Tells etcd of the epochs that are over. Called now and then: it goes on where etcd did not answer."""
        if self._table.waiting:
            self._table.write()
        recorded = max(0, over - 1) if self._recorded is None else min(self._recorded, over)
        while recorded < over and not self._table.waiting:
            try:
                found = epoch_of_table(self.job_dir, self.member.config, recorded)
                self.member.etcd.put(self.member.keys.pass_metrics(recorded), msgspec.json.encode(found))
            except (EtcdError, OSError, ValueError):
                break
            recorded += 1
        self._recorded = recorded

    def sync(self) -> None:
        """Returns when the rows so far are on the disk, and mostly in the storage: a checkpoint that has these steps
        follows. Called by the saver's thread. Raises OSError."""
        self._table.sync()
        began = time.monotonic()
        if began >= self._next_upload:
            with contextlib.suppress(OSError):  # a later one has all
                put_metrics(self.job_dir)
            self._next_upload = began + (time.monotonic() - began) / UPLOAD_PART

    def close(self) -> None:
        self._table.close()


POLL_SECONDS = 0.25
LOOK_SECONDS = 0.005
"""Between two looks at the view and the clock, while messages come."""


@dataclass(eq=False, repr=False)
class ShardServer(ServerPort):
    """Used by the shard's main thread, which owns buffers, socket and machine. Subclasses make the machine in `serve`,
    and add what carries its effects out to `effects`."""

    member: Member
    blocks: Blocks
    end: ProcessEnd
    view: SeenView
    transport: ServerTransport
    commits: Commits
    saver: Saver
    job_dir: Path

    def __post_init__(self) -> None:
        member, blocks = self.member, self.blocks
        self.config = member.config
        self.options: ServeOptions
        self.machine: Any = None
        self.leaving = False
        """This process was asked to go; set by a signal's handler."""
        self.buffers = ShardBuffers(blocks.ctx.scope)
        self.recovery = Recovery(member, self.end, self.commits, self.job_dir, self.restore)
        self.counters: Counter[str] = Counter()
        self.effects: dict[type, Callable[[Any], None]] = {
            Reply: self._reply,
            Count: self.count,
            TakeCheckpoint: lambda _: self.take_checkpoint(),
        }
        self._events: deque[Event] = deque()
        """For the machine to take in; the first is at work."""
        self._trainers: frozenset[str] = frozenset()
        self._looked, self._unseen = 0.0, False
        """When the view and the clock were looked at, and whether messages came since."""
        self._rounds: deque[float] = deque(maxlen=51)
        self._applied = 0
        self._checkpoint_seconds = 0.0
        self._learning_rates = learning_rates_of(blocks.program)
        self.metrics: StepMetrics | None = None
        """Shard 0's."""

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        self.buffers.make_bucket(index, names, reduce)

    def record_metrics(self, version: int) -> None:
        """Begins to record the job's metrics, or goes back to this version."""
        if self.metrics is not None:
            self.metrics.cut(version)
        elif self.options.metrics:
            self.metrics = StepMetrics(self.member, self.job_dir, self.options.metrics, version)
            self.saver.before = self.metrics.sync

    def epochs_over(self) -> int:
        """Returns how many epochs are wholly applied."""
        raise NotImplementedError

    def generation_in(self, view: JobView) -> Generation | None:
        """Returns the generation that this shard goes by."""
        return view.generation

    def committed_in(self, view: JobView) -> Committed | None:
        """Returns the newest committed checkpoint that this shard goes by."""
        return view.committed

    def go_back(self) -> None:
        """Goes back to where the generation of `recovery` began."""
        raise NotImplementedError

    def restore(self, generation: Generation) -> None:
        """Takes on the state that this generation began at. Raises DamagedCheckpoint, StorageUnavailable."""
        raise NotImplementedError

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Returns this shard's variables before the first step."""
        program = self.blocks.program
        return {v.name: program.values[v.name] for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)}

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        """Has the machine take in an event, and carries out what it decides. An event that comes of an effect waits
        until the effects before it are carried out, all of them."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events:
                effects = self.machine.step(self._events[0], time.monotonic())
                tell_event(self._events[0], effects)
                for effect in effects:
                    self.effects[type(effect)](effect)
                self._events.popleft()
        finally:
            self._events.clear()

    def serve(self, options: ServeOptions) -> None:
        self.options = options
        self.commits.ensure_generation(resume=False)  # load_check_point did, if there was one to resume
        self.begin()
        self.member.progress.begin("serving")
        while not self.over():
            self.serve_once()

    def begin(self) -> None:
        """Makes the machine, at the generation of `recovery`."""
        raise NotImplementedError

    def serve_once(self) -> None:
        self.end.check_lease()
        self.member.progress.beat()
        received = self.transport.poll(LOOK_SECONDS if self._unseen else POLL_SECONDS)
        for peer, message, frame in received:
            self.step(Received(peer.decode("latin-1"), message, frame, self.fault(message, frame)))
        now = time.monotonic()
        self._unseen = bool(received) and now < self._looked + LOOK_SECONDS
        if self._unseen:
            return
        self._looked = now
        self.follow()
        self.step(Tick())
        if self.metrics is not None:
            self.metrics.record(self.epochs_over())

    def fault(self, message: AnyMessage, frame: memoryview | None) -> str:
        """Says what is wrong with a message's frame, before anything looks into it; "" if nothing is."""
        return self.buffers.fault(message.bucket, frame) if isinstance(message, (Push, BatchPush)) else ""

    def follow(self) -> None:
        """Takes in what changed in etcd; drops what the machine keeps of trainers that are gone."""
        mine, generation = self.machine.generation, self.generation_in(self.view.seen)
        committed = self.committed_in(self.view.seen)
        self.recovery.overtake(mine, self.saver.committed_in(mine), generation, committed)
        self.saver.look_after_part(mine, committed)
        if generation is not None and generation.number > mine:
            self.recovery.follow(generation, self.machine.version)
            self.go_back()
        trainers = self.member.view.trainers.keys()
        if gone := self._trainers - trainers:
            for peer in [p for p, name in self.machine.peers.items() if name in gone]:
                self.step(PeerLeft(peer))
        if gone or len(trainers) > len(self._trainers):
            self._trainers = frozenset(trainers)

    def over(self) -> bool:
        """True when the job is over, or this process is to go. Shard 0 ends the job: once the last step is committed
        and every validation is over, it exports the model."""
        self.saver.check()
        if self.leaving or self.member.over():
            return True
        view = self.member.view
        committed = view.committed
        end = view.decided.step if view.decided.stopped else self.config.total_steps
        done = committed is not None and committed.step >= end and not view.validating
        if committed is not None and done and self.member.index == 0:
            self.saver.finish(committed)
        return False

    # -- effects ------------------------------------------------------------------------------------------------

    def note_update(self) -> None:
        """Counts applied gradients, for the rate that displays show."""
        self._rounds.append(time.monotonic())
        self._applied += 1

    def leave_out(self, version: int, keep: Collection[int] = ()) -> None:
        """Counts a step (async: a batch) that is not finite, for the schedule too; it changes nothing else."""
        if self.options.schedule_block:
            self.blocks.run(self.options.schedule_block)
        self.blocks.run(self.options.skip_block)
        self.buffers.publish(version, keep)
        self._applied += 1

    def _reply(self, effect: Reply) -> None:
        peer, message = effect.peer.encode("latin-1"), effect.message
        if isinstance(message, Parameters):
            copy = self.buffers.published(message.bucket, message.version)
            copy.sends.append(self.transport.send(peer, message, copy.frame))
        else:
            self.transport.send(peer, message)

    def count(self, effect: Count) -> None:
        self.counters[effect.name] += 1
        log.debug("%s: %s", effect.name, effect.reason)

    def take_checkpoint(self) -> None:
        """Copies the state, for which steps wait."""
        if self.options.checkpoint_block:
            began = time.monotonic()
            self.blocks.run(self.options.checkpoint_block)
            self._checkpoint_seconds += time.monotonic() - began

    # -- for people ---------------------------------------------------------------------------------------------

    @property
    def rate(self) -> float:
        """Returns rounds per second of late."""
        rounds = list(self._rounds)
        return rate(len(rounds) - 1, rounds[-1] - rounds[0]) if rounds else 0.0

    def status(self) -> msgspec.Struct:
        machine, scope = self.machine, self.blocks.ctx.scope
        return ShardStatus(
            machine.version if machine else 0,
            machine.generation if machine else 0,
            self.rate,
            self._applied,
            {**self.counters, **self.saver.counters, **self.transport.counters},
            skipped_steps=int(scope.get(SKIPPED_STEPS, 0)),
            checkpoint_seconds=round(self._checkpoint_seconds, 4),
            learning_rates={name: float(scope[name]) for name in self._learning_rates if name in scope},
            checkpoint_age=self._checkpoint_age(),
            metrics=self.metrics.newest if self.metrics is not None else {},
        )

    def _checkpoint_age(self) -> float | None:
        committed = self.committed_in(self.member.view)
        age = self.recovery.age(committed) if committed is not None else math.inf
        return round(age, 1) if math.isfinite(age) else None
