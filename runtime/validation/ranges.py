"""The ranges of one open validation in etcd: claimed, renewed, completed; and at last what it all came to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.etcd import KV, create_is, delete_op, delete_prefix_op, get_op, mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import validation_ranges as protocol
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.decisions import Decided
from graphft.runtime.protocol.validation_ranges import RangeClaim, RangeRecord
from graphft.runtime.queue.transactions import commit

LOOK_SECONDS = 0.5
"""Between two looks at ranges that are all held by others."""


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
        self._known: dict[int, KV] = {}
        self._claims: dict[int, KV] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        """By range, the revision of its claim, and since when it is that one: on this process's own clock."""

    def claim(self, timeout: float, max_failures: int) -> tuple[int, int, RangeClaim] | str | None:
        """A range that nobody holds, the revision of the claim, and the claim. A text: why none can be computed ever.
        None: there is none now."""
        if not self._free:
            self._look(timeout)
        while self._free:
            number = self._free.pop()
            held = self._claims.get(number)
            if held is not None and not commit(self.etcd, [protocol.expire(self._prefix, number, held)]).ok:
                continue
            change = protocol.claim(self._prefix, number, self._known.get(number), self._trainer, max_failures)
            if isinstance(change, str):
                return f"range {number} of {self.count} cannot be computed: {change}"
            found = commit(self.etcd, [change], self._lease, [self._open])
            if found.ok:
                mine = msgspec.json.decode(change.puts[1].value, type=RangeClaim)
                return number, found.revision, mine
        return None

    def _look(self, timeout: float) -> None:
        """Reads all ranges: those that are not computed are free, if nobody holds them or its holder has not got on for
        `timeout` seconds."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        self._read()
        seen = {number: self._seen.get(number, (0, now)) for number in self._claims}
        self._seen = {
            number: seen[number] if seen[number][0] == kv.mod_revision else (kv.mod_revision, now)
            for number, kv in self._claims.items()
        }
        self._free = [
            number
            for number in range(self.count)
            if not protocol.decode_range(self._known.get(number)).done
            and (number not in self._claims or now - self._seen[number][1] > timeout)
        ]
        self._random.shuffle(self._free)  # trainers that look at the same time do not all try the same

    def _read(self) -> None:
        kvs = self.etcd.range(self._prefix).kvs
        by_kind: dict[str, dict[int, KV]] = {"range": {}, "claim": {}}
        for kv in kvs:
            kind, number = kv.key.removeprefix(self._prefix).split("/")
            by_kind[kind][int(number)] = kv
        self._known, self._claims = by_kind["range"], by_kind["claim"]

    def renew(self, number: int, fence: int, mine: RangeClaim) -> bool:
        """Says that this process gets on with its range. False: it holds it no more."""
        change = protocol.renew(self._prefix, number, fence, mine)
        return commit(self.etcd, [change], self._lease, [self._open]).ok

    def complete(self, number: int, samples: int, sums: Sequence[float]) -> None:
        """Records what a range came to, unless somebody has."""
        self._settle(number, lambda known, _: protocol.complete(self._prefix, number, known, samples, sums))
        if not self._free:
            self._next_look = 0.0

    def release(self, number: int, fence: int, why: str = "") -> None:
        """Gives a range back, if it is this process's. `why`: it has failed."""

        def make(known: KV | None, held: KV | None) -> Change | None:
            mine = held is not None and held.create_revision == fence
            return protocol.release(self._prefix, number, known, fence, why) if mine else None

        self._settle(number, make)

    def _settle(self, number: int, make: Callable[[KV | None, KV | None], Change | None]) -> bool:
        """Carries out what `make` makes of a range's record and claim. False: it makes nothing of them, or the
        validation is over."""
        keys = [protocol.range_key(self._prefix, number), protocol.claim_key(self._prefix, number)]
        while True:
            read = self.etcd.txn([self._open], [get_op(key) for key in keys])
            change = make(read.kv(0), read.kv(1)) if read.ok else None
            if change is None or commit(self.etcd, [change], also=[self._open]).ok:
                return change is not None

    def undo(self, number: int) -> bool:
        """Has a range computed again; False if it is not computed, or the validation is over."""

        def make(known: KV | None, _: KV | None) -> Change | None:
            done = known is not None and protocol.decode_range(known).done
            return protocol.undo(self._prefix, number, known) if known is not None and done else None

        self._next_look = 0.0
        return self._settle(number, make)

    def totals(self) -> tuple[int, tuple[float, ...]] | None:
        """(samples, the mean of each result), if all ranges were computed at the last look."""
        records: Mapping[int, RangeRecord] = {n: protocol.decode_range(kv) for n, kv in self._known.items()}
        return protocol.totals(records, self.count)

    def decided(self) -> KV | None:
        """What followed from the validations before."""
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
