"""The second net below leases: a claim whose holder lives, but makes no progress, is taken away.

The holder is barred in the same transaction: it does not take it back at once (`roles/bar.py`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection

import msgspec

from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Barred
from graphft.runtime.etcd import KV, value_is
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Pending, Put
from graphft.runtime.queue.transactions import commit

LOOKS = 20
"""Looks per time-out: few enough that etcd is not asked all the time."""


class StaleClaims:
    """Watches the pending chunks of a pass. Holders renew their claims while they make progress.

    Age is measured on this process's own clock, since it saw the record change: no two clocks are compared.
    """

    def __init__(self, etcd: Store, keys: Keys, events: Events) -> None:
        self.etcd, self.keys, self.events = etcd, keys, events
        self._seen: dict[str, tuple[int, float]] = {}
        self._next = 0.0

    def look(self, pass_index: int, timeout: float, held: Collection[int] = ()) -> None:
        """Takes away what was not renewed for `timeout` seconds.

        `held`: revisions of the own claims, which stay. What else bears the own name is a claim whose answer was lost.
        """
        prefix, now = self.keys.queue(pass_index), time.monotonic()
        if now < self._next:
            return
        self._next = now + timeout / LOOKS
        pending = self.etcd.range(f"{prefix}pending/").kvs
        seen = {kv.key: self._seen.get(kv.key, (0, now)) for kv in pending}
        self._seen = {
            kv.key: seen[kv.key] if seen[kv.key][0] == kv.mod_revision else (kv.mod_revision, now) for kv in pending
        }
        for kv in pending:
            if kv.create_revision not in held:
                self._check(prefix, kv, now - self._seen[kv.key][1], timeout)

    def _check(self, prefix: str, kv: KV, age: float, timeout: float) -> None:
        pending, chunk = msgspec.json.decode(kv.value, type=Pending), chunk_queue.chunk_of(kv.key)
        # The holder's clock as it can be told from here: when it wrote the record, and the time since.
        change = chunk_queue.expire(prefix, chunk, kv, pending.deadline - timeout + age)
        if change is None:
            return
        also = []
        if pending.slot >= 0:  # sync: with the chunk goes the slot
            slot = self.keys.slot(pending.slot)
            also = [value_is(slot, pending.trainer.encode())]
            change = dataclasses.replace(change, deletes=(*change.deletes, slot))
        reason = f"it made no progress with chunk {chunk} for {age:.0f} s"
        bar = msgspec.json.encode(Barred(reason, self.events.who))
        change = dataclasses.replace(change, puts=(Put(self.keys.barred(pending.trainer), bar, leased=True),))
        if commit(self.etcd, [change], kv.lease, also).ok:
            what = f"slot {pending.slot}" if pending.slot >= 0 else f"chunk {chunk}"
            self.events.emit(
                "stale-claim",
                f"{what} was taken from trainer {pending.trainer}: no progress for {age:.0f} s",
                chunk=chunk,
                slot=pending.slot,
                trainer=pending.trainer,
            )
