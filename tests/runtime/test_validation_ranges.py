"""Ranges of a validation in a real etcd: what processes that take part in it see of each other."""

from __future__ import annotations

import msgspec
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated, Validating
from graphft.runtime.etcd import Etcd
from graphft.runtime.protocol.decisions import RangeResult
from graphft.runtime.validation import open_validation as module
from graphft.runtime.validation.open_validation import Ranges
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


def test_each_range_is_held_once_and_counts_once(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    of = [ranges(etcd, keys, name) for name in "abc"]
    claims = [one.claim(60.0) for one in of]
    assert {*claims} == {0, 1, 2}
    assert ranges(etcd, keys, "d").claim(60.0) is None
    for one, number in zip(of, claims, strict=True):
        assert number is not None
        for _ in range(2):
            one.complete(number, RangeResult(3, (str(1.5 * number),)))
    a, b, _ = of
    assert (a.claim(60.0), a.claim(60.0)) == (None, None), "the second has looked again"
    assert a.totals() == (9, (0.5,))
    assert a.end(WHAT)
    assert not b.end(WHAT)
    assert etcd.range(keys.ranges(STEP)).kvs == etcd.range(keys.all_validating).kvs == ()
    newest = etcd.get(keys.newest_validated)
    assert newest is not None
    assert msgspec.json.decode(newest.value, type=Validated) == WHAT


def test_a_dead_holders_range_is_free_and_a_slow_ones_when_it_is_stale(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    lease, _ = etcd.lease_grant(60)
    dead, slow, other = ranges(etcd, keys, "dead", lease), ranges(etcd, keys, "slow"), ranges(etcd, keys, "other")
    taken, mine = dead.claim(60.0), slow.claim(60.0)
    assert mine is not None
    etcd.lease_revoke(lease)
    found = [other.claim(60.0), other.claim(60.0)]
    assert taken in found
    assert mine not in found
    until(lambda: other.claim(0.01) == mine)
    slow.renew(mine)
    assert slow.release(mine, failed=True) == 0, "it is another's"
    slow.complete(mine, RangeResult(3, ("9.0",)))
    other.complete(mine, RangeResult(3, ("9.0",)))
    assert [kv.key for kv in etcd.range(keys.ranges(STEP)).kvs if kv.key.endswith(f"/{mine}")] == [
        f"{keys.ranges(STEP)}done/{mine}"
    ]


def test_what_was_opened_anew_takes_nothing_of_the_one_before(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    late = ranges(etcd, keys, "late")
    number = late.claim(60.0)
    assert number is not None
    etcd.delete(keys.validating(STEP))
    opened(etcd, keys, 1)
    etcd.delete_prefix(keys.ranges(STEP))
    late.complete(number, RangeResult(3, ("9.0",)))
    assert late.release(number, failed=True) == 0
    assert not late.end(WHAT)
    assert late.claim(60.0) is None
    assert etcd.range(keys.ranges(STEP)).kvs == ()
    assert ranges(etcd, keys, "new").claim(60.0) is not None


def test_failures_are_counted_and_departures_are_not(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    of, failures = ranges(etcd, keys, "a"), {0: 0, 1: 0, 2: 0}
    for failed in (True, False) * 6:
        number = of.claim(60.0)
        assert number is not None
        failures[number] += failed
        assert of.release(number, failed) == failures[number]


def test_ranges_of_which_something_is_lost_are_computed_anew(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    of = ranges(etcd, keys, "a")
    while (number := of.claim(60.0)) is not None:
        of.complete(number, RangeResult(1, ("0.5",)))
    of.begin_anew()
    assert of.claim(60.0) is not None
    assert of.totals() is None
