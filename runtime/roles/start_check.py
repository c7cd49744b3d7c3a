"""The start check: a role computes what the job's first process of its kind computed, and compares the bits.

A job's bits depend on more than any list of settings can name: the CPU's vector units, the kernels that libraries
choose by them, environment variables, what user code switches on. So before a trainer may claim a slot it runs the
job's own step once, and before a shard serves it runs its own optimizer; the first one records digests of what went in
and what came out (`/<job>.proof/...`), and the others compare theirs. Nothing of it reaches the job: the computation
has a scope and ports of its own. A process that differs is refused, as starting it again does not help; with
`exact=False` it is warned.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor

from graphft.errors import UsageError
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import KV, mod_is, put_op
from graphft.runtime.execute.determinism import settings
from graphft.runtime.transport.buffers import byte_view

log = logging.getLogger("graphft")

_OTHER_DATA = (
    "what a trainer reads must be the same in every process: an item may depend on its index and on "
    "torch's, NumPy's and Python's global generators, not on a generator of the Dataset's own (which has "
    "moved on with what was read before) or on the order of a set (PYTHONHASHSEED); and files must be the "
    "same on every host, and since the run began: for other data, begin a new run (in another folder)"
)
_OTHER_BITS = (
    "run all roles with the same torch build and settings, on CPUs that give the same bits; or transpile "
    'with exact=False (for a run that has begun: "exact": false in the job.json of its folder)'
)


class Proof(msgspec.Struct, frozen=True):
    """The record of the first process of a kind, `by`: digests of what it computed `what` from, and of its result."""

    run: str
    by: str
    what: str
    inputs: dict[str, str]
    result: str
    settings: dict[str, str]


def compare(member: Member, key: str, what: str, inputs: dict[str, str], result: str) -> None:
    """Compares digests with those that are recorded under `key`, or records them. `what` was computed, in words.

    Raises GraphftError[determinism] when they differ and the job is exact.
    """
    mine = Proof(member.job.run_id, f"{member.kind} {member.id}", what, inputs, result, settings())
    proof = _recorded(member, key, mine)
    there, here = proof.settings, mine.settings
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    differing = "; ".join(f"{n}: {there.get(n, 'not set')} there, {here.get(n, 'not set')} here" for n in names)
    if (proof.inputs, proof.result) == (inputs, result):
        if differing:
            log.info("this process gives the same bits, though it differs in %s", differing)
        return
    changed = sorted(n for n in proof.inputs.keys() | inputs.keys() if proof.inputs.get(n) != inputs.get(n))
    why = f"it is given other {', '.join(changed)}" if changed else f"settings that differ: {differing or 'none known'}"
    error = UsageError(
        f"this {member.kind} computes other bits than {proof.by} of {what}: {why}",
        rule="determinism",
        help=_OTHER_DATA if changed else _OTHER_BITS,
    )
    if member.config.exact and member.config.device == "cpu":
        member.events.emit("refused", error.message)
        raise error
    log.warning("%s", error.message)


def is_recorded(member: Member, key: str) -> bool:
    """True if a process of this run has passed the check."""
    return _of_this_run(member, member.etcd.get(key)) is not None


def _of_this_run(member: Member, kv: KV | None) -> Proof | None:
    try:
        proof = msgspec.json.decode(kv.value, type=Proof) if kv is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):  # another version of graphft's
        return None
    return proof if proof is not None and proof.run == member.job.run_id else None


def _recorded(member: Member, key: str, mine: Proof) -> Proof:
    """Returns what is recorded; that is `mine` if nothing was."""
    while True:
        kv = member.etcd.get(key)
        found = _of_this_run(member, kv)
        if found is not None:
            return found
        same = mod_is(key, kv.mod_revision if kv is not None else 0)
        if member.etcd.txn([same], [put_op(key, msgspec.json.encode(mine))], token=key).ok:
            log.info("recorded what %s gives, for others to compare with", mine.what)
            return mine


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a digest of the tensors' types, shapes and bits, in hexadecimal digits."""
    result = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        result.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        result.update(byte_view(tensor.detach().cpu().contiguous()))
    return result.hexdigest()


def undisturbed() -> Any:
    """Returns a context that leaves torch's random generator as it was."""
    return torch.random.fork_rng(devices=[])
