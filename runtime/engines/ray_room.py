"""Whether a Ray has room for a process at all: without an autoscaler nobody says that it never will."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Amounts = Mapping[str, float]


def what_lacks(wants: Amounts, nodes: Sequence[Amounts]) -> str:
    """In words, why no node could take it, were it empty. "": one could. `nodes`: all that each of them has, in Ray's
    names."""
    wants = {name: amount for name, amount in wants.items() if amount}
    if any(all(node.get(name, 0) >= amount for name, amount in wants.items()) for node in nodes):
        return ""
    if not nodes:
        return "there is no node"
    most = {name: max(node.get(name, 0) for node in nodes) for name in wants}
    lacking = {name: amount for name, amount in wants.items() if amount > most[name]}
    if not lacking:
        return f"no node of this Ray has {describe(wants)} together"
    return f"no node of this Ray has {describe(lacking)}, the largest has {describe({n: most[n] for n in lacking})}"


def is_among(wants: Amounts, demands: Iterable[Amounts]) -> bool:
    """Whether one of these demands is for so much. Ray counts in ten-thousandths."""
    wants = {name: amount for name, amount in wants.items() if amount}
    return any(
        wants.keys() == demand.keys() and all(math.isclose(wants[n], demand[n], abs_tol=1e-4) for n in wants)
        for demand in demands
    )


def describe(amounts: Amounts) -> str:
    return ", ".join(f"{name}: {amount:g}" for name, amount in amounts.items())
