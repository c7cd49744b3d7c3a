"""Describes a checkpoint beside its files: by whom and of what it was made, where in the data, and what was discarded.

Most of it is for people: where a job goes on follows from the step and the plan of the data (sync), or from the ledgers
in the parts (async). But an etcd that was lost, or restored, is told again of what was discarded.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

import graphft
from graphft.runtime.coordination.result_files import describe_discarded, discarded_of
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import mod_is, put_op
from graphft.runtime.protocol.chunk_queue import Discards

if TYPE_CHECKING:
    from graphft.plan import Plan
    from graphft.runtime.checkpoint.manifest import Manifest
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.etcd.model import Store
    from graphft.runtime.protocol.ledger import Ledger
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.record import Fingerprint

MADE, QUEUE, PASSES = "made", "queue", "passes"
"""Keys in a manifest's metadata: `made`, `sync_queue` or `async_queue`, and async the passes that are wholly in it."""
DISCARDED, SKIPPED = "discarded", "skipped_steps"
"""By chunk, as etcd has it; and how many steps were skipped as not finite, if any were."""
VALIDATE, DECIDED = "validate", "decided"
"""True of a checkpoint whose model is to be validated; what followed from the validations until then."""
SOURCE = "from"
"""In `made`: which checkpoint of which run this one was made of."""


def made(of: Fingerprint | None, **more: Any) -> dict[str, Any]:
    """Returns when (Unix seconds), where, by which versions, and of which program, data and initial values it is made.
    `of`: None where that is not known."""
    import torch

    from graphft.transpiler.record import digest_of

    by = {"host": socket.gethostname(), "graphft": graphft.__version__, "torch": str(torch.__version__)}
    digests = {} if of is None else {"program": of.program, "data": digest_of(of.data), "values": digest_of(of.values)}
    return {"at": time.time(), **by, **digests, **more}


def sync_queue(plan: Plan, step: int) -> dict[str, int]:
    """Returns how many steps of which pass are done, of how many."""
    index = plan.pass_of(step)
    first, *ends = plan.start_steps[index : index + 2]
    return {"pass": index, "passes": plan.passes, "done": step - first, "steps": ends[0] - first if ends else 0}


def async_queue(plan: Plan, ledger: Ledger, passes: int) -> dict[str, int]:
    """Returns how many passes a shard has applied wholly, and of the next one how many chunks, of how many."""
    chunks = int((plan.batches > 0).sum())
    return {"pass": passes, "passes": plan.passes, "done": ledger.count(passes), "chunks": chunks}


def place_in_words(meta: Mapping[str, Any]) -> str:
    """Returns where in the data a checkpoint is; "" where its metadata does not say it."""
    queue = meta.get(QUEUE)
    if not queue:
        return ""
    if queue["pass"] >= queue["passes"]:
        return f"all {queue['passes']} passes"
    kind = "steps" if "steps" in queue else "chunks"
    return f"pass {queue['pass']} of {queue['passes']}, {queue['done']} of its {queue[kind]} {kind} done"


def recorded(etcd: Store, keys: Keys) -> dict[str, Any]:
    """Returns what etcd knows now to be discarded, for a manifest's metadata. Raises EtcdError."""
    found = read_discards(etcd, keys)
    return {DISCARDED: {str(chunk): msgspec.to_builtins(each) for chunk, each in found.items()}} if found else {}


def skipped_in(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns how many steps a shard with these values has skipped, for a manifest's metadata."""
    from graphft.transpiler.layout import SKIPPED_STEPS

    count = int(values.get(SKIPPED_STEPS, 0))
    return {SKIPPED: count} if count else {}


def lost_so_far(config: JobConfig, manifest: Manifest) -> list[str]:
    """Returns what was skipped and discarded until this checkpoint, in words, a line each."""
    kept = {int(chunk): msgspec.convert(found, Discards) for chunk, found in manifest.meta.get(DISCARDED, {}).items()}
    count = manifest.meta.get(SKIPPED, 0)
    lines = [f"{count} steps were SKIPPED as not finite"] if count else []
    discarded = describe_discarded(discarded_of(config, kept), config.data.records, "graphft checkpoint show")
    return lines + ([discarded] if discarded else [])


def tell_again(etcd: Store, keys: Keys, meta: Mapping[str, Any]) -> None:
    """Has etcd know at least what the checkpoint with this metadata knew. It may be repeated. Raises EtcdError."""
    for chunk, found in meta.get(DISCARDED, {}).items():
        key, kept = keys.discarded(int(chunk)), msgspec.convert(found, Discards)
        while True:
            kv = etcd.get(key)
            known = msgspec.json.decode(kv.value, type=Discards) if kv is not None else Discards()
            if set(kept.discards) <= set(known.discards):
                break
            both = Discards((*kept.discards, *(o for o in known.discards if o not in kept.discards)))
            same = mod_is(key, kv.mod_revision if kv is not None else 0)
            if etcd.txn([same], [put_op(key, msgspec.json.encode(both))], token=key).ok:
                break
