"""What a manifest says beside its files, for a person: where it is in the data, by whom it was made, and of what.

It decides nothing: where a job goes on follows from the step and the plan of the data (sync), or from the ledgers in
the parts (async).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import graphft
from graphft.runtime.protocol.ledger import Ledger
from graphft.transpiler.fingerprint import digest_of

if TYPE_CHECKING:
    from graphft.plan import Plan
    from graphft.transpiler.fingerprint import Fingerprint

QUEUE, MADE = "queue", "made"
"""In a manifest's metadata."""
LOADED = "loaded"
"""In `made`: true of a checkpoint whose values a person put in the place of others."""


def made(of: Fingerprint | None, **more: Any) -> dict[str, Any]:
    """When (Unix seconds), where, by which versions, and of which program, data and initial values. `of`: None where
    that is not known."""
    by = {"host": socket.gethostname(), "graphft": graphft.__version__, "torch": str(torch.__version__)}
    digests = {} if of is None else {"program": of.program, "data": digest_of(of.data), "values": digest_of(of.values)}
    return {"at": time.time(), **by, **digests, **more}


def is_loaded(meta: Mapping[str, Any]) -> bool:
    """Of a manifest with this metadata."""
    return bool(meta.get(MADE, {}).get(LOADED))


def sync_queue(plan: Plan, step: int) -> dict[str, int]:
    """How many steps of which pass are done, of how many."""
    index = plan.pass_of(step)
    first, *ends = plan.start_steps[index : index + 2]
    return {"pass": index, "passes": plan.passes, "done": step - first, "steps": ends[0] - first if ends else 0}


def async_queue(plan: Plan, ledger: Ledger, passes: int) -> dict[str, int]:
    """How many passes a shard has applied wholly, and of the next one how many chunks, of how many."""
    chunks = int((plan.batches > 0).sum())
    return {"pass": passes, "passes": plan.passes, "done": ledger.count(passes), "chunks": chunks}


def place_in_words(meta: Mapping[str, Any]) -> str:
    """Of a manifest with this metadata; "" where it does not say it."""
    queue = meta.get(QUEUE)
    if not queue:
        return ""
    if queue["pass"] >= queue["passes"]:
        return f"all {queue['passes']} passes"
    kind = "steps" if "steps" in queue else "chunks"
    return f"pass {queue['pass']} of {queue['passes']}, {queue['done']} of its {queue[kind]} {kind} done"
