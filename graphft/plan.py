"""The pass plan: which batch slot v computes at step k, as a pure function of the job's data and seed.

Chunk order is a seeded permutation per pass; slot v works through `order[v::V]`, one batch per step. A pass takes as
many steps as its longest slot; a slot that is through has no data for the rest of the pass. Chunks without a batch
(empty ones, or shorter than a batch with `drop_last`) are left out.

Nothing here depends on the platform, the process or a library's version: the permutation sorts hashes of our own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graphft.errors import GraphftError

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ORDER, _RECORDS, _SYNC, _ASYNC = 1, 2, 3, 4


def mix(*values: int) -> int:
    """Returns a 64-bit hash of integers: splitmix64 (Steele, Lea, Flood, 2014) folded over them."""
    h = 0
    for value in values:
        h = (h + _GOLDEN + (value & _MASK)) & _MASK
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 31
    return h


def _mix_range(prefix: int, count: int) -> np.ndarray:
    """`mix` continued from hash `prefix` by each of 0 ... count - 1."""
    h = np.arange(count, dtype=np.uint64) + np.uint64((prefix + _GOLDEN) & _MASK)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def permutation(count: int, *key: int) -> np.ndarray:
    """Returns a permutation of 0 ... count - 1 as int64, the same everywhere for the same key."""
    return np.argsort(_mix_range(mix(*key), count), kind="stable")


def record_order(seed: int, pass_index: int, chunk: int, records: int) -> np.ndarray:
    """Returns the order in which a pass reads a chunk's records."""
    return permutation(records, _RECORDS, seed, pass_index, chunk)


def batch_seed(job_seed: int, step: int, slot: int) -> int:
    """Sync: the seed of the random numbers of (step, slot); 63 bits."""
    return mix(_SYNC, job_seed, step, slot) >> 1


def chunk_batch_seed(job_seed: int, pass_index: int, chunk: int, batch: int) -> int:
    """Async: the seed of the random numbers of a batch; 63 bits."""
    return mix(_ASYNC, job_seed, pass_index, chunk, batch) >> 1


@dataclass(frozen=True, slots=True)
class Located:
    """The batch of one (step, slot)."""

    pass_index: int
    chunk: int
    batch: int
    """Index inside the chunk: step - chunk_start_step."""
    samples: int
    chunk_start_step: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk's place in a pass: slot `slot` computes its batches at steps first_step ... last_step."""

    chunk: int
    slot: int
    first_step: int
    last_step: int

    @property
    def batches(self) -> int:
        return self.last_step - self.first_step + 1


class PassPlan:
    """One pass. `start_step`: its first step in the job."""

    def __init__(self, plan: Plan, index: int, start_step: int) -> None:
        self.index, self.start_step = index, start_step
        order = permutation(len(plan.records), _ORDER, plan.seed, index)
        self._chunks = [order[v :: plan.slots] for v in range(plan.slots)]
        self._ends = [np.cumsum(plan.batches[chunks]) for chunks in self._chunks]
        self._plan = plan
        self.steps = max(int(ends[-1]) if len(ends) else 0 for ends in self._ends)

    def locate(self, step: int, slot: int) -> Located | None:
        """Returns the batch of `slot` at `step` (of the job), None when it has no data (any more)."""
        offset, ends = step - self.start_step, self._ends[slot]
        i = int(np.searchsorted(ends, offset, side="right"))
        if i == len(ends):
            return None
        chunk = int(self._chunks[slot][i])
        begin = int(ends[i]) - int(self._plan.batches[chunk])
        batch = offset - begin
        size = self._plan.batch_size
        samples = min(size, self._plan.records[chunk] - batch * size)
        return Located(self.index, chunk, batch, samples, self.start_step + begin)

    def chunks(self) -> list[PlannedChunk]:
        """Returns every chunk that has a batch, by slot and then in the slot's order."""
        result = []
        for slot, (chunks, ends) in enumerate(zip(self._chunks, self._ends, strict=True)):
            counts = self._plan.batches[chunks]
            begins = ends - counts + self.start_step
            result += [
                PlannedChunk(c, slot, b, b + n - 1)
                for c, b, n in zip(chunks.tolist(), begins.tolist(), counts.tolist(), strict=True)
                if n
            ]
        return result


class Plan:
    """The plan of all passes. `records` holds the number of records of each chunk.

    Raises GraphftError when there is no batch at all, or a number makes no sense.
    """

    def __init__(
        self,
        records: Sequence[int],
        *,
        slots: int,
        batch_size: int,
        seed: int = 0,
        passes: int = 1,
        drop_last: bool = False,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.records = tuple(int(n) for n in records)
        if min(slots, batch_size, passes) < 1 or min(self.records, default=0) < 0:
            text = f"slots {slots}, batch_size {batch_size}, passes {passes}, records {min(self.records, default=0)}"
            raise GraphftError(text, rule="plan", help="slots, batch_size and passes are 1 or more, records 0 or more")
        self.slots, self.batch_size, self.seed, self.passes = slots, batch_size, seed, passes
        self.drop_last = drop_last
        self.lengths = self.records if lengths is None else tuple(lengths)
        """Records of each chunk with those that are in no batch: these are put in order."""
        counts = np.array(self.records, dtype=np.int64)
        self.batches: np.ndarray = counts // batch_size if drop_last else -(-counts // batch_size)
        """Number of batches of each chunk."""
        if not self.batches.sum():
            text = f"the data has no batch: {sum(self.records)} records in {len(self.records)} chunks, batches of "
            help = "give at least one record; choose a smaller batch_size, larger chunks, or drop_last=False"
            raise GraphftError(f"{text}{batch_size}", rule="no-batch", help=help)
        self._recent: dict[int, PassPlan] = {}

    @cached_property
    def start_steps(self) -> tuple[int, ...]:
        """The first step of each pass, and behind them the total."""
        if self.slots == 1 or (self.batches == self.batches[0]).all():  # whatever the order
            steps = PassPlan(self, 0, 0).steps
            return tuple(range(0, (self.passes + 1) * steps, steps))
        starts = [0]
        for index in range(self.passes):
            starts.append(starts[-1] + PassPlan(self, index, starts[-1]).steps)
        return tuple(starts)

    @property
    def samples(self) -> int:
        """Records of a pass that are in a batch."""
        return int(np.minimum(self.batches * self.batch_size, self.records).sum())

    @property
    def total_steps(self) -> int:
        return self.start_steps[-1]

    def pass_of(self, step: int) -> int:
        """Returns the pass that `step` belongs to; `passes` when the job ends before it."""
        return min(bisect_right(self.start_steps, step) - 1, self.passes)

    def pass_plan(self, index: int) -> PassPlan:
        """Returns the plan of one pass; the last few are kept."""
        if not 0 <= index < self.passes:
            help = f"passes are 0 to {self.passes - 1}"
            raise GraphftError(f"there is no pass {index}", rule="plan", help=help)
        if index not in self._recent:
            while len(self._recent) > 1:
                del self._recent[next(iter(self._recent))]
            self._recent[index] = PassPlan(self, index, self.start_steps[index])
        return self._recent[index]

    def locate(self, step: int, slot: int) -> Located | None:
        """Returns the batch of (step, slot); None when the slot has no data, or the job ended."""
        index = self.pass_of(step)
        return self.pass_plan(index).locate(step, slot) if 0 <= index < self.passes else None

    def order(self, pass_index: int, chunk: int) -> np.ndarray:
        """Returns the positions in the chunk of its records, in the order in which the pass reads them."""
        return record_order(self.seed, pass_index, chunk, self.lengths[chunk])[: self.records[chunk]]

    def positions(self, pass_index: int, chunk: int, batch: int) -> np.ndarray:
        """Returns the positions in the chunk of a batch's records, in the batch's order."""
        return self.order(pass_index, chunk)[batch * self.batch_size : (batch + 1) * self.batch_size]

    def chunks_of(self, pass_index: int) -> list[PlannedChunk]:
        """Returns every chunk of a pass that has a batch: its slot, first step and last step."""
        return self.pass_plan(pass_index).chunks()
