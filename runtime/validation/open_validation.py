"""One open validation, as a process takes part in it: the model, its range, and what the range has come to so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from graphft.ir import Program
from graphft.ops.context import ChunkWork
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.records import Validated, Validating
from graphft.runtime.etcd import KV
from graphft.runtime.protocol.decisions import Decided, RangeResult, as_number, decide, in_words, sums_as_text
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.runtime.validation.entries import Entries, LostEntries
from graphft.runtime.validation.ranges import Ranges
from graphft.runtime.validation.results import RangeResults, named
from graphft.transpiler.layout import assemble

if TYPE_CHECKING:
    from graphft.transpiler import Job

RENEW_SECONDS = 2.0
"""A claim is renewed with the first batch after so long."""


@dataclass(frozen=True)
class Conclusion:
    """The result of a validation, what follows from all of them so far (None: nothing is to), and the latter in
    words."""

    validated: Validated
    decided: Decided | None
    words: str


@dataclass
class _Held:
    """The range that this process holds."""

    number: int
    fence: int
    failures: int
    renewed: float
    results: RangeResults
    written: bool = False


class OpenValidation:
    """Used by one thread. `program`: the job's evaluation."""

    def __init__(self, job: Job, job_dir: Path, program: Program, step: int, of: Validating, ranges: Ranges) -> None:
        assert job.config.validate is not None
        self.job, self.config, self.program, self.step, self.of = job, job.config.validate, program, step, of
        self.ranges = ranges
        self._entries = Entries(job_dir, step, of)
        self._job_dir = job_dir
        self._best_models = (
            BestModels(job_dir, self.config.best.mode or "min") if self.config.best is not None else None
        )
        self._held: _Held | None = None
        self._model: Mapping[str, Tensor] | None = None

    # -- a range --------------------------------------------------------------------------------------------------

    def work(self, timeout: float, max_failures: int) -> ChunkWork | str | None:
        """The next batch of the range that this process holds, or of one that it claims now. A text: why the validation
        cannot be made. None: all ranges are computed or held by others."""
        self._deliver()
        if self._held is None:
            claimed = self.ranges.claim(timeout, max_failures)
            if claimed is None or isinstance(claimed, str):
                return claimed
            self._held = _Held(*claimed, time.monotonic(), RangeResults(self.program))
        elif time.monotonic() > self._held.renewed + RENEW_SECONDS and not self._renew(self._held, timeout):
            self._held = None  # it took too long, and is another's
            return self.work(timeout, max_failures)
        chunk, first, _ = self.config.ranges[self._held.number]
        batch = first + self._held.results.batches
        return ChunkWork(0, chunk, batch, self.config.samples(chunk, batch), 0)

    def _renew(self, held: _Held, timeout: float) -> bool:
        held.renewed = time.monotonic()
        return self.ranges.renew(held.number, held.fence, timeout)

    def add(self, samples: int, results: Sequence[Tensor]) -> None:
        """The results of the batch at hand, in the program's order."""
        assert self._held is not None
        self._held.results.add(samples, results)
        self._deliver()

    def _deliver(self) -> None:
        """Records the range that is computed. To be repeated when etcd or the storage has failed."""
        held = self._held
        if held is None or held.results.batches < self.config.ranges[held.number][2]:
            return
        if held.results.entries and not held.written:
            self._entries.write(held.number, held.results.entries)
            held.written = True
        result = RangeResult(held.results.samples, sums_as_text(held.results.sums), held.failures)
        self.ranges.complete(held.number, held.fence, result)
        self._held = None

    def give_back(self, why: str = "") -> int:
        """The range could not be computed, and why, or this process goes. Returns how often it has failed."""
        held, self._held = self._held, None
        return self.ranges.release(held.number, held.fence, why) if held is not None else 0

    # -- the model ------------------------------------------------------------------------------------------------

    def weights(self, names: Sequence[str]) -> list[Tensor]:
        """Returns the checkpoint's tensors. Raises DamagedCheckpoint, StorageUnavailable."""
        if self._model is None:
            whole, device = self._whole_model(every=True), torch.device(self.job.config.device)
            self._model = {name: whole[name].to(device) for name in names}
        return [self._model[name] for name in names]

    def _whole_model(self, every: bool) -> dict[str, Tensor]:
        """`every`: with what is not in its state_dict."""
        store = checkpoints_of(self._job_dir)
        manifest = store.read_manifest(self.of.checkpoint)
        shards = [store.read_part(manifest, index)[0] for index in range(self.job.config.pservers)]
        return assemble(self.job.trainer_program(), shards, every)

    # -- its end --------------------------------------------------------------------------------------------------

    def conclude(self) -> Conclusion | None:
        """Returns what it came to, once all ranges are computed; None before, and if another process has concluded it.
        Raises LostEntries: a range is to be computed again."""
        found = self.ranges.totals()
        if found is None:
            return None
        (samples, means), reduces = found, "reduce" in self.program.blocks
        try:
            entries = self._entries.read(self.ranges.count) if reduces else {}
        except LostEntries as error:
            if self.ranges.undo(error.number):
                raise
            return None  # another process has concluded it, and deleted them
        values = named(self.program, means, entries)
        epoch, numbers = self.job.config.plan.pass_of(self.step), {n: as_number(v) for n, v in values.items()}
        validated = Validated(self.step, epoch, samples, numbers, time.time())
        kv, before, now = self._decide(numbers)
        best = Kept(self.step, now.best) if now is not None and now.best is not None else None
        is_best = best is not None and now is not None and now.best_step == self.step
        if best is not None and is_best and self._best_models is not None:
            self._best_models.write(best, self._whole_model(every=False))
        if not self.ranges.conclude(validated, kv, now):
            return None  # somebody has; or this is to be tried again
        if reduces:
            self._entries.delete()
        if best is not None and is_best and self._best_models is not None:
            self._best_models.forget_worse(best)
        return Conclusion(validated, now, in_words(before, now) if now is not None else "")

    def _with_best(self, before: Decided) -> Decided:
        """An etcd that was lost, or a run that goes on in another folder, does not know of the best model that is
        there."""
        kept = self._best_models.best(before=self.step) if self._best_models is not None else None
        if kept is None or self._best_models is None:
            return before
        known = Kept(before.best_step, before.best) if before.best is not None else None
        mode = self._best_models.mode
        if known is not None and known.rank(mode) <= kept.rank(mode):
            return before
        return msgspec.structs.replace(before, best=kept.value, best_step=kept.step)

    def abandon(self) -> bool:
        """Ends it without a result, if it is open. Whether it did."""
        epoch = self.job.config.plan.pass_of(self.step)
        abandoned = self.ranges.abandon(Validated(self.step, epoch, 0, {}, time.time()))
        self._entries.delete()
        return abandoned

    def _decide(self, means: Mapping[str, float | str]) -> tuple[KV | None, Decided, Decided | None]:
        """Returns what followed from those before, as it is stored and read; and what follows now, if something is
        to."""
        if not self.config.criteria:
            return None, Decided(), None
        kv = self.ranges.decided()
        before = self._with_best(msgspec.json.decode(kv.value, type=Decided) if kv is not None else Decided())
        made = before.step >= self.step  # then this one is made again, and decides nothing
        return kv, before, before if made else decide(self.config, before, self.step, means)
