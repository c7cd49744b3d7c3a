"""The start check: a trainer computes what the job's first trainer computed, and compares the bits.

A job's bits depend on more than any list of settings can name: vector units, the kernels that libraries choose by them,
environment variables. So before a trainer may claim a slot it runs block step once, on the first batch and values near
the initial ones (of zeros every machine computes the same), in a scope of its own, with ports that lead nowhere. The
first one records digests of what went in and what came out (`/<job>.proof/trainer`). A process that differs is refused;
with `exact=False` it is warned.

The batch may fail, hang, or end the process. An error is told, and the trainer goes on without the check; so does one
whose last attempt ended with its process, as long as no trainer has computed the batch. The queue then finds out what
is wrong with the batch, and discards it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from graphft.capture.loss_fn import reported
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind
from graphft.ops.context import (
    NO_TERMS,
    ChunkWork,
    ClaimTerms,
    CommPort,
    Context,
    DataPort,
    Interrupt,
    LocalPort,
    OnNonfinite,
    QueuePort,
    Slices,
    SlotsPort,
)
from graphft.plan import batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.data import BatchKey, Prefetcher
from graphft.runtime.etcd import KV, mod_is, put_op
from graphft.runtime.execute.determinism import settings
from graphft.runtime.process.work_record import Phase, Place, WorkRecord
from graphft.runtime.queue.async_queue import batches_of
from graphft.runtime.roles.programs import trainer_scope
from graphft.runtime.roles.role import Blocks
from graphft.runtime.transport.buffers import byte_view, pack, unpack
from graphft.transpiler.job import Job

log = logging.getLogger("graphft")


_OTHER_DATA = (
    "what a trainer reads must be the same in every process: an item may depend on its index and on "
    "torch's, NumPy's and Python's global generators, not on a generator of the Dataset's own (which has "
    "moved on with what was read before) or on the order of a set (PYTHONHASHSEED); and files must be the "
    "same on every host, and since the run began: for other data, begin a new run (in another folder)"
)
_OTHER_BITS = (
    "run all roles with the same torch build and settings, on CPUs and GPUs that give the same bits; or transpile "
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


def compare(member: Member, key: str, what: str, inputs: dict[str, str], result: str, device: str = "cpu") -> None:
    """Compares digests with those that are recorded under `key`, or records them. `what` was computed, in words. Raises
    GraphftError[determinism] when they differ and the job is exact."""
    mine = Proof(member.job.run_id, f"{member.kind} {member.id}", what, inputs, result, settings(device))
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
    if member.config.exact:
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


def check_step(member: Member, blocks: Blocks, work_record: WorkRecord, prefetcher: Prefetcher) -> None:
    """Compares what this trainer makes of the first batch with what the first trainer made of it. Raises
    GraphftError[determinism]."""
    if member.view.over or member.leaving():
        return
    key, before = member.keys.proof("trainer"), work_record.before
    if before is not None and before.phase == Phase.PROVING and not is_recorded(member, key):
        _go_on(member, "the process before this one ended while it computed the batch for it")
        return
    trial = StepTrial(member, blocks, prefetcher)
    with member.progress.within(member.progress.usual, "making its start check"):
        work_record.begin(Phase.PROVING, Place(*trial.key[:3]))
        try:
            inputs, result = trial.run()
        except Interrupt:
            return
        except Exception as error:
            _go_on(member, f"it could not compute the batch for it: {describe(error)}")
            return
        finally:
            work_record.mark(Phase.IDLE)
        compare(member, key, trial.what, inputs, result, trial.device)


def _go_on(member: Member, why: str) -> None:
    text = f"trainer {member.index} goes on without a start check: {why}"
    log.warning("%s", text)
    member.events.emit("unproved", text)


class StepTrial(LocalPort):
    """Block step (and block local), with a scope and ports of its own."""

    def __init__(self, member: Member, blocks: Blocks, prefetcher: Prefetcher) -> None:
        self.job, self.config, self.blocks, self.prefetcher = member.job, member.config, blocks, prefetcher
        self.program, config, self.device = blocks.program, self.config, blocks.ctx.device
        chunk = next(c for c, n in enumerate(config.data.batches(config.batch_size, config.drop_last)) if n)
        self.key = BatchKey(0, chunk, 0, config.batch_size)
        self.what = f"batch 0 of chunk {chunk}"
        self._reported = reported(self.program)
        self._ctx = Context()
        self._work: ChunkWork | None = None
        self._results: list[Tensor] = []

    def run(self) -> tuple[dict[str, str], str]:
        """Returns digests of what goes in, by name, and of what comes out."""
        with torch.random.fork_rng(devices=[]):
            batch, fetch = self.prefetcher.get(self.key), self._reported
            if self.program.find_op("local_steps") is not None:
                fetch = ()
            for size in self._sizes(batch):
                comm, ctx = TrialComm(self.job), Context(trainer_scope(self.program, self.device), device=self.device)
                work = ChunkWork(0, self.key.chunk, 0, size, batch_seed(self.config.seed, 0, 0))
                ports = TrialBatch(work, {name: value[:size] for name, value in batch.items()})
                ctx.queue, ctx.slots, ctx.data, ctx.comm, ctx.local = ports, ports, ports, comm, self
                self._ctx = ctx
                self._results += self._run("step", fetch)
                self._results += _in_order(comm.pushed)
        inputs = {f"values of column {name}": digest([value]) for name, value in batch.items()}
        return inputs | {"initial values": digest(_in_order(comm.pulled))}, digest(self._results)

    def _sizes(self, batch: Mapping[str, Tensor]) -> list[int]:
        """The batch as it is, and as short as the shortest of the data: libraries choose other kernels for that."""
        config, whole = self.config, len(next(iter(batch.values())))
        short = {c.records % config.batch_size for c in config.data.chunks} - {0} if not config.drop_last else set()
        return [whole, *(size for size in sorted(short)[:1] if size < whole)]

    def _run(self, name: str, fetch: tuple[str, ...]) -> tuple[Any, ...]:
        return self.blocks.lowered(self.program.blocks[name], fetch)(self._ctx, self._ctx.scope)

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config = self.config
        order = config.plan.order(unit.pass_index, unit.chunk)
        for work in batches_of(unit, count=count, batch_size=config.batch_size, seed=config.seed, order=order):
            self._work = work
            self._results += self._run(block, self._reported)

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._work is None:
            raise GraphftError("block local runs outside of a unit", rule="local-block")
        return self._work


def _in_order(buckets: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
    return [buckets[key] for key in sorted(buckets)]


class TrialBatch(QueuePort, SlotsPort, DataPort):
    """One batch to compute. No chunk is claimed for it, and no slot."""

    def begin_pass(self) -> None: ...
    def complete(self) -> None: ...
    def fail(self) -> None: ...
    def renew(self, timeout: float) -> None: ...
    def await_pass(self) -> None: ...
    def await_validation(self) -> None: ...
    def claim_slots(self, slots: int, policy: str) -> None: ...
    def release_slots(self) -> None: ...

    def __init__(self, work: ChunkWork, columns: Mapping[str, Tensor]) -> None:
        self.work, self.columns = work, columns

    def get(self, terms: ClaimTerms = NO_TERMS) -> ChunkWork:
        return self.work

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[Tensor]:
        return [self.columns[name].clone() for name in columns]


class TrialComm(CommPort):
    """Gives values near the initial ones, and keeps what is pushed. By (shard, bucket), flat."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.pulled: dict[tuple[int, int], Tensor] = {}
        self.pushed: dict[tuple[int, int], Tensor] = {}

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        values = self.pulled.get((shard, bucket))
        if values is None:
            values = self.pulled[shard, bucket] = self.values_of(shard, bucket)
        unpack(byte_view(values), tensors, slices)

    def values_of(self, shard: int, bucket: int) -> Tensor:
        program = self.job.pserver_program(shard)
        (op,) = (op for op in program.blocks["init"].ops if op.type == "bucket" and op.attrs["index"] == bucket)
        generator = torch.Generator().manual_seed(shard << 32 | bucket)
        slices = [(program.variables[ref.name].kind, program.values[ref.name].reshape(-1)) for ref in op.args]
        return torch.cat([moved(value, generator) if kind is Kind.PARAM else value for kind, value in slices])

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        numel = sum(end - start for start, end in slices)
        flat = self.pushed[shard, bucket] = torch.empty(numel, dtype=tensors[0].dtype)
        pack(flat, tensors, slices)

    def end_pull(self, shards: int) -> None: ...
    def check_loss(self, loss: Tensor) -> None: ...
    def report(self, values: Sequence[Tensor]) -> None: ...
    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None: ...


def moved(value: Tensor, generator: torch.Generator) -> Tensor:
    """Returns values near `value`, hardly any of them zero, with the same bits on every machine: the noise comes from
    integers. Integers stay as they are."""
    if not value.is_floating_point():
        return value
    noise = torch.randint(-8, 9, value.shape, generator=generator).to(value.dtype) / 1024
    return value * (1 + noise) + noise
