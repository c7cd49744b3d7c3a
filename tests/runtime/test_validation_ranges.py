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


def claim(of: Ranges, timeout: float = 60.0) -> tuple[int, int] | None:
    """The number, and the fence of the claim."""
    found = of.claim(timeout, 3)
    assert not isinstance(found, str), found
    return found[:2] if found is not None else None


def test_each_range_is_held_once_and_counts_once(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    a, b = ranges(etcd, keys, "a"), ranges(etcd, keys, "b")
    claims = [(of, claim(of)) for of in (a, b, a)]
    assert sorted(found[0] for _, found in claims if found) == [0, 1, 2]
    assert claim(b) is None
    for of, found in claims:
        assert found is not None
        of.complete(*found, RangeResult(3, (str(1.5 * found[0]),)))
        of.complete(*found, RangeResult(3, ("99.0",)))
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
    taken, mine = claim(dead), claim(slow)
    assert taken is not None
    assert mine is not None
    etcd.lease_revoke(lease)
    found = claim(other), claim(other)
    assert {one[0] for one in found if one} >= {taken[0]}
    assert claim(other, 60.0) is None
    assert slow.renew(*mine)
    claimed: set[int] = set()

    def steal() -> bool:  # nobody gets on any more
        found = claim(other, 0.01)
        claimed.update([found[0]] if found else [])
        return claimed >= {0, 1, 2}

    until(steal)
    assert not slow.renew(*mine)
    slow.complete(*mine, RangeResult(3, ("9.0",)))
    assert slow.release(*mine, "late") == 0
    assert not [kv for kv in etcd.range(keys.ranges(STEP)).kvs if "/done/" in kv.key]


def test_what_was_opened_anew_takes_nothing_of_the_one_before(etcd: Etcd, keys: Keys) -> None:
    """Everyone went back behind its step, and has come there again: what is late is of a history that is over."""
    opened(etcd, keys)
    late = ranges(etcd, keys, "late")
    found = claim(late)
    assert found is not None
    etcd.delete(keys.validating(STEP))
    opened(etcd, keys, 1)
    etcd.delete_prefix(keys.ranges(STEP))
    late.complete(*found, RangeResult(3, ("9.0",)))
    assert late.release(*found, "late") == 0
    assert not late.conclude(WHAT, None, None)
    assert not late.abandon(WHAT)
    assert claim(late) is None
    assert etcd.range(keys.ranges(STEP)).kvs == ()
    assert claim(ranges(etcd, keys, "new")) is not None


def test_a_range_that_fails_again_and_again_ends_it_and_departures_do_not_count(etcd: Etcd, keys: Keys) -> None:
    opened(etcd, keys)
    failures, why = [], ""
    while not why:
        of = ranges(etcd, keys, "a")
        found = of.claim(60.0, 3)
        if isinstance(found, tuple):
            of.release(*found[:2])
            found = of.claim(60.0, 3)
        if isinstance(found, tuple):
            assert not of.undo(found[0]), "it is not computed"
            failures.append(of.release(*found[:2], "bad"))
        else:
            why = str(found)
    assert max(failures) == 3
    assert "cannot be computed: 3 of " in why


def test_what_is_computed_again_has_failed(etcd: Etcd, keys: Keys) -> None:
    """Its entries were lost. When that happens too often, it is at an end."""
    opened(etcd, keys)
    of = ranges(etcd, keys, "a")
    while isinstance(found := of.claim(60.0, 2), tuple):
        number, fence, failures = found
        of.complete(number, fence, RangeResult(1, ("0.5",), failures))
        if number == 1:
            assert of.undo(1)
    assert found is not None
    assert found.startswith("range 1 of 3 cannot be computed: 2 of ")
