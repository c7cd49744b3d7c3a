"""What a job did without, kept with each checkpoint. An etcd that is lost, or restored, is told again of what is left
out of the data; people are told of it when the job is at rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.coordination.discarded import describe_discarded, discarded_of
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.discards import Discards
from graphft.transpiler.config import JobConfig

DISCARDED = "discarded"
"""In a manifest's metadata: by chunk, as etcd has it."""
SKIPPED = "skipped_steps"
"""There, too, if there are any: so many were discarded as not finite."""


def recorded(etcd: Store, keys: Keys) -> dict[str, Any]:
    """What etcd knows now, for the metadata of a manifest; nothing if nothing is discarded. Raises EtcdError."""
    found = read_discards(etcd, keys)
    return {DISCARDED: {str(chunk): msgspec.to_builtins(each) for chunk, each in found.items()}} if found else {}


def skipped_in(values: Mapping[str, Any]) -> dict[str, int]:
    """For a manifest's metadata; nothing if no step was skipped. `values`: of a shard."""
    from graphft.transpiler.passes.check_finite import SKIPPED_STEPS

    count = int(values.get(SKIPPED_STEPS, 0))
    return {SKIPPED: count} if count else {}


def lost_so_far(config: JobConfig, manifest: Manifest) -> list[str]:
    """In words, a line each."""
    kept = {int(chunk): msgspec.convert(found, Discards) for chunk, found in manifest.meta.get(DISCARDED, {}).items()}
    count = manifest.meta.get(SKIPPED, 0)
    lines = [f"{count} steps were SKIPPED as not finite"] if count else []
    discarded = describe_discarded(discarded_of(config, kept), config.data.records, "graphft checkpoint show")
    return lines + ([discarded] if discarded else [])


def tell_again(etcd: Store, keys: Keys, meta: Mapping[str, Any]) -> None:
    """Has etcd know at least what the checkpoint with this metadata knew. It may be repeated. Raises EtcdError."""
    for chunk, found in meta.get(DISCARDED, {}).items():
        _add(etcd, keys.discarded(int(chunk)), msgspec.convert(found, Discards))


def _add(etcd: Store, key: str, kept: Discards) -> None:
    while True:
        kv = etcd.get(key)
        known = msgspec.json.decode(kv.value, type=Discards) if kv is not None else Discards()
        if set(kept.discards) <= set(known.discards):
            return
        later = (o for o in known.discards if o not in kept.discards)
        both = Discards((*kept.discards, *later))
        same = mod_is(key, kv.mod_revision if kv is not None else 0)
        if etcd.txn([same], [put_op(key, msgspec.json.encode(both))], token=key).ok:
            return
