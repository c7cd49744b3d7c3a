"""Simulated processes around the real state machines: what the roles' drivers do, without bytes.

"Parameters" are hashes: a bucket's next version is the hash of its version and of what was contributed, in order; a
gradient is the hash of (step, slot, bucket) and of all parameters it was computed from. So one wrong, missing, repeated
or misordered contribution, or one bucket of another version, changes everything after it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphft.plan import Plan
from graphft.runtime.protocol.events import Count, PeerLeft, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.idle_slots import IdleSlots
from graphft.runtime.protocol.messages import Empty, Parameters, Push
from graphft.runtime.protocol.slot_assignment import Assignment, assign
from graphft.runtime.protocol.sync_events import (
    ApplyRound,
    Begin,
    Closed,
    ComputePartials,
    Copied,
    Fail,
    Finished,
    FromShard,
    PartialsReady,
    Pushed,
    RequestRollback,
    Rollback,
    RoundApplied,
    RoundSkipped,
    Send,
    SendShard,
    ShardDown,
    ShardUp,
    SlotGained,
    SlotLost,
    Started,
    SyncOptions,
    TrainerOptions,
)
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.protocol.sync_trainer import SyncTrainer

if TYPE_CHECKING:
    from tests.sim.job import SimJob
    from tests.sim.world import ChunkKey

Key = tuple[int, int]
NEVER = 10**9
SILENT_SECONDS, IDLE_SECONDS, BACK_OFF = 3.0, 8.0, 8.0


def digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def initial(key: Key) -> str:
    return digest("initial", key)


def gradient(step: int, slot: int, key: Key, tensors: dict[Key, str]) -> str:
    return digest("gradient", step, slot, key, sorted(tensors.items()))


def partial_sum(step: int, shard: int, contributions: Any) -> str:
    return digest("partial", step, shard, [(c.slot, c.samples, sorted(c.payloads.items())) for c in contributions])


def updated(key: Key, old: str, step: int, contributions: Any, partials: Any) -> str:
    return digest(key, old, step, [(c.slot, c.samples, c.payloads[key[1]]) for c in contributions], partials)


@dataclass(frozen=True)
class Setup:
    """One simulated job."""

    plan: Plan
    buckets: tuple[tuple[int, ...], ...]
    checkpoint_every: int
    reduce: bool
    refresh: frozenset[Key]
    policy: str = "takeover"
    flaky: float = 0.0
    """The share of the batches that cannot be computed, every other time that it is tried."""

    @property
    def shards(self) -> int:
        return len(self.buckets)


class Actor:
    """A process: its events, timers and effects die with it."""

    machine: Any

    def __init__(self, job: SimJob, name: str) -> None:
        self.job, self.world, self.store, self.name = job, job.world, job.store, name
        self.alive = True
        self.paused: list[Callable[[], None]] | None = None
        self.counts: Counter[str] = Counter()

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self.world.after(delay, lambda: self.do(action))

    def do(self, action: Callable[[], None]) -> None:
        """Runs the action now; when the process is stopped, after it goes on; never when it is dead."""
        if self.alive and self.paused is not None:
            self.paused.append(action)
        elif self.alive:
            action()

    def feed(self, event: Any) -> None:
        for effect in self.machine.step(event, self.world.now):
            if self.alive:
                self.trace(f"{type(event).__name__} -> {effect}")
                self.commit(effect)
        self.machine.check_invariants()

    def commit(self, effect: Any) -> None:
        raise NotImplementedError

    def trace(self, text: str) -> None:
        self.world.trace(self.name, text)

    def tick(self) -> None:
        self.feed(Tick())
        self.later(0.25, self.tick)

    def pause(self, seconds: float) -> None:
        if self.alive and self.paused is None:
            self.trace(f"is stopped for {seconds:.2f} s")
            self.paused = []
            self.world.after(seconds, self._go_on)

    def _go_on(self) -> None:
        actions, self.paused = self.paused or [], None
        for action in actions:
            self.do(action)


class ShardActor(Actor):
    """A pserver process."""

    def __init__(self, job: SimJob, index: int, incarnation: int) -> None:
        super().__init__(job, f"shard-{index}.{incarnation}")
        self.index, setup = index, job.setup
        self.current, self.version = self._load()
        self.previous: dict[int, str] = {}
        self.idle_slots = IdleSlots(IDLE_SECONDS)
        self.machine = SyncShard(
            SyncOptions(
                shard=index,
                shards=setup.shards,
                slots=setup.plan.slots,
                buckets=setup.buckets[index],
                total_steps=setup.plan.total_steps,
                run="run",
                secret="secret",
                checkpoint_every=setup.checkpoint_every,
                reduce=setup.reduce,
                recovery=incarnation > 0,
                recovery_timeout=3.0,
            ),
            incarnation=self.name,
            generation=self.store.generation.number,
            version=self.version,
        )
        self.store.pservers[index] = self
        self.store.watchers[self.name] = lambda: self.do(self.watch)
        self.store.changed()
        self.feed(Started())
        self.tick()

    def _load(self) -> tuple[dict[int, str], int]:
        step = self.store.committed
        if step in self.store.checkpoints:
            return dict(self.store.checkpoints[step][self.index]), step
        return {b: initial((self.index, b)) for b in self.job.setup.buckets[self.index]}, 0

    def tick(self) -> None:
        super().tick()
        machine, store = self.machine, self.store
        waits = machine.phase == "collecting" and not machine.finished and len(store.pservers) == self.job.setup.shards
        holders = {slot: (trainer, store.claims[slot]) for slot, trainer in store.slots.items()}
        for slot in self.idle_slots.look(
            self.world.now, (machine.generation, machine.version), machine.round.missing() if waits else (), holders
        ):
            store.take(slot, holders[slot][1], self.name)

    def watch(self) -> None:
        if self.store.generation.number > self.machine.generation:
            generation = self.store.generation
            self.current = (
                dict(self.store.checkpoints[generation.step][self.index])
                if generation.step
                else {b: initial((self.index, b)) for b in self.current}
            )
            self.feed(Rollback(generation.number, generation.step))

    def crash(self) -> None:
        self.trace("crashes")
        self.alive = False
        self.store.watchers.pop(self.name, None)
        self.job.cut_shard(self.index)

    def receive(self, peer: str, message: Any, payload: Any) -> None:
        if isinstance(message, Push | Empty):
            self.idle_slots.heard(message.slot)
        self.do(lambda: self.feed(Received(peer, message, payload)))

    def commit(self, effect: Any) -> None:
        if isinstance(effect, Reply):
            frame = None
            if isinstance(effect.message, Parameters):
                if self.machine.phase == "applying":
                    self.world.fail(f"{self.name} sends parameters while they are being changed")
                frame = (self.current if effect.source == "current" else self.previous)[effect.message.bucket]
                self.job.check_parameters(
                    (self.index, effect.message.bucket), effect.message.version, frame, self.machine.generation
                )
            self.job.to_trainer(self.index, effect.peer, effect.message, frame)
        elif isinstance(effect, ComputePartials):
            payload = partial_sum(effect.step, self.index, effect.contributions)
            self.later(
                self.world.rng.uniform(0, 0.01),
                lambda: self.feed(PartialsReady(effect.generation, effect.step, payload)),
            )
        elif isinstance(effect, ApplyRound):
            self.later(self.world.rng.uniform(0, 0.01), lambda: self._apply(effect))
        elif isinstance(effect, SendShard):
            self.job.to_shard(self.name, effect.shard, f"shard-{self.index}", effect.message, effect.payload)
        elif isinstance(effect, TakeCheckpoint):
            state, generation = dict(self.current), self.machine.generation
            self.later(
                self.world.rng.uniform(0.01, 0.3),
                lambda: self.store.write_part(generation, effect.step, self.index, state),
            )
        elif isinstance(effect, RequestRollback):
            self.later(self.world.rng.uniform(0.001, 0.02), lambda: self.store.roll_back(effect.generation))
        elif isinstance(effect, Count):
            self.counts[effect.name] += 1
        else:
            assert isinstance(effect, RoundSkipped | Finished), effect

    def _apply(self, effect: ApplyRound) -> None:
        if effect.generation == self.machine.generation:  # else the parameters are those of a checkpoint by now
            self.job.check_round(self.index, effect)
            self.previous = dict(self.current)
            self.current = {
                b: updated((self.index, b), old, effect.step, effect.contributions, effect.partials)
                for b, old in self.current.items()
            }
        self.feed(RoundApplied(effect.generation, effect.step))


class TrainerActor(Actor):
    """A trainer process: a communication side (messages, watch, daemon) and one computation at a time."""

    def __init__(self, job: SimJob, name: str, speed: float) -> None:
        super().__init__(job, name)
        self.speed = speed
        setup = job.setup
        self.keys = [(s, b) for s, bs in enumerate(setup.buckets) for b in bs]
        self.tensors: dict[Key, str] = {}
        self.connected: dict[int, ShardActor] = {}
        self.claims: dict[ChunkKey, int] = {}
        """Chunks that this trainer has claimed, and the batch from which on each is left out."""
        self.idle = True
        self.machine = SyncTrainer(
            TrainerOptions(
                trainer=name,
                buckets=setup.buckets,
                total_steps=setup.plan.total_steps,
                run="run",
                secret="secret",
                retry_interval=2.0,
            ),
            generation=self.store.generation.number,
        )
        self.store.trainers[name] = self
        self.store.watchers[name] = lambda: self.do(self.watch)
        self.barred_at, self.back_off = NEVER, BACK_OFF
        self.store.changed()
        self.tick()
        self.daemon()

    # -- membership -----------------------------------------------------------------------------------------------

    def watch(self) -> None:
        if self.name not in self.store.trainers:
            self.leave("lease lost")
            return
        if self.store.generation.number > self.machine.generation:
            self.claims.clear()
            self.feed(Rollback(self.store.generation.number, self.store.generation.step))
        for index, shard in self.store.pservers.items():
            if shard is not self.connected.get(index) and shard.alive:
                self.connect(index, shard)
        self.claim()

    def connect(self, index: int, shard: ShardActor) -> None:
        self.job.network.cut((self.name, index))
        self.connected[index] = shard
        self.feed(ShardUp(index, shard.name))

    def disconnect(self, index: int, comes_back: bool) -> None:
        """The connection to a shard breaks; what is in flight on it is lost."""
        shard = self.connected.pop(index, None)
        self.job.network.cut((self.name, index))
        if shard is not None:
            self.feed(ShardDown(index))
            if comes_back:
                self.later(
                    0.05, lambda: self.connect(index, shard) if shard.alive and index not in self.connected else None
                )

    def assignment(self) -> Assignment:
        setup = self.job.setup
        return assign(
            slots=setup.plan.slots,
            live=self.store.trainers,
            holders=self.store.slots,
            me=self.name,
            policy=setup.policy,
            barred=self.store.barred,
        )

    def claim(self) -> None:
        mine = {(v, self.store.claims[v]) for v, t in self.store.slots.items() if t == self.name}
        held = {(v, state.claim) for v, state in self.machine.slots.items()}
        for slot, claim in held - mine:
            self.claims.clear()
            self.feed(SlotLost(slot, claim))
        if not all(self.machine.connections[s].introduced for s in self.store.pservers):
            return
        for slot in self.assignment().claim:
            if self.store.claim(slot, self.name):
                self.feed(SlotGained(slot, self.store.claims[slot]))

    def release(self) -> None:
        for slot in self.assignment().release:
            if slot in self.machine.slots:
                self.claims.clear()
                self.feed(SlotLost(slot, self.machine.slots[slot].claim))
                self.store.release(slot, self.name)

    def update_bar(self) -> None:
        """What `roles/bar.py` does."""
        by, silent = self.store.barred.get(self.name), self.machine.silence.over(SILENT_SECONDS)
        if by is None and silent:
            self.store.bar(self.name, self.name)
        elif by == self.name and not silent:
            self.store.unbar(self.name)
        elif by not in (None, self.name):
            if self.barred_at == NEVER:
                self.barred_at, self.back_off = self.world.now, 2 * self.back_off
            elif self.world.now > self.barred_at + self.back_off:
                self.barred_at = NEVER
                self.store.unbar(self.name)

    def daemon(self) -> None:
        self.update_bar()
        self.watch()
        if self.alive:
            self.later(0.5, self.daemon)

    def leave(self, why: str) -> None:
        self.trace(why)
        self.alive = False
        self.store.watchers.pop(self.name, None)
        for index in range(self.job.setup.shards):
            self.job.network.cut((self.name, index))
            shard = self.store.pservers.get(index)
            if shard is not None and self.world.rng.random() < 0.5:
                shard.do(lambda s=shard: s.feed(PeerLeft(self.name)))

    def receive(self, shard: int, message: Any, payload: Any) -> None:
        self.do(lambda: self.feed(FromShard(shard, message, payload)))

    def feed(self, event: Any) -> None:
        """A trainer without work looks again after whatever it hears: each event may answer another question."""
        super().feed(event)
        if self.idle and not isinstance(event, Begin | Tick):
            self.idle = False
            self.later(0, self.begin)

    def commit(self, effect: Any) -> None:
        if isinstance(effect, Send):
            self.job.to_shard(self.name, effect.shard, self.name, effect.message, effect.payload)
        elif isinstance(effect, Fail):
            self.world.fail(f"{self.name} gave up: {effect.reason}")
        else:
            assert isinstance(effect, Count), effect
            self.counts[effect.name] += 1

    # -- the step block -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.feed(Begin())
        work = self.machine.current
        if work is None:
            self.idle = True
            if self.name in self.store.barred:
                self.release()
            return
        located = self.job.setup.plan.locate(work.step, work.slot)
        if located is None:
            self.wait(self.all_reached, self.close)
            return
        key = located.pass_index, located.chunk
        if key not in self.claims:
            if not self.store.claim_chunk(key, work.slot, self.name):
                self.later(0.01, self.begin)
                return
            self.claims[key] = self.store.discarded.get(key, NEVER)
        if located.batch >= self.claims[key]:
            self.wait(self.all_reached, self.close)
        else:
            self.receive_bucket(list(self.keys), located.samples)

    def all_reached(self) -> bool:
        return self.machine.reached() == self.job.setup.shards

    def wait(self, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        """What a waiting thread does. Polls: simulated time costs nothing."""
        if self.machine.current is None or self.machine.work_changed:
            self.later(0, self.begin)
        elif condition():
            then()
        else:
            self.later(0.004, lambda: self.wait(condition, then))

    def receive_bucket(self, left: list[Key], samples: int) -> None:
        if not left:
            self.later(self.world.rng.uniform(0.005, 0.03) * self.speed, lambda: self.compute(samples))
            return
        self.wait(lambda: self.machine.has(*left[0]), lambda: self.copy(left, samples))

    def copy(self, left: list[Key], samples: int) -> None:
        key = left[0]
        frame, step = self.machine.frame(*key), self.machine.current.step
        if frame is not None:
            self.tensors[key] = frame
            self.feed(Copied(*key, step, key in self.job.setup.refresh))
        self.job.check_parameters(key, step, self.tensors[key], self.machine.generation)
        self.later(0.0005, lambda: self.receive_bucket(left[1:], samples))

    def compute(self, samples: int) -> None:
        work = self.machine.current
        if work is None:
            self.later(0, self.begin)
            return
        if self.job.is_flaky(work.step, work.slot) and self.world.rng.random() < 0.5:
            self.fail(work)
            return
        gradients = {key: gradient(work.step, work.slot, key, self.tensors) for key in self.keys}
        for key in self.job.setup.refresh:
            self.tensors[key] = digest("changed in place", self.tensors[key])
        self.push(list(reversed(self.keys)), gradients, samples, work)

    def fail(self, work: Any) -> None:
        """The step raises an error: it is reported, the process ends, and is started again."""
        located = self.job.setup.plan.locate(work.step, work.slot)
        assert located is not None
        if self.store.report_failure((located.pass_index, located.chunk), located.batch, self.name):
            self.job.discard()
        self.leave(f"cannot compute {work}")
        self.world.after(0.01, lambda: self.store.expire(self.name))
        self.world.after(0.1, self.job.start_trainer)

    def push(self, left: list[Key], gradients: dict[Key, str], samples: int, work: Any) -> None:
        if not left:
            self.close()
            return
        self.feed(Pushed(*left[0], samples, gradients[left[0]]))
        self.later(self.world.rng.uniform(0, 0.004) * self.speed, lambda: self.push(left[1:], gradients, samples, work))

    def close(self) -> None:
        self.feed(Closed(self.job.setup.shards))
        self.release()
        self.later(0, self.begin)
