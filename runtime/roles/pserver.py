"""A pserver: one shard of what evolves. Runs its program's blocks around the shard's state machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.runtime.checkpoint import CheckpointStore, DamagedCheckpoint
from graphft.runtime.commit import Commits, Epoch
from graphft.runtime.etcd import Etcd
from graphft.runtime.etcd.model import Store
from graphft.runtime.keys import Keys
from graphft.runtime.memory import ShardMemory, frame_fault
from graphft.runtime.protocol.events import Count, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.messages import Bucket, Push
from graphft.runtime.protocol.shard_sync import SyncShard
from graphft.runtime.protocol.sync_events import (
    ApplyRound,
    ComputePartials,
    Finished,
    PartialsReady,
    RequestRollback,
    Rollback,
    RoundApplied,
    RoundSkipped,
    SendShard,
    Started,
    SyncOptions,
)
from graphft.runtime.roles.base import Role, log
from graphft.runtime.roles.norms import NormExchange
from graphft.runtime.saver import Saver
from graphft.runtime.status import ShardStatus
from graphft.runtime.transport import ZmqServer, advertise_host
from graphft.runtime.transport.buffers import byte_view

if TYPE_CHECKING:
    from graphft.transpiler import Job

POLL_SECONDS = 0.25


def free_index(etcd: Store, keys: Keys, pservers: int) -> int:
    """The lowest index that no live pserver holds; the last one, to wait for, when all are held."""
    taken = {int(kv.key.removeprefix(keys.pservers)) for kv in etcd.range(keys.pservers, keys_only=True).kvs}
    return next((i for i in range(pservers) if i not in taken), pservers - 1)


class Pserver(Role):
    """One shard's process. The main thread owns memory, socket and state machine; `Saver` writes files beside it."""

    kind = "pserver"

    def __init__(self, job: Job, job_dir: Path, etcd: Etcd, index: int) -> None:
        if not 0 <= index < job.config.pservers:
            raise GraphftError(f"there is no pserver {index}: the job has {job.config.pservers}", rule="role",
                               help=f"indices are 0 to {job.config.pservers - 1}")
        self.transport = ZmqServer()
        super().__init__(job, job_dir, job.pserver_program(index), etcd, index)
        self.address = self.transport.bind(advertise_host())
        self.memory = ShardMemory(self.ctx.scope)
        self.store = CheckpointStore(self.job_dir / "checkpoints")
        self.commits = Commits(etcd, self.keys, self.store, index, self.config.pservers, job.hash, self.id)
        self.saver = Saver(self.commits, self.events, job, self.job_dir)
        self.epoch = Epoch()
        self.restarted = False
        self.counters: Counter[str] = Counter()
        self.machine: SyncShard | None = None
        self.norms: NormExchange | None = None
        self.options: Mapping[str, Any] = {}
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}
        self._rounds: list[float] = []
        for name, value in self.program.values.items():
            self.ctx.scope[name] = value.detach().clone()

    def run(self) -> None:
        """From start to the end of the job."""
        self.ctx.server = self
        self.start_daemon()
        try:
            self.run_block("init")
            self.run_block("serve")
        finally:
            self.saver.close()
            self.close()
            self.transport.close()
            if self.norms is not None:
                self.norms.close()

    def wake(self) -> None:
        self.transport.wake()

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        self.memory.make_bucket(index, names, reduce)

    def load_check_point(self) -> None:
        """Joins the job's epoch: as it is on a first start; raising the generation on a restart."""
        self.epoch, self.restarted = self.commits.begin()
        if self.restarted:
            self.epoch = self.commits.rollback(f"pserver {self.index} was restarted")
            self.events.emit("restarted", f"pserver {self.index} is back; generation {self.epoch.generation} goes on "
                                          f"from step {self.epoch.step}", step=self.epoch.step)
        self._load()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values; the saver writes and commits them while steps go on."""
        assert self.machine is not None
        values = self.memory.clone(names)
        step = self.machine.version
        self._snapshots = {s: v for s, v in self._snapshots.items() if s == self.commits_step()} | {step: values}
        self.saver.submit(self.machine.generation, step, values, keep)

    def serve(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.commits.ensure_epoch()
        self.memory.publish(self.epoch.step)
        self.machine = SyncShard(
            SyncOptions(self.index, options["shards"], options["slots"], tuple(self.memory.buckets),
                        options["total_steps"], self.config.name, self.job.hash, options["checkpoint_every"],
                        self._exchanges(), options["recovery"] and self.restarted, options["recovery_timeout"],
                        options["on_barrier_timeout"]),
            incarnation=self.id, generation=self.epoch.generation, version=self.epoch.step)
        if self._exchanges():
            self.norms = NormExchange(self.id, self.index, self.program.blocks.get("reduce"))
        self._perform(self.machine.step(Started(), time.monotonic()))
        while not self._over():
            self._serve_once()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _serve_once(self) -> None:
        assert self.machine is not None
        for peer, message, frame in self.transport.poll(POLL_SECONDS):
            fault = ""
            if isinstance(message, Push) and message.bucket in self.memory.buckets:
                fault = frame_fault(self.memory.buckets[message.bucket], frame)
            event = Received(peer.decode("latin-1"), message, frame, fault)
            self._perform(self.machine.step(event, time.monotonic()))
        self._follow_epoch()
        self._perform(self.machine.step(Tick(), time.monotonic()))

    def _over(self) -> bool:
        """Whether the job is. Shard 0 ends it: once the last step is committed, it exports the model."""
        self.saver.check()
        view = self.view
        if view.state == "failed":
            raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events")
        committed = view.committed
        if committed is not None and committed.step >= self.config.total_steps and self.index == 0 and not view.over:
            self.saver.finish(committed)
        return view.over

    def _follow_epoch(self) -> None:
        """Goes back to where a newer generation began."""
        epoch = self.view.epoch
        assert self.machine is not None
        if epoch is None or epoch.generation <= self.machine.generation:
            return
        log.info("generation %d: back from version %d to step %d (%s)", epoch.generation, self.machine.version,
                 epoch.step, epoch.reason)
        self.counters["rollbacks"] += 1
        self.counters["steps-repeated"] += max(0, self.machine.version - epoch.step)
        self.epoch = epoch
        self._load()
        self.memory.publish(epoch.step)
        if self.norms is not None:
            self.norms.connect(self.view)
        self._perform(self.machine.step(Rollback(self.epoch.generation, self.epoch.step), time.monotonic()))

    def _load(self) -> None:
        """Fills the memory with the state that the epoch began at; goes further back if its file is damaged."""
        while True:
            try:
                self.memory.restore(self._state_at(self.epoch))
                return
            except DamagedCheckpoint as error:
                self.events.emit("damaged-checkpoint", f"checkpoint of step {self.epoch.step} is damaged, "
                                                       f"going back further: {error.message}")
                self.epoch = self.commits.rollback("damaged checkpoint", below=self.epoch.step)

    def _state_at(self, epoch: Epoch) -> Mapping[str, torch.Tensor]:
        if epoch.step in self._snapshots and self.machine is not None:
            return self._snapshots[epoch.step]
        manifest = self.commits.manifest_of(epoch)
        if manifest is None:
            kinds = (Kind.PARAM, Kind.BUFFER, Kind.STATE)
            return {v.name: self.program.values[v.name] for v in self.program.of_kind(*kinds)}
        return self.store.read_part(manifest, self.index)[0]

    def commits_step(self) -> int:
        """Step of the newest committed checkpoint; -1 before the first."""
        committed = self.view.committed
        return committed.step if committed is not None else -1

    # -- effects ------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Any]) -> None:
        for effect in effects:
            self._EFFECTS[type(effect)](self, effect)

    def _reply(self, effect: Reply) -> None:
        peer, message = effect.peer.encode("latin-1"), effect.message
        if isinstance(message, Bucket):
            frame = self.memory.frame(message.bucket, message.version)
            self.memory.lend(message.bucket, message.version, self.transport.send(peer, message, frame))
        else:
            self.transport.send(peer, message)

    def _count(self, effect: Count) -> None:
        self.counters[effect.name] += 1
        log.debug("%s: %s", effect.name, effect.reason)

    def _compute_partials(self, effect: ComputePartials) -> None:
        assert self.machine is not None and self.norms is not None
        self.memory.reduce(effect.contributions)
        sums = self.run_block("reduce", fetch=(self.norms.partials,)) if self.norms.partials else ()
        payload = byte_view(sums[0]) if sums else None
        self._perform(self.machine.step(PartialsReady(effect.generation, effect.step, payload), time.monotonic()))

    def _apply(self, effect: ApplyRound) -> None:
        """One round's optimization; the published copy of the version before stays for whoever must recompute."""
        assert self.machine is not None
        if self.norms is not None:
            self.norms.fill(self.ctx.scope, effect.partials)
        else:
            self.memory.reduce(effect.contributions)
        if self.options["reduce_block"] and self.norms is None:
            self.run_block(self.options["reduce_block"])
        if self.options["schedule_block"]:
            self.run_block(self.options["schedule_block"])
        for block in self.options["optimize_blocks"]:
            self.run_block(block)
        self.memory.publish(effect.step + 1)
        self._rounds = [*self._rounds[-50:], time.monotonic()]
        self._perform(self.machine.step(RoundApplied(effect.generation, effect.step), time.monotonic()))

    def _skipped(self, effect: RoundSkipped) -> None:
        self.memory.publish(effect.step + 1)
        self._count(Count("empty-rounds", effect.reason))

    def _send_shard(self, effect: SendShard) -> None:
        assert self.norms is not None
        self.norms.send(self.view, effect.shard, effect.message, effect.payload)

    def _checkpoint(self, effect: TakeCheckpoint) -> None:
        if self.options["checkpoint_block"]:
            self.run_block(self.options["checkpoint_block"])

    def _request_rollback(self, effect: RequestRollback) -> None:
        epoch = self.view.epoch
        if epoch is not None and epoch.generation == effect.generation:
            raised = self.commits.rollback(effect.reason)
            self.events.emit("rollback", f"generation {raised.generation}: everyone returns to step {raised.step} "
                                         f"({effect.reason})", step=raised.step)

    def _finished(self, effect: Finished) -> None:
        log.info("reached the last version, %d", effect.step)

    _EFFECTS: dict[type, Callable[[Pserver, Any], None]] = {
        Reply: _reply, Count: _count, ComputePartials: _compute_partials, ApplyRound: _apply, RoundSkipped: _skipped,
        SendShard: _send_shard, TakeCheckpoint: _checkpoint, RequestRollback: _request_rollback, Finished: _finished,
    }

    def _exchanges(self) -> bool:
        """Whether shards exchange partial sums each round (clipping by global norm)."""
        programs = [self.job.pserver_program(i) for i in range(self.config.pservers)]
        return any("reduce" in p.blocks and "order" in p.blocks["reduce"].attrs for p in programs)

    def status(self) -> msgspec.Struct:
        rounds = self._rounds
        rate = (len(rounds) - 1) / (rounds[-1] - rounds[0]) if len(rounds) > 1 else 0.0
        machine = self.machine
        return ShardStatus(machine.version if machine else 0, machine.generation if machine else 0, rate,
                           dict(self.counters))
