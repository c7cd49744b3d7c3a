"""Which members an etcd of a job's own is to have, on machines that come and go. Decided here, done elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Change:
    """`begin`: a cluster of one member, on this node, with no data; `add` a member there; `remove` this member."""

    kind: Literal["begin", "add", "remove"]
    subject: str
    """A node for `begin` and `add`, a member for `remove`."""
    reason: str


def next_change(
    members: Mapping[str, str], lost: Collection[str], nodes: Sequence[str], wanted: int, learners: Collection[str] = ()
) -> Change | None:
    """What is to be changed next, if anything.

    `members`: of the cluster, with the node of each. `learners`: those of them that do not count in its majority, and
    are of no use until they do. `lost`: those that will not come back. `nodes`: that live, the best first. `wanted`:
    members where there are that many nodes. With fewer nodes there is one member: of two, each would have to live.
    """
    voters = [name for name in members if name not in learners]
    alive = [name for name in voters if name not in lost]
    if 2 * len(alive) <= len(voters):
        if not nodes:
            return None
        why = f"{len(voters) - len(alive)} of {len(voters)} members are lost" if members else "there is none"
        return Change("begin", nodes[0], why)
    gone = [name for name in members if name in lost]
    if gone:
        return Change("remove", gone[0], f"its node {members[gone[0]][:8]} is lost")
    if learners:
        return Change("remove", next(iter(learners)), "it was not promoted")
    target = wanted if len(nodes) >= wanted else 1
    if len(members) > target:
        last = max(members, key=lambda name: nodes.index(members[name]) if members[name] in nodes else len(nodes))
        return Change("remove", last, f"{len(nodes)} nodes are too few for {wanted} members")
    free = [node for node in nodes if node not in members.values()]
    if len(members) < target and free:
        return Change("add", free[0], f"{len(members)} of {target} members are there")
    return None
