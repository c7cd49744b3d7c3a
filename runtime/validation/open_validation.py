"""An open validation: its ranges in etcd, which are handed out as chunks are, and this process's part in it."""

from __future__ import annotations

import random
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
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated, Validating
from graphft.runtime.etcd import KV, create_is, delete_op, delete_prefix_op, get_op, mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, chunk_of, decode_todo
from graphft.runtime.protocol.decisions import Decided, RangeResult, as_number, decide, in_words, sums_as_text, totals
from graphft.runtime.queue.transactions import Ages, commit, give_back, renew
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.runtime.validation.results import Entries, LostEntries, RangeResults, named
from graphft.transpiler.layout import assemble

if TYPE_CHECKING:
    from graphft.transpiler import Job

LOOK_SECONDS = 0.5
"""Between two looks while others hold all ranges."""
MOST_CLAIMS = 1000
"""A range that was claimed so often ends the processes that compute it."""
RENEW_SECONDS = 2.0
"""A claim is renewed with the first batch after so long."""


class Ranges:
    """The ranges in etcd, for one thread. The records are read again when no free range is left among them.

    `opened`: the validation's record; nothing changes any more once it is over, or was opened anew.
    """

    def __init__(self, etcd: Store, keys: Keys, step: int, opened: KV, count: int, trainer: str, lease: int) -> None:
        self.etcd, self.step, self.count, self._trainer, self._lease = etcd, step, count, trainer, lease
        self._open = create_is(opened.key, opened.create_revision)
        self._prefix, self._keys = keys.ranges(step), keys
        self._free: list[int] = []
        self._random = random.Random(trainer)
        self._next_look = 0.0
        self._known: dict[str, dict[int, KV]] = {"todo": {}, "pending": {}, "done": {}}
        self._ages = Ages()

    def claim(self, timeout: float, max_failures: int) -> tuple[int, int, int] | str | None:
        """Claims a free range. Returns its number, the revision of the claim, and its failures so far; a text: why it
        cannot be computed; None: there is no free one now."""
        if not self._free:
            self._look(timeout)
        while self._free:
            number = self._free.pop()
            held, record = self._known["pending"].get(number), self._known["todo"].get(number)
            if held is not None and not commit(self.etcd, [chunk_queue.displace(self._prefix, number, held)]).ok:
                continue
            todo = decode_todo(record)
            if todo.failures >= max_failures or todo.attempt >= MOST_CLAIMS:
                tried = f"{todo.failures} of {todo.attempt} that tried have failed"
                return f"range {number} of {self.count} cannot be computed: {tried}"
            change = chunk_queue.claim(self._prefix, number, record, trainer=self._trainer, max_failures=max_failures)
            found = commit(self.etcd, [change], self._lease, [self._open])
            if found.ok:
                return number, found.revision, todo.failures
        return None

    def _look(self, timeout: float) -> None:
        """Reads all ranges. Those are free that are neither computed nor were renewed within `timeout` seconds."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        self._known = {"todo": {}, "pending": {}, "done": {}}
        for kv in self.etcd.range(self._prefix).kvs:
            self._known[kv.key.removeprefix(self._prefix).partition("/")[0]][chunk_of(kv.key)] = kv
        ages = self._ages.look(self._known["pending"].values(), now)
        stale = {chunk_of(key) for key, age in ages.items() if age > timeout}
        held = self._known["pending"].keys() - stale
        self._free = [n for n in range(self.count) if n not in self._known["done"] and n not in held]
        self._random.shuffle(self._free)  # trainers that look at the same time do not all try the same

    def renew(self, number: int, fence: int) -> bool:
        """Renews the claim of a range. False: it is lost."""
        return renew(self.etcd, self._prefix, number, fence, self._lease, also=[self._open])

    def complete(self, number: int, fence: int, result: RangeResult) -> None:
        """Records the result of a range, unless it is another's by now, who computes the same."""
        change = chunk_queue.complete(self._prefix, number, fence, msgspec.json.encode(result))
        commit(self.etcd, [change], also=[self._open])
        if not self._free:
            self._next_look = 0.0

    def release(self, number: int, fence: int, why: str = "") -> int:
        """Gives a range back; with `why`, counts a failure. Returns its failures."""
        failures = 0

        def make(_: int, record: KV) -> Change:
            nonlocal failures
            todo = decode_todo(record)
            new = todo.failed(todo.progress, ()) if why else todo.released(todo.progress)
            failures = new.failures
            return chunk_queue.put_back(self._prefix, number, fence, record, new)

        return failures if give_back(self.etcd, self._prefix, {number: fence}, make, [self._open]) else 0

    def undo(self, number: int) -> bool:
        """Has a computed range computed again, and counts a failure. False: the validation is over."""
        self._next_look = 0.0
        read = self.etcd.txn([self._open], [get_op(chunk_queue.done_key(self._prefix, number))])
        done = read.kv(0) if read.ok else None
        if done is None:
            return False
        failures = msgspec.json.decode(done.value, type=RangeResult).failures
        change = chunk_queue.requeue(self._prefix, number, done, 0, failures + 1)
        return commit(self.etcd, [change], also=[self._open]).ok

    def totals(self) -> tuple[int, tuple[float, ...]] | None:
        """Returns (samples, the mean of each result), if all ranges were computed at the last look."""
        records = {n: msgspec.json.decode(kv.value, type=RangeResult) for n, kv in self._known["done"].items()}
        return totals(records, self.count)

    def decided(self) -> KV | None:
        """Returns the decisions of the validations before."""
        return self.etcd.get(self._keys.decided)

    def conclude(self, validated: Validated, before: KV | None, decided: Decided | None) -> bool:
        """Records the result and the decisions, if those before are still `before`. False: another process has, or the
        job went back behind its step."""
        value = msgspec.json.encode(validated)
        done = [put_op(name, value) for name in (self._keys.validated(self.step), self._keys.newest_validated)]
        compare = [self._open]
        if decided is not None:
            compare.append(mod_is(self._keys.decided, before.mod_revision if before is not None else 0))
            done.append(put_op(self._keys.decided, msgspec.json.encode(decided)))
        return self.etcd.txn(compare, [*done, delete_op(self._open.key), delete_prefix_op(self._prefix)]).ok

    def abandon(self, validated: Validated) -> bool:
        """Ends it without a result: `validated` has none."""
        over = put_op(self._keys.newest_validated, msgspec.json.encode(validated))
        return self.etcd.txn([self._open], [over, delete_op(self._open.key), delete_prefix_op(self._prefix)]).ok


@dataclass(frozen=True)
class Conclusion:
    """The result of a validation, the decisions so far (None: the job makes none), and what has changed, in words."""

    validated: Validated
    decided: Decided | None
    words: str


@dataclass
class _Held:
    number: int
    fence: int
    failures: int
    renewed: float
    results: RangeResults
    written: bool = False


class OpenValidation:
    """For one thread. `program`: the job's evaluation."""

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
        """Returns the next batch of the range that this process holds, or claims now; a text: why the validation cannot
        be made; None: all ranges are computed, or held by others."""
        self._deliver()
        if self._held is None:
            claimed = self.ranges.claim(timeout, max_failures)
            if claimed is None or isinstance(claimed, str):
                return claimed
            self._held = _Held(*claimed, time.monotonic(), RangeResults(self.program))
        elif time.monotonic() > self._held.renewed + RENEW_SECONDS:
            self._held.renewed = time.monotonic()
            if not self.ranges.renew(self._held.number, self._held.fence):
                self._held = None  # it took too long, and is another's
                return self.work(timeout, max_failures)
        chunk, first, _ = self.config.ranges[self._held.number]
        batch = first + self._held.results.batches
        return ChunkWork(0, chunk, batch, self.config.samples(chunk, batch), 0)

    def add(self, samples: int, results: Sequence[Tensor]) -> None:
        """Adds the results of the batch at hand, in the program's order."""
        assert self._held is not None
        self._held.results.add(samples, results)
        self._deliver()

    def _deliver(self) -> None:
        """Records the range if it is computed. May be repeated when etcd or the storage has failed."""
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
        """Gives the range back; with `why`, it could not be computed. Returns its failures."""
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
        """`every`: includes what is not in its state_dict."""
        store = checkpoints_of(self._job_dir)
        manifest = store.read_manifest(self.of.checkpoint)
        shards = [store.read_part(manifest, index)[0] for index in range(self.job.config.pservers)]
        return assemble(self.job.trainer_program(), shards, every)

    # -- its end --------------------------------------------------------------------------------------------------

    def conclude(self) -> Conclusion | None:
        """Returns the result, once all ranges are computed; None before, and if another process has concluded it.
        Raises LostEntries: a range is computed again."""
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
        models, best = self._best_models, None
        if models is not None and now is not None and now.best is not None and now.best_step == self.step:
            best = Kept(self.step, now.best)
            models.write(best, self._whole_model(every=False))
        if not self.ranges.conclude(validated, kv, now):
            return None  # another process has; or this is to be tried again
        if reduces:
            self._entries.delete()
        if models is not None and best is not None:
            models.forget_worse(best)
        return Conclusion(validated, now, in_words(before, now) if now is not None else "")

    def _with_best(self, before: Decided) -> Decided:
        """Adds the best model that is in the folder, which an etcd that was lost does not know."""
        models = self._best_models
        kept = models.best(before=self.step) if models is not None else None
        if models is None or kept is None:
            return before
        known = Kept(before.best_step, before.best) if before.best is not None else None
        if known is not None and known.rank(models.mode) <= kept.rank(models.mode):
            return before
        return msgspec.structs.replace(before, best=kept.value, best_step=kept.step)

    def abandon(self) -> bool:
        """Ends it without a result. False: it was over."""
        epoch = self.job.config.plan.pass_of(self.step)
        abandoned = self.ranges.abandon(Validated(self.step, epoch, 0, {}, time.time()))
        self._entries.delete()
        return abandoned

    def _decide(self, means: Mapping[str, float | str]) -> tuple[KV | None, Decided, Decided | None]:
        """Returns the decisions of the validations before, as stored and decoded, and those of now, if the job makes
        any."""
        if not self.config.criteria:
            return None, Decided(), None
        kv = self.ranges.decided()
        before = self._with_best(msgspec.json.decode(kv.value, type=Decided) if kv is not None else Decided())
        made = before.step >= self.step  # then this one is made again, and decides nothing
        return kv, before, before if made else decide(self.config, before, self.step, means)
