"""An open validation: its ranges in etcd, and this process's part in it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from graphft.ir import Program
from graphft.ops.context import ChunkWork
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Validated, Validating
from graphft.runtime.etcd import KV, absent, create_is, delete_op, delete_prefix_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.decisions import Decided, RangeResult, as_number, decide, in_words, sums_as_text, totals
from graphft.runtime.queue.transactions import Ages
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.runtime.validation.results import Entries, LostEntries, RangeResults, named
from graphft.transpiler.layout import assemble

LOOK_SECONDS = 0.5
"""Between two looks while others hold all ranges."""
RENEW_SECONDS = 2.0
"""A claim is renewed with the first batch after so long."""


class Ranges:
    """The ranges in etcd, for one thread. The records are read again when no free range is left among them.

        /<job>.validation/<step>/pending/<range> = the trainer that computes it, on its lease
        /<job>.validation/<step>/failed/<range>  = how many tried in vain
        /<job>.validation/<step>/done/<range>    = its RangeResult

    Two processes may compute the same range: the result is the same. `opened`: the validation's record; nothing changes
    any more once it is over, or was opened anew.
    """

    def __init__(self, etcd: Store, keys: Keys, step: int, opened: KV, count: int, trainer: str, lease: int) -> None:
        self.etcd, self.step, self.count, self._lease = etcd, step, count, lease
        self._open = create_is(opened.key, opened.create_revision)
        self._prefix, self._keys, self._me = keys.ranges(step), keys, trainer.encode()
        self._free: list[int] = []
        self._random = random.Random(trainer)
        self._next_look = self._renewed = 0.0
        self._pending: dict[int, KV] = {}
        self._done: dict[int, RangeResult] = {}
        self._ages = Ages()

    def _key(self, kind: str, number: int) -> str:
        return f"{self._prefix}{kind}/{number}"

    def claim(self, timeout: float) -> int | None:
        """Claims a free range, and returns its number; None if there is no free one now. This process holds none."""
        if not self._free:
            self._look(timeout)
        while self._free:
            number = self._free.pop()
            key, stale = self._key("pending", number), self._pending.get(number)
            same = [self._open, absent(self._key("done", number))]
            same.append(mod_is(key, stale.mod_revision if stale is not None else 0))
            if self.etcd.txn(same, [put_op(key, self._me, self._lease)]).ok:
                self._renewed = time.monotonic()
                return number
        return None

    def _look(self, timeout: float) -> None:
        """Reads all ranges. Those are free that are neither computed nor were renewed within `timeout` seconds."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        found: dict[str, dict[int, KV]] = {"pending": {}, "failed": {}, "done": {}}
        for kv in self.etcd.range(self._prefix).kvs:
            kind, _, number = kv.key.removeprefix(self._prefix).partition("/")
            found[kind][int(number)] = kv
        self._pending = found["pending"]
        self._done = {n: msgspec.json.decode(kv.value, type=RangeResult) for n, kv in found["done"].items()}
        ages = self._ages.look(self._pending.values(), now)
        held = {n for n, kv in self._pending.items() if kv.value != self._me and ages[kv.key] <= timeout}
        self._free = [n for n in range(self.count) if n not in self._done and n not in held]
        self._random.shuffle(self._free)  # trainers that look at the same time do not all try the same

    def renew(self, number: int) -> None:
        if time.monotonic() > self._renewed + RENEW_SECONDS:
            self._renewed, key = time.monotonic(), self._key("pending", number)
            self.etcd.txn([self._open, value_is(key, self._me)], [put_op(key, self._me, self._lease)])

    def complete(self, number: int, result: RangeResult) -> None:
        """Records the result of a range."""
        done = put_op(self._key("done", number), msgspec.json.encode(result))
        self.etcd.txn([self._open], [done, delete_op(self._key("pending", number))])
        if not self._free:
            self._next_look = 0.0

    def release(self, number: int, failed: bool) -> int:
        """Gives a range back, which counts a failure if it has `failed`. Returns its failures."""
        pending, key = self._key("pending", number), self._key("failed", number)
        mine = [self._open, value_is(pending, self._me)]
        while (read := self.etcd.txn(mine, [get_op(key)])).ok:
            before = read.kv(0)
            failures = (int(before.value) if before is not None else 0) + failed
            same = mod_is(key, before.mod_revision if before is not None else 0)
            if self.etcd.txn([*mine, same], [delete_op(pending), put_op(key, str(failures).encode())]).ok:
                return failures
        return 0  # it is another's by now

    def begin_anew(self) -> None:
        """Has all ranges computed again."""
        self._next_look = 0.0
        self.etcd.txn([self._open], [delete_prefix_op(self._prefix)])

    def totals(self) -> tuple[int, tuple[float, ...]] | None:
        """Returns (samples, the mean of each result), if all ranges were computed at the last look."""
        return totals(self._done, self.count)

    def end(self, validated: Validated, before: KV | None = None, decided: Decided | None = None) -> bool:
        """Records the result, which may have no samples, and the decisions, if those before are still `before`. False:
        another process has, or the job went back behind its step."""
        value, keys, compare = msgspec.json.encode(validated), self._keys, [self._open]
        ops = [put_op(keys.newest_validated, value), delete_op(self._open.key), delete_prefix_op(self._prefix)]
        if validated.samples:
            ops.append(put_op(keys.validated(self.step), value))
        if decided is not None:
            compare.append(mod_is(keys.decided, before.mod_revision if before is not None else 0))
            ops.append(put_op(keys.decided, msgspec.json.encode(decided)))
        return self.etcd.txn(compare, ops).ok


class OpenValidation:
    """For one thread. `program`: the job's evaluation. `opened`: the validation's record."""

    def __init__(self, member: Member, job_dir: Path, program: Program, step: int, opened: KV) -> None:
        config = member.config.validate
        assert config is not None
        self.member, self.job, self.config, self.program, self.step = member, member.job, config, program, step
        self.of = msgspec.json.decode(opened.value, type=Validating)
        self.ranges = Ranges(member.etcd, member.keys, step, opened, len(config.ranges), member.id, member.lease)
        self._entries = Entries(job_dir, step, self.of)
        self._job_dir = job_dir
        self._best_models = BestModels(job_dir, config.best.mode or "min") if config.best is not None else None
        self._held: int | None = None
        self._results = RangeResults(program)
        self._model: Mapping[str, Tensor] | None = None

    # -- a range --------------------------------------------------------------------------------------------------

    def work(self, timeout: float) -> ChunkWork | None:
        """Returns the next batch of the range that this process holds, or claims now; None: all ranges are computed, or
        held by others."""
        self._deliver()
        if self._held is not None:
            self.ranges.renew(self._held)
        else:
            self._held, self._results = self.ranges.claim(timeout), RangeResults(self.program)
            if self._held is None:
                return None
        chunk, first, _ = self.config.ranges[self._held]
        batch = first + self._results.batches
        return ChunkWork(0, chunk, batch, self.config.samples(chunk, batch), 0)

    def add(self, samples: int, results: Sequence[Tensor]) -> None:
        """Adds the results of the batch at hand, in the program's order."""
        self._results.add(samples, results)
        self._deliver()

    def _deliver(self) -> None:
        """Records the range if it is computed. May be repeated when etcd or the storage has failed."""
        number, results = self._held, self._results
        if number is None or results.batches < self.config.ranges[number][2]:
            return
        if results.entries:
            self._entries.write(number, results.entries)
        self.ranges.complete(number, RangeResult(results.samples, sums_as_text(results.sums)))
        self._held = None

    def give_back(self, failed: bool = False) -> int:
        """Gives the range back, which may have `failed`. Returns its failures."""
        number, self._held = self._held, None
        return self.ranges.release(number, failed) if number is not None else 0

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

    def conclude(self) -> None:
        """Records the result and what follows from it, once all ranges are computed. Raises LostEntries: all are
        computed again."""
        found = self.ranges.totals()
        if found is None:
            return
        (samples, means), reduces = found, "reduce" in self.program.blocks
        try:
            entries = self._entries.read(self.ranges.count) if reduces else {}
        except LostEntries:
            self.ranges.begin_anew()
            raise
        numbers = {name: as_number(value) for name, value in named(self.program, means, entries).items()}
        kv, before, now = self._decide(numbers)
        models, best = self._best_models, None
        if models is not None and now is not None and now.best is not None and now.best_step == self.step:
            best = Kept(self.step, now.best)
            models.write(best, self._whole_model(every=False))
        if not self.ranges.end(self._validated(samples, numbers), kv, now):
            return  # another process has; or this is to be tried again
        if reduces:
            self._entries.delete()
        if models is not None and best is not None:
            models.forget_worse(best)
        emit, words = self.member.events.emit, in_words(before, now) if now is not None else ""
        text = ", ".join(f"{name} {float(mean):.6g}" for name, mean in numbers.items())
        text = f"validation of step {self.step}: {text} ({samples} records)" + f"; {words}" * bool(words)
        emit("validated", text, step=self.step)
        if now is not None and now.stopped:
            emit("stopped-early", f"the job ends at step {self.step}: {now.stopped}", step=self.step)

    def _validated(self, samples: int, means: dict[str, float | str]) -> Validated:
        return Validated(self.step, self.job.config.plan.pass_of(self.step), samples, means, time.time())

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
        abandoned = self.ranges.end(self._validated(0, {}))
        self._entries.delete()
        return abandoned

    def _decide(self, means: Mapping[str, float | str]) -> tuple[KV | None, Decided, Decided | None]:
        """Returns the decisions of the validations before, as stored and decoded, and those of now, if the job makes
        any."""
        if not self.config.criteria:
            return None, Decided(), None
        kv = self.member.etcd.get(self.member.keys.decided)
        before = self._with_best(msgspec.json.decode(kv.value, type=Decided) if kv is not None else Decided())
        made = before.step >= self.step  # then this one is made again, and decides nothing
        return kv, before, before if made else decide(self.config, before, self.step, means)
