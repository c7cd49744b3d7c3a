"""Trainers that look at perhaps stale views share the slots fairly, and then leave them alone."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.protocol.slot_assignment import assign


def settle(
    slots: int,
    live: list[str],
    holders: dict[int, str],
    policy: str,
    order: st.DataObject | None = None,
    barred: Collection[str] = (),
) -> int:
    """Everyone acts in turn on the present view, until nobody has anything to do; returns the number of moves."""
    moves = 0
    for _ in range(4 * slots * len(live) + 4):
        turn = order.draw(st.permutations(live)) if order else live
        todo = {t: assign(slots=slots, live=live, holders=holders, me=t, policy=policy, barred=barred) for t in turn}
        if not any(a.claim or a.release for a in todo.values()):
            return moves
        for trainer, assignment in todo.items():  # all from one view: claims may meet, and one of them loses
            for slot in assignment.claim:
                holders.setdefault(slot, trainer)
            for slot in assignment.release:
                assert holders.pop(slot) == trainer
                moves += 1
    raise AssertionError(f"does not settle: {holders}")


names = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)


@given(slots=st.integers(1, 9), live=names, data=st.data())
def test_from_any_state_everyone_ends_with_a_fair_share(slots: int, live: list[str], data: st.DataObject) -> None:
    holders = data.draw(st.dictionaries(st.integers(0, slots - 1), st.sampled_from(live)))
    settle(slots, live, holders, "takeover", data)
    shares = [list(holders.values()).count(t) for t in live]
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1


@given(slots=st.integers(1, 9), live=names, data=st.data())
def test_waiting_trainers_hold_one_slot_at_most(slots: int, live: list[str], data: st.DataObject) -> None:
    holders: dict[int, str] = {}
    settle(slots, live, holders, "wait", data)
    assert len(holders) == len(set(holders.values())) == min(slots, len(live))


@given(slots=st.integers(1, 9), live=names)
def test_a_death_moves_only_the_dead_ones_slots_unless_shares_differ(slots: int, live: list[str]) -> None:
    holders: dict[int, str] = {}
    settle(slots, live, holders, "takeover")
    dead = sorted(live)[0]
    left = [t for t in live if t != dead]
    if left:
        kept = {v: t for v, t in holders.items() if t != dead}
        holders = dict(kept)
        assert settle(slots, left, holders, "takeover") == 0
        assert all(holders[v] == t for v, t in kept.items())


def test_a_slot_whose_holder_is_gone_is_free_only_when_its_key_is() -> None:
    assert assign(slots=2, live="a", holders={0: "a", 1: "gone"}, me="a", policy="takeover").claim == ()


@given(slots=st.integers(1, 9), live=names, data=st.data())
def test_barred_trainers_end_with_no_slot_unless_all_are_barred(
    slots: int, live: list[str], data: st.DataObject
) -> None:
    barred = set(data.draw(st.lists(st.sampled_from(live), unique=True)))
    holders = data.draw(st.dictionaries(st.integers(0, slots - 1), st.sampled_from(live)))
    settle(slots, live, holders, "takeover", data, barred)
    working = [t for t in live if t not in barred] or live
    shares = [list(holders.values()).count(t) for t in working]
    assert sum(shares) == slots, "and all slots are held"
    assert max(shares) - min(shares) <= 1
