"""Ranges of a validation in a real etcd: what processes that take part in it see of each other."""

from __future__ import annotations

import msgspec
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated, Validating
from graphft.runtime.etcd import Etcd
from graphft.runtime.validation import ranges as module
from graphft.runtime.validation.ranges import Ranges
from tests.support.waiting import until

STEP, COUNT = 40, 3
WHAT = Validated(STEP, 1, 9, {"loss": 0.5}, 0.0)


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)


def opened(etcd: Etcd, keys: Keys, generation: int = 0) -> None:
    etcd.put(keys.validating(STEP), msgspec.json.encode(Validating(generation, "step-40")))


def ranges(etcd: Etcd, keys: Keys, trainer: str, lease: int = 0) -> Ranges:
    kv = etcd.get(keys.validating(STEP))
    assert kv is not None
    return Ranges(etcd, keys, STEP, kv, COUNT, trainer, lease)


def claim(of: Ranges, timeout: float = 60.0) -> int | None:
    found = of.claim(timeout, 3)
    assert not isinstance(found, str), found
    return found[0] if found is not None else None


def test_each_range_is_held_once_and_counts_once(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    a, b = ranges(etcd, keys, "a"), ranges(etcd, keys, "b")
    held = [claim(a), claim(b), claim(a)]
    assert sorted(map(str, held)) == ["0", "1", "2"]
    assert claim(b) is None
    for number in (0, 1, 2):
        b.complete(number, 3, [1.5 * number])
        a.complete(number, 3, [99.0])
    assert claim(a) is None
    assert a.totals() == (9, (0.5,))
    assert a.conclude(WHAT, None, None)
    assert not b.conclude(WHAT, None, None)
    assert etcd.range(keys.ranges(STEP)).kvs == etcd.range(keys.all_validating).kvs == ()
    newest = etcd.get(keys.newest_validated)
    assert newest is not None
    assert msgspec.json.decode(newest.value, type=Validated) == WHAT


def test_a_dead_holders_range_is_free_and_a_slow_ones_when_it_is_stale(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    lease, _ = etcd.lease_grant(60)
    dead, slow, other = ranges(etcd, keys, "dead", lease), ranges(etcd, keys, "slow"), ranges(etcd, keys, "other")
    taken = claim(dead)
    found = slow.claim(60.0, 3)
    assert isinstance(found, tuple)
    number, fence, mine = found
    etcd.lease_revoke(lease)
    assert {claim(other), claim(other)} >= {taken}
    assert claim(other, 60.0) is None
    assert slow.renew(number, fence, mine)
    claimed: set[int | None] = set()
    until(lambda: claimed.add(claim(other, 0.01)) or claimed >= {0, 1, 2})  # nobody gets on any more
    assert not slow.renew(number, fence, mine)


def test_what_was_opened_anew_takes_nothing_of_the_one_before(etcd: Etcd, keys: Keys) -> None:
    """Everyone went back behind its step, and has come there again: what is late is of a history that is over."""
    opened(etcd, keys)
    late = ranges(etcd, keys, "late")
    number = claim(late)
    assert number is not None
    etcd.delete(keys.validating(STEP))
    opened(etcd, keys, 1)
    etcd.delete_prefix(keys.ranges(STEP))
    late.complete(number, 3, [9.0])
    assert not late.conclude(WHAT, None, None)
    assert not late.abandon(WHAT)
    assert claim(late) is None
    assert etcd.range(keys.ranges(STEP)).kvs == ()
    assert claim(ranges(etcd, keys, "new")) is not None


def test_a_range_that_fails_again_and_again_ends_it(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    tries, why = 0, ""
    while not why:
        of = ranges(etcd, keys, "a")
        found = of.claim(60.0, 3)
        if isinstance(found, tuple):
            of.release(found[0], found[1], "bad")
            tries += 1
        else:
            why = str(found)
    assert 3 <= tries <= 3 * COUNT
    assert why.endswith("cannot be computed: 3 of 3 that tried have failed; the last failure: bad")
