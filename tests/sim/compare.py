"""A simulated job must end with the model of the undisturbed job."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch

from graphft.errors import GraphftError
from graphft.plan import record_order
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.data import IN_ORDER, BadRecords, Reader
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.protocol.chunk_queue import ChunkDiscards, Discards, count_records
from tests.sim.job import Simulation
from tests.sim.variants import Variant, expected_counts
from tests.sim.world import Process, SimulationFailed

Table = list[tuple[int, int, bytes]]
"""Step, samples and values of each row of a job's metrics."""
Left = tuple[Mapping[str, Any], int, Table]
"""A job's model, how many steps were skipped as not finite, and its table of metrics."""


class ComparedSimulation(Simulation):
    """Checks what the job leaves. `bad`: the share of its records that cannot be read, for good or (`flaky`) not."""

    bad = 0.0
    flaky = False
    certain = False
    """The reader knows the bad ones: lines that are no records."""
    expected: Left = ({}, 0, [])
    """Sync: what the same job leaves without faults."""
    restored = False
    """Etcd was put back to a backup, which may not know what was discarded until then."""

    def check(self) -> None:
        super().check()
        if self.bad:
            self.check_discarded()
        elif self.variant.sync:
            self.check_same(*self.expected)
        else:
            counts, skipped = expected_counts(self.variant)
            self.check_same(dict.fromkeys(self.model(), counts), skipped)
            self.check_batches(range(self.job.config.plan.total_steps))

    def table(self) -> Table:
        rows = read_rows(self.folder).data
        return [(int(row["step"]), int(row["samples"]), row["values"].tobytes()) for row in rows]

    def check_batches(self, wanted: Iterable[int]) -> None:
        """Async: the table has each batch that was applied once."""
        found = [step for step, *_ in self.table()]
        if sorted(found) != list(wanted):
            raise SimulationFailed(f"the table of metrics has batches {found}, expected each of {wanted} once")

    def check_same(self, expected: Mapping[str, Any], skipped: int, table: Table | None = None) -> None:
        if table is not None and self.table() != table:
            pairs = enumerate(zip_longest(self.table(), table))
            step, pair = next((step, pair) for step, pair in pairs if pair[0] != pair[1])
            raise SimulationFailed(f"row {step} of the metrics is {pair[0]}, expected {pair[1]}")
        for name, value in self.model().items():
            if not torch.equal(value, expected[name]):
                places = (value != expected[name]).nonzero().tolist()
                raise SimulationFailed(f"%{name} is not what the undisturbed job gives: {len(places)} at {places[0]}")
        if self.skipped() != skipped:
            raise SimulationFailed(f"{self.skipped()} steps were skipped, expected {skipped}")
        self.counts["skipped steps"] += skipped

    # -- bad records ------------------------------------------------------------------------------------------------

    def open_reader(self, *arguments: Any, **options: Any) -> Reader:
        reader = super().open_reader(*arguments, **options)
        read = reader.batch

        def batch(pass_index: int, chunk: int, index: int, size: int, *more: Any, **options: Any) -> Any:
            if pass_index == IN_ORDER:  # it validates
                return read(pass_index, chunk, index, size, *more, **options)
            without = more[0] if more else options.get("without", ())
            bad = self.bad_records(pass_index, chunk, range(index * size, (index + 1) * size)) - set(without)
            if bad and not (self.flaky and self.world.random.random() < 0.3):
                what = f"records {sorted(bad)} of chunk {chunk} cannot be read"
                if self.certain:
                    batches = range(-(-self.variant.chunks[chunk] // size) * size)
                    raise BadRecords(what, self.bad_records(pass_index, chunk, batches), certain=True)
                raise GraphftError(what, rule="read")
            return read(pass_index, chunk, index, size, *more, **options)

        reader.batch = batch  # type: ignore[method-assign]
        return reader

    def unexpected(self, process: Process, status: int | None) -> None:
        if not self.bad or self.roles[process].kind != "trainer":
            super().unexpected(process, status)

    def bad_records(self, pass_index: int, chunk: int, places: range) -> set[int]:
        """Positions of the bad ones among those that the pass reads at these places of the chunk."""
        records = self.variant.chunks[chunk]
        order = record_order(self.job.config.seed, pass_index, chunk, records)[places.start : places.stop].tolist()
        return {r for r in order if random.Random(f"{self.seed} {chunk} {r}").random() < self.bad}

    def check_discarded(self) -> None:
        """Shards agree on what is discarded. If it is bad for good, the result depends on nothing else."""
        plan, forgotten = self.job.config.plan, self.flaky or self.restored
        discarded = read_discards(self.store, self.keys)
        self.counts["discarded"] += count_records(plan, discarded)
        if self.variant.sync:  # that shards agree, `applied` sees
            if not forgotten:
                self.check_same(*self.expected)
            return
        first, *others = self.model().values()
        if any(not torch.equal(first, other) for other in others):
            raise SimulationFailed(f"shards have applied different batches: {self.model()}")
        if self.job.config.mode == "async" and not forgotten:
            self.check_counts(first, discarded)

    def check_counts(self, counts: torch.Tensor, discarded: Mapping[int, Discards]) -> None:
        """Each pass has applied each record that it did not leave out, once."""
        plan, wanted = self.job.config.plan, []
        for chunk, records in enumerate(self.variant.chunks):
            found = ChunkDiscards(plan, chunk, discarded.get(chunk, Discards()))
            passes = [found.records(p) for p in range(plan.passes)]
            wanted += [-float(sum(r not in lacking for lacking in passes)) for r in range(records)]
        if counts[: len(wanted)].tolist() != wanted:
            raise SimulationFailed(f"applied {counts[: len(wanted)].tolist()}, discarded {discarded}")


class Undisturbed(ComparedSimulation):
    """Nothing happens, but that some records are bad."""

    def __init__(self, seed: int, variant: Variant, bad: float, certain: bool) -> None:
        super().__init__(seed, variant)
        self.bad, self.certain = bad, certain

    def check(self) -> None:
        Simulation.check(self)


def run_undisturbed(seed: int, variant: Variant, bad: float = 0.0, certain: bool = False) -> Left:
    """Returns what a job leaves to which nothing happens, but that some of its records are bad."""
    with Undisturbed(seed, variant, bad, certain) as simulation:
        simulation.begin_all()
        simulation.run()
        return simulation.model(), simulation.skipped(), simulation.table()


@functools.cache
def undisturbed(variant: Variant) -> Left:
    return run_undisturbed(0, variant)
