"""A role proves itself: it computes what the job's first process of its kind computed, and compares the bits.

A job's bits depend on more than any list of settings can name: the CPU's vector units, the kernels that libraries
choose by them, environment variables, what user code switches on. So before a trainer may claim a slot it runs the
job's own step once, and before a shard serves it runs its own optimizer; the first one records digests of what went in
and what came out (`/<job>.proof/...`), and the others compare theirs. Nothing of it reaches the job: the trial
has a scope and ports of its own.

With the result, the first one records a short digest per op, so that one who differs can name the first op that does.
Such a process is refused, as starting it again does not help; with `exact=False` it is warned.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from graphft.errors import UsageError
from graphft.ir import Block
from graphft.ir.registry import writes_of
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import KV, mod_is, put_op
from graphft.runtime.execute.determinism import settings
from graphft.runtime.execute.lowering import Observe, operands_text
from graphft.runtime.transport.buffers import byte_view

log = logging.getLogger("graphft")

OP_BYTES = 4
MAX_OPS = 1 << 15
"""Digests of so many ops are recorded, of longer trials of every second op, every third, ...: etcd takes 1.5 MB."""
UNWRITTEN = ("empty", "new_empty")
"""What is in such results is not computed yet."""


class Trial(Protocol):
    """A computation of the role's own blocks, on inputs that are the same for all processes of its kind."""

    what: str
    """In words, for people: "batch 0 of chunk 3"."""

    def run(self, observe: Observe | None = None) -> tuple[dict[str, str], str]:
        """Digests of what goes in, by name, and of what comes out."""


class Proof(msgspec.Struct, frozen=True):
    """What the first process of a kind recorded. `by`: who it was. `ops`: OP_BYTES of every `stride`-th op."""

    run: str
    by: str
    what: str
    inputs: dict[str, str]
    result: str
    stride: int
    ops: bytes
    settings: dict[str, str]


class OpDigests:
    """Observes a trial: makes a digest of what each op writes. With those of `other`, describes the first that
    differs in `first`."""

    def __init__(self, other: Proof | None = None) -> None:
        self._other, self._count = other, 0
        self._found = bytearray()
        self.first = ""

    def __call__(self, block: Block, index: int, values: Mapping[str, Any]) -> None:
        found, other = _digest_of_op(block, index, values), self._other
        if other is None:
            self._found += found
        elif not self.first and self._count % other.stride == 0:
            place = self._count // other.stride * OP_BYTES
            if other.ops[place : place + OP_BYTES] != found:
                op = block.ops[index]
                near = f" (or one of the {other.stride - 1} before it)" if other.stride > 1 else ""
                operands = operands_text({n: v for n, v in values.items() if n in op.reads})
                self.first = f"op {index} of block {block.name}, {op.type}{near}; its operands are {operands}"
        self._count += 1

    def recorded(self) -> tuple[int, bytes]:
        """The stride, and every stride-th digest."""
        stride = -(-self._count // MAX_OPS) or 1
        return stride, b"".join(self._found[i : i + OP_BYTES] for i in range(0, len(self._found), stride * OP_BYTES))


def prove(member: Member, key: str, trial: Trial) -> None:
    """Runs the trial, and compares it with the one that is recorded under `key`, or records it.

    Raises GraphftError[determinism] when they differ and the job is exact.
    """
    proof = _read(member, member.etcd.get(key))
    digests = OpDigests() if proof is None else None
    inputs, result = trial.run(digests)
    if proof is None and digests is not None:
        stride, ops = digests.recorded()
        mine = Proof(
            member.job.run_id, f"{member.kind} {member.id}", trial.what, inputs, result, stride, ops, settings()
        )
        proof = _record(member, key, mine)
    assert proof is not None
    if (proof.inputs, proof.result) == (inputs, result):
        if differing := _settings_that_differ(proof):
            log.info("this process gives the same bits, though it differs in %s", differing)
        return
    text = _difference(proof, inputs, trial)
    error = UsageError(
        f"this {member.kind} computes other bits than {proof.by} of {trial.what}: {text}",
        rule="determinism",
        help=_OTHER_DATA if proof.inputs != inputs else _OTHER_BITS,
    )
    if member.config.exact and member.config.device == "cpu":
        member.events.emit("refused", error.message)
        raise error
    log.warning("%s", error.message)


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


def is_recorded(member: Member, key: str) -> bool:
    """Whether a process of this run has computed the trial to its end."""
    return _read(member, member.etcd.get(key)) is not None


def _read(member: Member, kv: KV | None) -> Proof | None:
    """What is recorded of this very run; None otherwise, also of a record of another version of graphft."""
    try:
        proof = msgspec.json.decode(kv.value, type=Proof) if kv is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return proof if proof is not None and proof.run == member.job.run_id else None


def _record(member: Member, key: str, mine: Proof) -> Proof:
    """Records it, unless somebody has meanwhile; returns what is recorded."""
    while True:
        kv = member.etcd.get(key)
        found = _read(member, kv)
        if found is not None:
            return found
        same = mod_is(key, kv.mod_revision if kv is not None else 0)
        if member.etcd.txn([same], [put_op(key, msgspec.json.encode(mine))], token=key).ok:
            log.info("recorded what %s gives, for others to compare with", mine.what)
            return mine


def _difference(proof: Proof, inputs: Mapping[str, str], trial: Trial) -> str:
    """What differs, in words: the inputs, else the first op, and the settings."""
    changed = sorted(n for n in proof.inputs.keys() | inputs.keys() if proof.inputs.get(n) != inputs.get(n))
    if changed:
        return f"it is given other {', '.join(changed)}"
    digests = OpDigests(proof)
    trial.run(digests)
    found = f"the first op that differs is {digests.first}" if digests.first else "each op's result is the same"
    return f"{found}. Settings that differ: {_settings_that_differ(proof) or 'none that are known'}"


def _settings_that_differ(proof: Proof) -> str:
    there, here = proof.settings, settings()
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    return "; ".join(f"{n}: {there.get(n, 'not set')} there, {here.get(n, 'not set')} here" for n in names)


def _digest_of_op(block: Block, index: int, values: Mapping[str, Any]) -> bytes:
    op = block.ops[index]
    name = op.type.removeprefix("aten.").partition(".")[0]
    if name.startswith(UNWRITTEN):
        return bytes(OP_BYTES)
    written = [values[n] for n in writes_of(op) if isinstance(values.get(n), Tensor)]
    try:
        return bytes.fromhex(digest(written, OP_BYTES))
    except (RuntimeError, TypeError):  # a layout without bytes (sparse): another op is named then
        return bytes(OP_BYTES)


def digest(tensors: Iterable[Tensor], size: int = 16) -> str:
    """Of the tensors' types, shapes and bits, in hexadecimal digits: two per byte of `size`."""
    result = hashlib.blake2b(digest_size=size)
    for tensor in tensors:
        result.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        result.update(byte_view(tensor.detach().cpu().contiguous()))
    return result.hexdigest()


def undisturbed() -> Any:
    """A context that leaves torch's random generator as it was."""
    return torch.random.fork_rng(devices=[])
