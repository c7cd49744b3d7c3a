"""What a simulated job must end with: the model of the undisturbed job."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.sim.job import Simulation
from tests.sim.variants import Variant, expected_counts
from tests.sim.world import SimulationFailed


class ComparedSimulation(Simulation):
    """Checks what the job leaves. `bad`: the share of its batches that cannot be read."""

    bad = 0.0

    def check(self) -> None:
        super().check()
        if self.bad:
            self.check_discarded()
            return
        counts, left_out = expected_counts(self.variant) if not self.variant.sync else (None, 0)
        expected, skipped = undisturbed(self.variant) if self.variant.sync else ({}, left_out)
        for name, value in self.model().items():
            wanted = counts if counts is not None else expected[name]
            if not torch.equal(value, wanted):
                raise SimulationFailed(f"%{name} is not what the undisturbed job gives: {_different(value, wanted)}")
        if self.skipped() != skipped:
            raise SimulationFailed(f"{self.skipped()} steps were left out, expected {skipped}")
        self.counts["left out"] += skipped

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
def undisturbed(variant: Variant) -> tuple[dict[str, Any], int]:
    """The model of a job to which nothing happens, and how many steps were left out."""
    with Simulation(0, variant) as simulation:
        simulation.begin_all()
        simulation.run()
        return simulation.model(), simulation.skipped()
