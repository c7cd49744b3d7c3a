"""What a simulated job must end with: the model of the undisturbed job."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.sim.job import Simulation
from tests.sim.variants import Variant, expected_count
from tests.sim.world import SimulationFailed


class ComparedSimulation(Simulation):
    """Checks what the job leaves. `bad`: the share of its batches that cannot be read."""

    bad = 0.0

    def check(self) -> None:
        super().check()
        if self.bad:
            self.check_discarded()
            return
        expected = undisturbed(self.variant) if self.variant.sync else None
        for name, value in self.model().items():
            if expected is not None:
                wrong = not torch.equal(value, expected[name])
            else:
                count = expected_count(self.variant)
                records = sum(self.variant.chunks)
                wrong = not bool((value[:records] == count).all() and (value[records:] == 0).all())
            if wrong:
                found = value.flatten().tolist() if expected is None else _different(value, expected[name])
                raise SimulationFailed(f"%{name} is not what the undisturbed job gives: {found}")

    def check_discarded(self) -> None:
        """Shards agree on what was left out: sync shards by their rounds, see `applied`; async ones by their counts of
        each record."""
        failed = self.store.range(f"/{self.keys.job}.queue/").kvs
        self.counts["discarded"] += sum("/failed/" in kv.key for kv in failed)
        first, *others = self.model().values() if not self.variant.sync else (0,)
        if any(not torch.equal(first, other) for other in others):
            raise SimulationFailed(f"shards have applied different batches: {self.model()}")


def _different(value: torch.Tensor, expected: torch.Tensor) -> str:
    places = (value != expected).nonzero()
    worst = float((value - expected).abs().max())
    return f"{len(places)} of {value.numel()} elements, by {worst:.2g} at most; the first is {places[0].tolist()}"


@functools.cache
def undisturbed(variant: Variant) -> dict[str, Any]:
    """The model of a job to which nothing happens."""
    with Simulation(0, variant) as simulation:
        simulation.begin_all()
        return simulation.run().model()
