"""A pserver: one shard of what evolves. Runs its program's blocks around the shard's state machine.

What sync and async shards share: buffers, socket, checkpoints, the job's end. Their loops are in round_pserver and
batch_pserver.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from graphft.errors import UsageError
from graphft.ir import Kind
from graphft.ops.context import ServeOptions
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import MANIFEST, Ages, CheckpointStore, DamagedCheckpoint, StorageUnavailable
from graphft.runtime.checkpoint.writer import Saver
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Committed, Generation, ShardStatus
from graphft.runtime.etcd import EtcdError, Session, Store, absent, put_op
from graphft.runtime.etcd.channel import parse_endpoint
from graphft.runtime.protocol.async_shard import AsyncShardEvent
from graphft.runtime.protocol.events import Count, PeerLeft, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.messages import AnyMessage, BatchPush, Parameters, Push
from graphft.runtime.protocol.sync_events import ShardEvent
from graphft.runtime.queue.finished_passes import close_passes
from graphft.runtime.roles.limits import pserver_limits
from graphft.runtime.roles.logs import tell_event
from graphft.runtime.roles.pserver.shard_buffers import ShardBuffers, frame_fault
from graphft.runtime.roles.pserver.shard_proof import prove_shard
from graphft.runtime.roles.role import Role, log
from graphft.runtime.transport import make_server
from graphft.runtime.transport.address import advertise_host, endpoint, listen_host, split_endpoint

if TYPE_CHECKING:
    from graphft.transpiler import Job

T = TypeVar("T")
POLL_SECONDS = 0.25
STORAGE_SECONDS, MAX_STORAGE_SECONDS, REMIND_SECONDS = 0.5, 5.0, 60.0
"""Pauses between tries to read checkpoints, and between messages that say so."""
SPARE_SECONDS = 0.2
LOAD_LIMITS = 10
"""Restoring a checkpoint may take so many times as long as anything else that the main thread does."""
SPARE_PEERS = 64
"""Trainers that stand by, probes, and those that are gone, but whose leases have not ended."""


def claim_index(etcd: Store, keys: Keys, pservers: int, ttl: int) -> tuple[int, Session | None] | None:
    """The lowest index that no live pserver has or is about to take, claimed on the lease of a new session.

    While all are taken it waits as a spare, which has no lease. `ttl`: of the lease in seconds, 0 for none.
    None: the job is over.
    """
    told = False
    while (state := etcd.get(keys.state)) is None or state.value == b"running":
        taken = {kv.key for prefix in (keys.pservers, keys.index_claims) for kv in etcd.range(prefix).kvs}
        for index in range(pservers):
            if not {keys.pserver(index), keys.index(index)} & taken:
                session = Session(etcd, ttl) if ttl else None
                if _claim(etcd, keys, index, session):
                    if session is not None:
                        session.keep(etcd.urls)
                    return index, session
                if session is not None:
                    session.close()
        if not told:
            log.info("all %d pservers are alive; waiting to take the place of one that dies", pservers)
            told = True
        time.sleep(SPARE_SECONDS)
    return None


def _claim(etcd: Store, keys: Keys, index: int, session: Session | None) -> bool:
    claim = put_op(keys.index(index), uuid.uuid4().hex.encode(), session.lease if session is not None else 0)
    return etcd.txn([absent(keys.pserver(index)), absent(claim.key)], [claim], token=claim.key).ok


class Pserver(Role):
    """One shard's process. The main thread owns memory, socket and state machine; `Saver` writes files beside it.

    Subclasses make the machine in `serve`, and give what carries its effects out in `effects`.
    """

    kind = "pserver"

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int, session: Session | None = None) -> None:
        if not 0 <= index < job.config.pservers:
            raise UsageError(
                f"there is no pserver {index}: the job has {job.config.pservers}",
                rule="role",
                help=f"indices are 0 to {job.config.pservers - 1}",
            )
        super().__init__(job, job_dir, job.pserver_program(index), etcd, index, session)
        self.limits = pserver_limits(job.programs.pservers, index, job.config.trainers)
        self.transport = make_server(f"pserver {index}", self.limits, self.login)
        self.ctx.server = self
        self.address = self._listen([parse_endpoint(e).host for e in etcd.endpoints])
        self.buffers = ShardBuffers(self.ctx.scope)
        self.commits = self.make_commits()
        self.store = self.commits.store
        self.saver = self.make_saver()
        self.generation = Generation()
        self.restarted = False
        self.counters: Counter[str] = Counter()
        self.machine: Any = None
        self._events: deque[ShardEvent | AsyncShardEvent] = deque()
        """What the machine is to take in; the first is at work."""
        self.options: ServeOptions
        self.effects: dict[type, Callable[[Any], None]] = {
            Reply: self._reply,
            Count: self.count,
            TakeCheckpoint: self._checkpoint,
        }
        self._trainers: frozenset[str] = frozenset()
        self._rounds: list[float] = []
        self._applied = 0
        self._ages = Ages()
        for name, value in self.program.values.items():
            self.ctx.scope[name] = value.detach().clone()
        self.open_session()

    def _listen(self, etcd_hosts: Sequence[str]) -> str:
        """Listens where the way to etcd begins; returns the address for the others."""
        _, port = split_endpoint(self.transport.bind(listen_host(etcd_hosts)))
        return endpoint(advertise_host(etcd_hosts), port)

    def make_commits(self) -> Commits:
        """The commit protocol of this shard's checkpoints."""
        store = CheckpointStore(self.job_dir / "checkpoints")
        return Commits(self.etcd, self.keys, store, self.index, self.config.pservers, self.job.run_id, self.id)

    def make_saver(self) -> Saver:
        return Saver(self.commits, self.events, self.job, self.job_dir, self.close_records)

    def close_records(self) -> None:
        close_passes(self.etcd, self.keys, self.config.plan)

    def run(self) -> None:
        """From start to the end of the job."""
        self.start_daemon()
        try:
            prove_shard(self)
            self.run_block("init")
            self.run_block("serve")
        finally:
            self.saver.close()
            if self.session is None:  # no lease takes the report away: it is what the launcher reads at the end
                with contextlib.suppress(EtcdError):
                    self.report_status(last=True)
            self.close()
            self.transport.close()

    def wake(self) -> None:
        transport = getattr(self, "transport", None)  # the watch may call before the constructor is through
        if transport is not None:
            transport.wake()

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        self.buffers.make_bucket(index, names, reduce)

    def load_check_point(self) -> None:
        raise NotImplementedError

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        raise NotImplementedError

    def serve(self, options: ServeOptions) -> None:
        raise NotImplementedError

    def notify_checkpoint(self, seconds: float) -> None:
        raise NotImplementedError

    def age(self, committed: Committed | None) -> float:
        """Seconds since the newest checkpoint was written; without any, since the job was made."""
        return self._ages.of(
            self.store.root / committed.checkpoint / MANIFEST if committed is not None else self.job_dir / "job.json"
        )

    def initial_values(self) -> dict[str, torch.Tensor]:
        """What this shard's variables are before the first step."""
        return {v.name: self.program.values[v.name] for v in self.program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)}

    def join_generation(self) -> None:
        """Joins the shard's generation: as it is on a first start; raising the generation on a restart.

        And before, if etcd was restored from a backup: the job goes on from what the disk holds.
        """
        self.commits.ensure_generation()
        behind = self.commits.catch_up()
        if behind is not None:
            self.events.emit(
                "etcd-behind",
                f"etcd does not know of the newest checkpoint (all was ended before it was "
                "told, or it was restored from a backup): "
                f"generation {behind.number} begins at step {behind.step}, where the newest whole "
                "checkpoint is",
                step=behind.step,
            )
        self.generation, self.restarted = self.commits.begin()
        if self.restarted and behind is None:
            committed = self.commits.committed()
            self.generation = self.commits.rollback(f"pserver {self.index} was restarted")
            if committed is not None and self.generation.step < committed.step:
                self.events.emit(
                    "damaged-checkpoint",
                    f"the checkpoint of step {committed.step}, which was committed, "
                    f"is not in {self.store.root}, or is damaged: going back to step {self.generation.step}",
                    step=self.generation.step,
                )

    def when_storage_answers(self, call: Callable[[], T]) -> T:
        """`call()`, again while the checkpoints' storage cannot be used. It is safe to repeat.

        An unreadable checkpoint is no damaged one: it is no reason to go back to an older one.
        """
        told, pause, began = float("-inf"), STORAGE_SECONDS, time.monotonic()
        while True:
            try:
                return call()
            except StorageUnavailable as error:
                self.fence_if_lost()
                if self.view.over:
                    raise
                if time.monotonic() - told > REMIND_SECONDS:
                    told = time.monotonic()
                    self.events.emit(
                        "storage-unavailable",
                        f"pserver {self.index} has waited for its checkpoints for "
                        f"{told - began:.0f} s: {error.message}. {error.help}",
                        shard=self.index,
                    )
            self.progress.beat()  # it waits, and says so
            time.sleep(pause)
            pause = min(2 * pause, MAX_STORAGE_SECONDS)

    def load(self) -> None:
        """Takes on the state that the generation began at; goes further back if its file is damaged."""
        self.when_storage_answers(self._load)

    def _load(self) -> None:
        while True:
            try:
                with self.progress.within(LOAD_LIMITS * self.progress.usual, "restoring a checkpoint"):
                    self.restore(self.generation)
                return
            except DamagedCheckpoint as error:
                self.events.emit(
                    "damaged-checkpoint",
                    f"checkpoint of step {self.generation.step} is damaged, going back further: {error.message}",
                )
                self.generation = self.commits.rollback("damaged checkpoint", below=self.generation.step)

    def restore(self, generation: Generation) -> None:
        """Takes on the state that this generation began at. Raises DamagedCheckpoint, StorageUnavailable."""
        raise NotImplementedError

    def overtake(self, generation: Generation | None) -> None:
        """Etcd is older than this process, which lives on: it was restored meanwhile. A view that is behind looks the
        same, so etcd itself is asked. `generation`: the shard's, as it is watched."""
        if generation is not None and generation.number < self.machine.generation:
            raised = self.when_storage_answers(lambda: self.commits.overtake(self.machine.generation))
            if raised is not None:
                self.events.emit(
                    "etcd-behind",
                    f"etcd was restored from a backup while the job runs: generation "
                    f"{raised.number} begins at step {raised.step}",
                    step=raised.step,
                )

    # -- the loop -----------------------------------------------------------------------------------------------

    def step(self, event: ShardEvent | AsyncShardEvent) -> None:
        """Has the machine take in an event, and carries out what it decides.

        An event that comes of an effect waits until the effects before it are carried out, all of them.
        """
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

    def serve_once(self) -> None:
        self.fence_if_lost()
        self.progress.beat()
        for peer, message, frame in self.transport.poll(POLL_SECONDS):
            self.step(Received(peer.decode("latin-1"), message, frame, self.fault(message, frame)))
        self.follow()
        self.step(Tick())

    def fault(self, message: AnyMessage, frame: memoryview | None) -> str:
        """What is wrong with a message's frame, before anything looks into it; "" if nothing is."""
        if isinstance(message, (Push, BatchPush)):
            return frame_fault(self.buffers.buckets.get(message.bucket), frame)
        return ""

    def follow(self) -> None:
        """Takes in what changed in etcd."""
        self._forget(frozenset(self.view.trainers))

    def _forget(self, trainers: frozenset[str]) -> None:
        """Drops what the machine keeps of trainers that are gone. A peer is one connection of a trainer."""
        gone, self._trainers = self._trainers - trainers, trainers
        for peer in [p for p in self.machine.peers if self.machine.peers.name(p) in gone] if gone else ():
            self.step(PeerLeft(peer))

    @property
    def max_peers(self) -> int:
        """Names of peers that the machine knows at once: many more than a job has."""
        return SPARE_PEERS + 4 * (self.config.trainers + self.config.pservers)

    def over(self) -> bool:
        """Whether the job is. Shard 0 ends it: once the last step is committed, it exports the model."""
        self.saver.check()
        if super().over():
            return True
        committed = self.view.committed
        if committed is not None and committed.step >= self.config.total_steps and self.index == 0:
            self.saver.finish(committed)
        return False

    def run_optimizer(self, version: int, keep: Collection[int] = ()) -> None:
        """Applies the gradients that lie in the buckets' sums, and publishes the values as `version`.

        Copies of the versions in `keep` stay.
        """
        if self.options.schedule_block:
            self.run_block(self.options.schedule_block)
        for block in self.options.optimize_blocks:
            self.run_block(block)
        self.buffers.publish(version, keep)
        self._rounds = [*self._rounds[-50:], time.monotonic()]
        self._applied += 1

    # -- effects ------------------------------------------------------------------------------------------------

    def _reply(self, effect: Reply) -> None:
        peer, message = effect.peer.encode("latin-1"), effect.message
        if isinstance(message, Parameters):
            frame = self.buffers.frame(message.bucket, message.version)
            self.buffers.pin(message.bucket, message.version, self.transport.send(peer, message, frame))
        else:
            self.transport.send(peer, message)

    def count(self, effect: Count) -> None:
        self.counters[effect.name] += 1
        log.debug("%s: %s", effect.name, effect.reason)

    def _checkpoint(self, effect: TakeCheckpoint) -> None:
        if self.options.checkpoint_block:
            self.run_block(self.options.checkpoint_block)

    @property
    def at_step(self) -> int | None:
        return self.machine.version if self.machine is not None else None

    def story(self) -> list[str]:
        return self.machine.story.of() if self.machine is not None else []

    @property
    def rate(self) -> float:
        """Rounds per second of late."""
        rounds = self._rounds
        return (len(rounds) - 1) / (rounds[-1] - rounds[0]) if len(rounds) > 1 else 0.0

    def status(self) -> msgspec.Struct:
        machine = self.machine
        return ShardStatus(
            machine.version if machine else 0,
            machine.generation if machine else 0,
            self.rate,
            self._applied,
            {**self.counters, **self.saver.counters, **self.transport.counters},
        )
