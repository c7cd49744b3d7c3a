"""One simulated sync job under faults, compared with the undisturbed run at every round."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphft.plan import Plan
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.protocol.sync_events import ApplyRound
from tests.sim.actors import NEVER, Key, Setup, ShardActor, TrainerActor, gradient, initial, partial_sum, updated
from tests.sim.world import ChunkKey, Network, SimulationFailed, Store, World


@dataclass
class Reference:
    """The undisturbed run: the parameters of every version, and (per shard and step) what is contributed."""

    versions: list[dict[Key, str]]
    given: dict[tuple[int, int], tuple[Contribution, ...]]


def first_reference(setup: Setup) -> Reference:
    keys = [(s, b) for s, bs in enumerate(setup.buckets) for b in bs]
    return reference(setup, {}, 0, Reference([{key: initial(key) for key in keys}], {}))


def reference(setup: Setup, discarded: Mapping[ChunkKey, int], start: int, before: Reference) -> Reference:
    """What it is from step `start` on, without what is `discarded`."""
    keys = [(s, b) for s, bs in enumerate(setup.buckets) for b in bs]
    versions = before.versions[: start + 1]
    given = dict(before.given)
    for step in range(start, setup.plan.total_steps):
        old = versions[-1]
        located = {
            slot: at
            for slot in range(setup.plan.slots)
            if (at := setup.plan.locate(step, slot)) is not None
            and at.batch < discarded.get((at.pass_index, at.chunk), NEVER)
        }
        for shard, buckets in enumerate(setup.buckets):
            given[shard, step] = tuple(
                Contribution(slot, at.samples, {b: gradient(step, slot, (shard, b), old) for b in buckets})
                for slot, at in located.items()
            )
        if not located:
            versions.append(dict(old))
            continue
        partials = tuple(partial_sum(step, s, given[s, step]) for s in range(setup.shards)) if setup.reduce else ()
        versions.append({key: updated(key, old[key], step, given[key[0], step], partials) for key in keys})
    return Reference(versions, given)


@dataclass(frozen=True)
class Faults:
    """What happens, and until when; then everything must end well."""

    until: float
    mean_interval: float
    kinds: tuple[str, ...] = ("shard", "trainer", "join", "pause", "pause-shard", "cut")


class SimJob:
    """Builds the job of a seed, lets faults happen, and runs it to its end."""

    def __init__(self, seed: int, faults: bool = True, flaky: float = 0.0) -> None:
        """`flaky`: the share of the batches that cannot be computed now and then, until they are discarded."""
        self.seed = seed
        self.world = World(seed)
        rng = random.Random(seed * 7919 + 1)
        self.setup = replace(_setup(rng), flaky=flaky)
        self.references = {0: first_reference(self.setup)}
        """By the generation that it holds from."""
        self.store = Store(self.world, self.setup.shards)
        self.network = Network(self.world, duplicates=rng.choice((0.0, 0.05)), reorder=rng.random() < 0.3)
        self.faults = Faults(rng.uniform(1, 12) if faults else 0.0, rng.uniform(0.1, 2.0))
        self.names = 0
        self.applied: Counter[tuple[int, int, int]] = Counter()
        self.counts: Counter[str] = Counter()
        self.processes: list[Any] = []
        for index in range(self.setup.shards):
            self.start_shard(index, 0)
        for _ in range(rng.randint(1, self.setup.plan.slots + 1)):
            self.start_trainer()
        self.world.after(rng.uniform(0, 1), self.fault)

    def describe(self) -> str:
        s = self.setup
        return (
            f"seed {self.seed}: {s.plan.total_steps} steps, {s.plan.slots} slots, buckets {s.buckets}, checkpoint "
            f"every {s.checkpoint_every}, reduce {s.reduce}, refresh {sorted(s.refresh)}, policy {s.policy}, "
            f"flaky {s.flaky}, "
            f"faults until {self.faults.until:.1f} s, every {self.faults.mean_interval:.1f} s"
        )

    def run(self, limit: float = 400.0) -> SimJob:
        try:
            self.world.run(self.complete, limit)
            self.check_result()
        except Exception as error:
            story = "\n".join(self.world.lines)
            raise SimulationFailed(
                f"{error}\n{story}\n{type(error).__name__}: {str(error).splitlines()[0]}\n"
                f"{self.describe()}\n{self.state()}"
            ) from error
        for process in self.processes:
            self.counts += process.counts
        return self

    def state(self) -> str:
        shards = [
            f"{p.name}: version {p.machine.version} of {p.machine.generation}, {p.machine.phase}, missing "
            f"{p.machine.round.missing()}"
            for p in self.store.pservers.values()
        ]
        trainers = [
            f"{t.name}: {t.machine.current} next {t.machine.next_work()} slots {t.machine.slots} "
            f"pending {sorted(t.machine.pending)}"
            for t in self.store.trainers.values()
        ]
        return "\n".join([*shards, *trainers])

    def complete(self) -> bool:
        return self.store.committed == self.setup.plan.total_steps

    # -- promises ---------------------------------------------------------------------------------------------------

    def check_result(self) -> None:
        final = {
            (s, b): v for s, state in self.store.checkpoints[self.store.committed].items() for b, v in state.items()
        }
        if final != self.reference_of(self.store.generation.number).versions[-1]:
            self.world.fail("the final parameters differ from the undisturbed run's")

    def reference_of(self, generation: int) -> Reference:
        return self.references[max(g for g in self.references if g <= generation)]

    def discard(self) -> None:
        """Something was discarded: from the generation that begins with it on, no shard counts it any more."""
        generation = self.store.generation
        self.references[generation.number] = reference(
            self.setup, self.store.discarded, generation.step, self.reference_of(generation.number - 1)
        )

    def is_flaky(self, step: int, slot: int) -> bool:
        return random.Random(f"{self.seed} {step} {slot}").random() < self.setup.flaky

    def check_parameters(self, key: Key, version: int, value: str, generation: int) -> None:
        if value != self.reference_of(generation).versions[version][key]:
            self.world.fail(f"bucket {key} at version {version} is not that of the undisturbed run")

    def check_round(self, shard: int, effect: ApplyRound) -> None:
        expected = self.reference_of(effect.generation).given[shard, effect.step]
        if effect.contributions != expected:
            self.world.fail(f"shard {shard} applies {effect.contributions} at step {effect.step}, not {expected}")
        self.applied[effect.generation, shard, effect.step] += 1

    # -- processes and messages -------------------------------------------------------------------------------------

    def start_shard(self, index: int, incarnation: int) -> None:
        self.processes.append(ShardActor(self, index, incarnation))

    def start_trainer(self) -> None:
        self.names += 1
        self.processes.append(TrainerActor(self, f"trainer-{self.names}", self.world.rng.choice((1, 1, 4))))

    def to_shard(self, sender: str, shard: int, peer: str, message: Any, payload: Any) -> None:
        def deliver() -> None:
            target = self.store.pservers.get(shard)
            if target is not None and target.alive:
                target.receive(peer, message, payload)

        if not self.network.blocked((sender, shard), message):
            self.network.send((sender, shard), "out", deliver)

    def to_trainer(self, shard: int, peer: str, message: Any, payload: Any) -> None:
        def deliver() -> None:
            target = self.store.trainers.get(peer) or next((p for p in self.processes if p.name == peer), None)
            if target is not None and target.alive and shard in target.connected:
                target.receive(shard, message, payload)

        if not self.network.blocked((peer, shard), message):
            self.network.send((peer, shard), "back", deliver)

    def cut_shard(self, shard: int) -> None:
        for process in self.processes:
            self.network.cut((process.name, shard))
            if isinstance(process, TrainerActor) and process.alive and self.world.rng.random() < 0.7:
                process.later(self.world.rng.uniform(0.001, 0.05), lambda p=process: _notice(p, shard))

    # -- faults -----------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.world.now > self.faults.until:
            if not self.store.trainers:
                self.start_trainer()
            self.world.after(1.0, self.fault)  # somebody has to do the work
            return
        kind = self.world.rng.choice(self.faults.kinds)
        self.world.trace("fault", kind)
        getattr(self, "fault_" + kind.replace("-", "_"))()
        self.world.after(self.world.rng.expovariate(1 / self.faults.mean_interval), self.fault)

    def fault_shard(self) -> None:
        index = self.world.rng.randrange(self.setup.shards)
        shard = self.store.pservers[index]
        if shard.alive:
            shard.crash()
            incarnation = int(shard.name.rsplit(".", 1)[1]) + 1
            self.world.after(self.world.rng.uniform(0.05, 2), lambda: self.start_shard(index, incarnation))

    def fault_trainer(self) -> None:
        trainer = self._some_trainer()
        if trainer:
            trainer.leave("crashes")
            self.world.after(self.world.rng.choice((0.01, 2.0)), lambda: self.store.expire(trainer.name))
            self.world.after(self.world.rng.uniform(0.1, 2), self.start_trainer)

    def fault_join(self) -> None:
        if len(self.store.trainers) < 6:
            self.start_trainer()

    def fault_pause(self) -> None:
        """A trainer stops for a while; when it is away longer than its lease, it comes back as a zombie."""
        trainer = self._some_trainer()
        if trainer:
            seconds = self.world.rng.uniform(0.1, 4)
            trainer.pause(seconds)
            if seconds > 2:
                self.world.after(2, lambda: self.store.expire(trainer.name))

    def fault_pause_shard(self) -> None:
        self.world.rng.choice(list(self.store.pservers.values())).pause(self.world.rng.uniform(0.1, 2))

    def fault_cut(self) -> None:
        trainer = self._some_trainer()
        if trainer:
            index = self.world.rng.randrange(self.setup.shards)
            trainer.do(lambda: trainer.disconnect(index, comes_back=True))

    def block(self, *kinds: type) -> None:
        """From now on no message (of these kinds) passes between one trainer that holds a slot and one shard; the
        store is still there for both."""
        holders = [t for _, t in sorted(self.store.trainers.items()) if t.name in self.store.slots.values()]
        if not holders:
            self.world.after(0.1, lambda: self.block(*kinds))
            return
        trainer = self.world.rng.choice(holders)
        link = trainer.name, self.world.rng.randrange(self.setup.shards)
        self.world.trace("fault", f"nothing passes between {link}")
        self.network.blocked = lambda at, message: at == link and isinstance(message, kinds or object)
        if not kinds:
            trainer.do(lambda: trainer.disconnect(link[1], comes_back=True))

    def _some_trainer(self) -> TrainerActor | None:
        alive = [t for _, t in sorted(self.store.trainers.items()) if t.alive]
        return self.world.rng.choice(alive) if alive else None


def _notice(trainer: TrainerActor, shard: int) -> None:
    connected = trainer.connected.get(shard)
    if connected is not None and not connected.alive:
        trainer.disconnect(shard, comes_back=False)


def _setup(rng: random.Random) -> Setup:
    slots = rng.randint(1, 4)
    chunks = rng.randint(1, 8)
    plan = Plan(
        [rng.randint(0, 40) for _ in range(chunks)] + [5],
        slots=slots,
        batch_size=rng.choice((4, 8)),
        seed=rng.randint(0, 99),
        passes=rng.randint(1, 3),
    )
    buckets, first = [], 0
    for _ in range(rng.randint(1, 3)):
        count = rng.randint(1, 2)
        buckets.append(tuple(range(first, first + count)))
        first += count * rng.randint(0, 1)
    keys = [(s, b) for s, bs in enumerate(buckets) for b in bs]
    return Setup(
        plan,
        tuple(buckets),
        rng.choice((0, 1, 3, 5)),
        rng.random() < 0.5,
        frozenset(k for k in keys if rng.random() < 0.2),
    )
