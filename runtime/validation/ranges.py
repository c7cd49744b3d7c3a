"""The ranges of one open validation in etcd, handed out as chunks are; and at last what it all came to."""

from __future__ import annotations

import random
import time

import msgspec

from graphft.errors import plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.etcd import KV, create_is, delete_op, delete_prefix_op, get_op, mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, chunk_of, decode_todo
from graphft.runtime.protocol.decisions import Decided, RangeResult, totals
from graphft.runtime.queue.transactions import Ages, commit, give_back, renew

LOOK_SECONDS = 0.5
"""Between two looks at ranges that are all held by others."""
MOST_CLAIMS = 1000
"""Of a range that nobody computes to its end: more, and it is what ends its processes."""


class Ranges:
    """Used by one thread. What is read of all ranges is kept until no free one is left in it.

    `opened`: the validation's record. Nothing is changed any more once it is over, or was opened anew.
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
        """A range that nobody holds, the revision of the claim, and how many have failed at it. A text: why none can be
        computed ever. None: there is none now."""
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
            change = chunk_queue.claim(
                self._prefix,
                number,
                record,
                trainer=self._trainer,
                now=time.time(),
                timeout=timeout,
                max_failures=max_failures,
            )
            found = commit(self.etcd, [change], self._lease, [self._open])
            if found.ok:
                return number, found.revision, todo.failures
        return None

    def _look(self, timeout: float) -> None:
        """Reads all ranges: those that are not computed are free, if nobody holds them or its holder has not got on for
        `timeout` seconds."""
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

    def renew(self, number: int, fence: int, timeout: float) -> bool:
        """Says that this process gets on with its range. False: it holds it no more."""
        also = [self._open]
        return renew(self.etcd, self._prefix, number, fence, timeout=timeout, lease=self._lease, also=also)

    def complete(self, number: int, fence: int, result: RangeResult) -> None:
        """Records what a range came to, unless it is another's by now, who comes to the same."""
        change = chunk_queue.complete(self._prefix, number, fence, msgspec.json.encode(result))
        commit(self.etcd, [change], also=[self._open])
        if not self._free:
            self._next_look = 0.0

    def release(self, number: int, fence: int, why: str = "") -> int:
        """Gives a range back, if it is this process's. `why`: it has failed. Returns how often it has."""
        failures = 0

        def make(_: int, record: KV) -> Change:
            nonlocal failures
            todo = decode_todo(record)
            new = todo.failed(todo.progress, ()) if why else todo.released(todo.progress)
            failures = new.failures
            return chunk_queue.put_back(self._prefix, number, fence, record, new, plain_text(why))

        return failures if give_back(self.etcd, self._prefix, {number: fence}, make, [self._open]) else 0

    def undo(self, number: int) -> bool:
        """Has a range computed again, which counts as a failure of it; False if it is not computed, or the validation
        is over."""
        self._next_look = 0.0
        read = self.etcd.txn([self._open], [get_op(chunk_queue.done_key(self._prefix, number))])
        done = read.kv(0) if read.ok else None
        if done is None:
            return False
        failures = msgspec.json.decode(done.value, type=RangeResult).failures
        change = chunk_queue.requeue(self._prefix, number, done, 0, failures + 1)
        return commit(self.etcd, [change], also=[self._open]).ok

    def totals(self) -> tuple[int, tuple[float, ...]] | None:
        """(samples, the mean of each result), if all ranges were computed at the last look."""
        records = {n: msgspec.json.decode(kv.value, type=RangeResult) for n, kv in self._known["done"].items()}
        return totals(records, self.count)

    def decided(self) -> KV | None:
        """Returns what followed from the validations before."""
        return self.etcd.get(self._keys.decided)

    def conclude(self, validated: Validated, before: KV | None, decided: Decided | None) -> bool:
        """Writes what it came to, and what follows from that, where `before` is what followed from those before. False:
        somebody has, or everyone has gone back behind its step."""
        value = msgspec.json.encode(validated)
        done = [put_op(name, value) for name in (self._keys.validated(self.step), self._keys.newest_validated)]
        compare = [self._open]
        if decided is not None:
            compare.append(mod_is(self._keys.decided, before.mod_revision if before is not None else 0))
            done.append(put_op(self._keys.decided, msgspec.json.encode(decided)))
        return self.etcd.txn(compare, [*done, delete_op(self._open.key), delete_prefix_op(self._prefix)]).ok

    def abandon(self, validated: Validated) -> bool:
        """Ends it without a result: `validated` says only that it is over."""
        over = put_op(self._keys.newest_validated, msgspec.json.encode(validated))
        return self.etcd.txn([self._open], [over, delete_op(self._open.key), delete_prefix_op(self._prefix)]).ok
