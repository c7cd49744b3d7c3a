"""What is left out of the data, kept with each checkpoint: an etcd that is lost, or restored, is told of it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import read_left_out
from graphft.runtime.etcd import mod_is, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.left_out import LeftOut

LEFT_OUT = "left_out"
"""In a manifest's metadata: by chunk, as etcd has it."""


def recorded(etcd: Store, keys: Keys) -> dict[str, Any]:
    """What etcd knows now, for the metadata of a manifest; nothing if nothing is left out. Raises EtcdError."""
    found = read_left_out(etcd, keys)
    return {LEFT_OUT: {str(chunk): msgspec.to_builtins(each) for chunk, each in found.items()}} if found else {}


def tell_again(etcd: Store, keys: Keys, meta: Mapping[str, Any]) -> None:
    """Has etcd know at least what the checkpoint with this metadata knew. It may be repeated. Raises EtcdError."""
    for chunk, found in meta.get(LEFT_OUT, {}).items():
        _add(etcd, keys.left_out(int(chunk)), msgspec.convert(found, LeftOut))


def _add(etcd: Store, key: str, kept: LeftOut) -> None:
    while True:
        kv = etcd.get(key)
        known = msgspec.json.decode(kv.value, type=LeftOut) if kv is not None else LeftOut()
        if set(kept.omissions) <= set(known.omissions):
            return
        later = (o for o in known.omissions if o not in kept.omissions)
        both = LeftOut((*kept.omissions, *later))
        same = mod_is(key, kv.mod_revision if kv is not None else 0)
        if etcd.txn([same], [put_op(key, msgspec.json.encode(both))], token=key).ok:
            return
