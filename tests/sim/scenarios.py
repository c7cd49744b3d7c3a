"""Scenarios by name; `simulate` runs a seed of one."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Mapping

import msgspec

from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.records import PassMetrics, Validated
from graphft.runtime.protocol.decisions import Decided
from graphft.runtime.protocol.messages import Empty, Push
from graphft.runtime.roles.environment import RoleSpec
from tests.sim.compare import ComparedSimulation, run_undisturbed, undisturbed
from tests.sim.faults import FaultySimulation
from tests.sim.job import Simulation
from tests.sim.variants import VARIANTS, Variant, async_variant, sync_variant, with_nonfinite, with_options
from tests.sim.world import SimulationFailed

LATE_SECONDS, SOON_SECONDS = 100.0, 30.0
TROUBLE = ("barred", "stale-claim", "idle-slot", "rollback", "restarted", "takeover", "requeued", "hung")
"""Kinds of events that an undisturbed job does not know."""


class BadBatches(FaultySimulation):
    """Some records cannot be read, among all the other faults: async, and in every second seed of sync, for good; in
    every second seed of these, the reader knows which, and that no trainer can."""

    bad = 0.06

    def __init__(self, seed: int, variant: Variant) -> None:
        super().__init__(seed, variant)
        self.flaky = variant.sync and seed % 2 == 1
        self.certain = not self.flaky and seed // 2 % 2 == 1


class Calm(ComparedSimulation):
    """Nothing happens; then nothing is repeated, either."""

    def __init__(self, seed: int, variant: Variant) -> None:
        self.pick = random.Random(seed)
        super().__init__(seed, variant, pace=lambda: self.pick.uniform(0, 0.01))

    def check(self) -> None:
        super().check()
        told = [kv.value.decode() for kv in self.store.range(self.keys.events).kvs]
        trouble = [text for text in told if any(f'"kind":"{kind}"' in text for kind in TROUBLE)]
        if trouble or self.counts["status 75"]:
            raise SimulationFailed(f"something was done twice: {trouble or self.counts}")


class BadLines(Calm):
    """Some records cannot be read by any trainer, which the reader knows: they are discarded, and no process ends."""

    bad, certain = 0.06, True

    def check(self) -> None:
        ComparedSimulation.check(self)
        if self.counts["status 1"] or self.counts["status 75"]:
            raise SimulationFailed(f"a process ended because of records that are discarded: {self.counts}")


class CutOff(Calm):
    """From some time on nothing passes between one trainer and one shard (or no contributions do), though both reach
    etcd. Sync jobs; a spare trainer is there."""

    def begin_all(self) -> None:
        self.begin(self.trainers + 1)
        if self.pick.random() < 0.5:
            self.network.blocked_kinds = (Push, Empty)
        self.world.after(self.pick.uniform(0.1, 0.4), self.block)

    def block(self) -> None:
        if self.over:
            return
        holders = {kv.value.decode() for kv in self.store.range(self.keys.slots).kvs}
        links = sorted(
            (link.client.identity, link.address) for link in self.network.links if link.client.identity in holders
        )
        if not links:
            self.world.after(0.05, self.block)
            return
        self.network.blocked.append(self.pick.choice(links))
        self.counts["blocked"] += 1
        self.world.tell("fault", "nothing passes between %s and %s", self.network.blocked[0])

    def check(self) -> None:
        ComparedSimulation.check(self)


class LateTrainer(Calm):
    """`on_trainer_loss="wait"`: the last trainer comes when the others have waited for longer than `chunk_timeout`; the
    job must go on at once then."""

    def begin_all(self) -> None:
        self.begin(self.trainers - 1)
        self.world.at(LATE_SECONDS, lambda: self.start(RoleSpec("trainer", self.trainers - 1)))

    def check(self) -> None:
        super().check()
        if self.world.now > LATE_SECONDS + SOON_SECONDS:
            raise SimulationFailed("the job did not go on when its last trainer was there")


class OnDemand(FaultySimulation):
    """Passes are asked for one by one, some long after the one before was over, among all the other faults. Sync."""

    def begin_all(self) -> None:
        super().begin_all()
        self.wanted = 0
        self.want()

    def want(self) -> None:
        """As a driver does, which no fault befalls: it raises the record, and makes it again if it is lost."""
        if self.over:
            return
        view = read_view(self.keys, self.store.range(self.keys.control).kvs)
        committed = view.committed.step if view.committed is not None else 0
        pause = 0.0
        if committed >= self.job.config.plan.start_steps[self.wanted] and self.wanted < self.job.config.epochs:
            self.wanted += 1
            pause = self.pick.choice((0.0, 0.5, 10.0))
            self.counts["passes asked for"] += 1
        self.world.after(pause + self.pick.uniform(0.05, 0.5), self.ask)

    def ask(self) -> None:
        if self.store.get(self.keys.wanted_passes) != str(self.wanted).encode():
            self.store.put(self.keys.wanted_passes, str(self.wanted).encode())
        self.want()

    def check(self) -> None:
        super().check()
        records = [self.store.get(self.keys.pass_metrics(i)) for i in range(self.job.config.epochs)]
        told = [msgspec.json.decode(kv.value, type=PassMetrics).samples for kv in records if kv is not None]
        if told[-1:] != [sum(self.variant.chunks)] or set(told) != {sum(self.variant.chunks)}:
            raise SimulationFailed(f"passes of {sum(self.variant.chunks)} samples came to {told}")


class Validating(FaultySimulation):
    """The model is validated while it is trained, among all the other faults: each validation comes to the same, to the
    bit. Sync."""

    def check(self) -> None:
        super().check()
        found, expected = validations_of(self), undisturbed_validations(self.variant)
        told = [kv.value.decode() for kv in self.store.range(self.keys.events).kvs]
        lost = sum('"kind":"validation-lost"' in text for text in told)
        self.counts["validations"] += len(found)
        self.counts["validations lost"] += lost
        for step, means in found.items():
            if means != expected[step]:
                raise SimulationFailed(f"the validation of step {step} is {means}, expected {expected[step]}")
        kv = self.store.get(self.keys.decided)
        self.counts["stopped"] += kv is not None and bool(msgspec.json.decode(kv.value, type=Decided).stopped)
        lacking = sorted(expected.keys() - found.keys())
        if lacking and not (self.restored or lost >= len(lacking)):
            raise SimulationFailed(f"the validations of steps {lacking} are missing")


def validations_of(simulation: Simulation) -> dict[int, Mapping[str, object]]:
    """By step, what validations came to. Raises SimulationFailed if one is open, or left something behind."""
    store, keys = simulation.store, simulation.keys
    left = [kv.key for prefix in (keys.all_validating, f"/{keys.job}.validation/") for kv in store.range(prefix).kvs]
    if left:
        raise SimulationFailed(f"the job is complete, and there is {left}")
    records = [msgspec.json.decode(kv.value, type=Validated) for kv in store.range(keys.all_validated).kvs]
    return {record.step: {**record.means, "samples": record.samples} for record in records}


@functools.cache
def undisturbed_validations(variant: Variant) -> dict[int, Mapping[str, object]]:
    with Calm(0, variant) as simulation:
        simulation.expected = undisturbed(variant)
        simulation.begin_all()
        simulation.run()
        return validations_of(simulation)


SCENARIOS: Mapping[str, type[ComparedSimulation]] = {
    "faults": FaultySimulation,
    "bad-batches": BadBatches,
    "nonfinite": FaultySimulation,  # some records are not finite
    "calm": Calm,
    "bad-lines": BadLines,
    "cut-off": CutOff,
    "late-trainer": LateTrainer,
    "on-demand": OnDemand,
    "validation": Validating,
}


def variant_of(scenario: str, mode: str, seed: int) -> Variant:
    """The job of a seed."""
    pick = random.Random(seed)
    while True:
        variant = (sync_variant if mode == "sync" else async_variant)(pick.randrange(VARIANTS))
        options = dict(variant.options)
        waits = options.get("on_trainer_loss") == "wait"
        if scenario == "late-trainer" and not (waits and options["trainers"] > 1):
            continue
        if scenario == "cut-off" and waits:
            continue
        if scenario == "on-demand":
            return with_options(variant, epochs=options["epochs"] + 1)
        if scenario == "validation":  # at the end of each pass, or more often
            decides = ("", "rate", "all", "best", "stop")[seed // 4 % 5]
            return with_options(variant, validate_every=(0, 0, 2, 3)[seed % 4], decides=decides)
        return with_nonfinite(variant, seed) if scenario == "nonfinite" else variant


def simulate(scenario: str, mode: str, seed: int, dispatch: str = "etcd") -> tuple[Counter[str], list[str]]:
    """Returns what happened in that seed, counted, and its story. Raises SimulationFailed."""
    variant = variant_of(scenario, mode, seed)
    if dispatch == "coordinator":
        variant = with_options(variant, dispatch="coordinator")
    kind = SCENARIOS[scenario]
    if variant.sync:  # before the other one begins: there is one world at a time
        certain = kind.certain or seed // 2 % 2 == 1
        expected = run_undisturbed(seed, variant, kind.bad, certain) if kind.bad else undisturbed(variant)
        if scenario == "validation":
            undisturbed_validations(variant)
    if scenario == "on-demand":
        variant = with_options(variant, passes_on_demand=True)
    with kind(seed, variant) as simulation:
        simulation.expected = expected if variant.sync else ({}, 0)
        simulation.begin_all()
        simulation.run()
        return simulation.counts, simulation.world.lines()
