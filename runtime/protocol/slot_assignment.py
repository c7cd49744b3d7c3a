"""Decides which slots a trainer claims and releases, from its own, perhaps stale, view.

Claims are compare-and-swaps in etcd, so two claims of one slot are settled there; the trainer that loses looks again.
Shares are floor(V / live) to ceil(V / live). Slots move only from a trainer above the ceiling, or to one below the
floor that no free slot serves; so a settled assignment stays as it is. A trainer in quarantine ("barred") claims
nothing, gives away what it holds, and counts for no share, unless all are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """Slots to claim, in order of preference, and slots to release. `reason` says why, for the log."""

    claim: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    reason: str = ""


def able(live: Collection[str], barred: Collection[str]) -> Set[str]:
    """Returns the trainers that are not barred; all, if all are."""
    return set(live) - set(barred) or set(live)


def assign(
    *, slots: int, live: Collection[str], holders: Mapping[int, str], me: str, policy: str, barred: Collection[str] = ()
) -> Assignment:
    """Returns what trainer `me` should do now.

    `live`: ids of the registered trainers. `holders`: slot -> id, also of ids that are not live: such a slot is taken
    until its key is gone. `policy`: "takeover", or "wait" (at most one slot each).
    """
    if me not in live:
        return Assignment(reason="not registered")
    candidates = able(live, barred)
    if me not in candidates:
        return Assignment((), tuple(sorted(v for v, holder in holders.items() if holder == me)), "barred")
    held = dict.fromkeys(sorted(candidates), 0)
    for holder in holders.values():
        if holder in held:
            held[holder] += 1
    free = [v for v in range(slots) if v not in holders]
    mine = sorted(v for v, holder in holders.items() if holder == me)
    floor, ceiling = slots // len(held), -(-slots // len(held))
    if policy == "wait":
        floor, ceiling = min(floor, 1), 1
    claim = _claims(held, len(free), me, floor, ceiling)
    release = _releases(held, len(free), me, floor, ceiling)
    holds = f"holds {len(mine)} of {slots} slots"
    if claim:
        slots_wanted = _preferred(free, held, me, floor)[:claim]
        return Assignment(slots_wanted, (), f"{holds}, {len(free)} free, {len(held)} trainers live")
    if release:
        return Assignment((), tuple(mine[-release:]), f"{holds}, its share is {floor} to {ceiling}")
    return Assignment(reason="settled")


def _claims(held: Mapping[str, int], free: int, me: str, floor: int, ceiling: int) -> int:
    """Returns the number of free slots to claim: up to the floor; above it only what no other trainer lacks."""
    lacking = {t: max(0, floor - n) for t, n in held.items()}
    if lacking[me]:
        return min(lacking[me], free)
    return max(0, min(ceiling - held[me], free - sum(lacking.values())))


def _releases(held: Mapping[str, int], free: int, me: str, floor: int, ceiling: int) -> int:
    """Returns the number of slots to release: all above the ceiling, and a part of what trainers below the floor
    lack."""
    kept = {t: min(n, ceiling) for t, n in held.items()}
    above = sum(held.values()) - sum(kept.values())
    lack = sum(max(0, floor - n) for n in held.values()) - free - above
    while lack > 0:
        donor = max(kept, key=lambda t: (kept[t], t))
        if kept[donor] <= floor:
            break
        kept[donor] -= 1
        lack -= 1
    return max(0, held[me] - kept[me])


def _preferred(free: list[int], held: Mapping[str, int], me: str, floor: int) -> tuple[int, ...]:
    """Returns the free slots that `me` may take, best first, so that claims from one view rarely meet.

    The first slots are for trainers below the floor, a different one for each; the others share the rest. So no trainer
    goes above the floor with a slot that another one lacks.
    """
    lacking = {t: max(0, floor - n) for t, n in held.items()}
    order = list(held)
    if lacking[me]:
        begin, choice = sum(lacking[t] for t in order[: order.index(me)]) % len(free), free
    else:
        choice = free[sum(lacking.values()) :]
        begin = len(choice) * order.index(me) // len(order)
    return tuple(choice[begin:] + choice[:begin])
