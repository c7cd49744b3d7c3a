"""The dry run that a trainer proves itself with: its blocks in a scope of their own, with ports that lead nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphft.capture.loss_results import reported
from graphft.errors import GraphftError
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
from graphft.runtime.execute.lowering import Observe, lower
from graphft.runtime.queue.async_queue import batches_of
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.proof import digest, undisturbed
from graphft.runtime.roles.trainer.scope import trainer_scope
from graphft.runtime.transport.buffers import BucketLayout, byte_view, pack, unpack

if TYPE_CHECKING:
    from graphft.transpiler import Job


class Unusable(Exception):
    """The batch cannot be read or computed."""


class StepTrial:
    """Block step (and block local), with a scope and ports of its own."""

    def __init__(self, member: Member, blocks: Blocks, prefetcher: Prefetcher) -> None:
        self.job, self.config, self.blocks, self.prefetcher = member.job, member.config, blocks, prefetcher
        self.program, config = blocks.program, self.config
        chunk = next(c for c, n in enumerate(config.data.batches(config.batch_size, config.drop_last)) if n)
        self.key = BatchKey(0, chunk, 0, config.batch_size)
        self.what = f"batch 0 of chunk {chunk}"
        self.reported = reported(self.program)
        self._batch: dict[str, Tensor] = {}

    def run(self, observe: Observe | None = None) -> tuple[dict[str, str], str]:
        try:
            with undisturbed():
                initial, results = self._run(observe)
        except (Interrupt, Exception) as error:
            raise Unusable from error
        inputs = {f"values of column {name}": digest([value]) for name, value in self._batch.items()}
        return inputs | {"initial values": digest(initial)}, digest(results)

    def _run(self, observe: Observe | None) -> tuple[list[Tensor], list[Tensor]]:
        """(what the step begins with, what it gives)."""
        self._batch = self._batch or self.prefetcher.get(self.key)
        fetch = () if self.program.find_op("local_steps") is not None else self.reported
        initial: list[Tensor] = []
        results: list[Tensor] = []
        for size in self._sizes():
            comm, ctx = TrialComm(self.job), Context(trainer_scope(self.program), device=self.config.device)
            batch = TrialBatch(self._work(size), {name: value[:size] for name, value in self._batch.items()})
            units = TrialUnits(self, ctx, observe)
            ctx.queue, ctx.slots, ctx.data, ctx.comm, ctx.local = batch, batch, batch, comm, units
            results += [*self.run_block("step", fetch, ctx, observe), *units.reported, *_in_order(comm.pushed)]
            initial = _in_order(comm.pulled)
        return initial, results

    def _sizes(self) -> list[int]:
        """The batch as it is, and as short as the shortest of the data: libraries choose other kernels for that."""
        config, whole = self.config, len(next(iter(self._batch.values())))
        short = {c.records % config.batch_size for c in config.data.chunks} - {0} if not config.drop_last else set()
        return [whole, *(size for size in sorted(short)[:1] if size < whole)]

    def _work(self, size: int) -> ChunkWork:
        """The batch; of units, one of one batch."""
        return ChunkWork(0, self.key.chunk, 0, size, batch_seed(self.config.seed, 0, 0))

    def run_block(self, name: str, fetch: tuple[str, ...], ctx: Context, observe: Observe | None) -> tuple[Any, ...]:
        block = self.program.blocks[name]
        if observe is None:
            return self.blocks.lowered(block, fetch)(ctx, ctx.scope)
        return lower(block, fetch=fetch, device=ctx.device, observe=observe)(ctx, ctx.scope)


def _in_order(buckets: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
    return [buckets[key] for key in sorted(buckets)]


class TrialBatch(QueuePort, SlotsPort, DataPort):
    """One batch to compute. No chunk is claimed for it, and no slot."""

    def begin_pass(self) -> None: ...
    def complete(self) -> None: ...
    def fail(self) -> None: ...
    def renew(self, timeout: float) -> None: ...
    def await_pass(self) -> None: ...
    def await_validation(self, every: int, passes: bool) -> None: ...
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

    def end_pull(self, shards: int) -> None:
        """Nothing is awaited."""

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        layout = BucketLayout.of(tensors, slices)
        flat = self.pushed[shard, bucket] = torch.empty(layout.numel, dtype=layout.dtype)
        pack(flat, tensors, slices)

    def check_loss(self, loss: Tensor) -> None:
        """The values are not those of the job, and tell nothing about it."""

    def report(self, values: Sequence[Tensor]) -> None:
        """Nobody sums them up."""

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None:
        """Nothing is awaited."""


class TrialUnits(LocalPort):
    """Runs block local in the trial's context. `reported`: of each batch."""

    def __init__(self, trial: StepTrial, ctx: Context, observe: Observe | None) -> None:
        self.trial, self.ctx, self.observe = trial, ctx, observe
        self.reported: list[Tensor] = []
        self._work: ChunkWork | None = None

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config = self.trial.config
        order = config.plan.order(unit.pass_index, unit.chunk)
        for work in batches_of(unit, count=count, batch_size=config.batch_size, seed=config.seed, order=order):
            self._work = work
            self.reported += self.trial.run_block(block, self.trial.reported, self.ctx, self.observe)

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._work is None:
            raise GraphftError("block local runs outside of a unit", rule="local-block")
        return self._work


def moved(value: Tensor, generator: torch.Generator) -> Tensor:
    """Values near `value`, hardly any of them zero, with the same bits on every machine: the noise comes from integers.
    Integers stay as they are."""
    if not value.is_floating_point():
        return value
    noise = torch.randint(-8, 9, value.shape, generator=generator).to(value.dtype) / 1024
    return value * (1 + noise) + noise
