"""Runs a job's programs in this process: real blocks and kernels; transport, etcd and data are Python lists.

It is the smallest thing that drives the ports as `docs/design.md` says. Nothing fails and nobody is late here:
what it shows is what the programs compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphft.ir import Kind, Program
from graphft.ir.literals import dtype_of
from graphft.ops.context import ChunkWork, Context, NoData
from graphft.plan import Located, batch_seed
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.queue.async_queue import batches_of
from graphft.transpiler.job import Job
from graphft.transpiler.layout import ALL_NORMS, assemble

Batches = Callable[[Located], Mapping[str, Tensor]]


class Session:
    """Nobody dies here."""

    def __init__(self) -> None:
        self.registered: list[tuple[str, int, bool]] = []

    def register(self, *, role: str, index: int, lease: bool) -> None:
        self.registered.append((role, index, lease))

    def keep_alive(self, progress_timeout: float) -> None: ...

    def wait_pservers(self, count: int, timeout: float) -> None: ...

    def report_status(self) -> None: ...


class Role:
    """A program, its context, and its blocks, each lowered once."""

    def __init__(self, program: Program, **ports: Any) -> None:
        self.program, self.session = program, Session()
        self.ctx = Context(scope={n: v.clone() for n, v in program.values.items()}, session=self.session, **ports)
        self._lowered: dict[tuple[str, int, tuple[str, ...]], Lowered] = {}

    def run(self, block: str, start: int = 0, fetch: tuple[str, ...] = ()) -> tuple[Any, ...]:
        key = (block, start, fetch)
        if key not in self._lowered:
            self._lowered[key] = lower(self.program.blocks[block], start=start, fetch=fetch)
        return self._lowered[key](self.ctx, self.ctx.scope)


class Shard(Role):
    """A pserver: its buckets are flat, and the variables in its scope are views of them."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, server=self)
        self.buckets: dict[int, tuple[Tensor, list[str], str]] = {}
        self.options: Mapping[str, Any] = {}
        self.saved: list[str] = []
        self.run("init")
        self.run("serve")

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        flat = torch.cat([self.ctx.scope[n].reshape(-1) for n in names])
        at = 0
        for n in names:
            numel = self.ctx.scope[n].numel()
            self.ctx.scope[n] = flat[at : at + numel]
            at += numel
        self.buckets[index] = (flat, list(names), reduce)

    def serve(self, options: Mapping[str, Any]) -> None:
        self.options = options

    def load_check_point(self) -> None: ...

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        self.saved = list(names)

    def reduce(self, contributions: list[tuple[int, dict[int, Tensor]]]) -> None:
        """Folds (samples, buckets) of each slot with data, in slot order, into the gradients."""
        for index, (_, names, reduce) in self.buckets.items():
            parts = [(samples, buckets[index]) for samples, buckets in contributions]
            total = sum(samples for samples, _ in parts)
            if reduce == "first":
                flat = parts[0][1].clone()
            else:
                weights = [samples / total if reduce == "weighted_mean" else 1 / len(parts) for samples, _ in parts]
                flat = sum((part * w for w, (_, part) in zip(weights, parts, strict=True)), torch.zeros(()))
            at = 0
            for n in names:
                numel = self.ctx.scope[n].numel()
                self.ctx.scope[f"{n}@GRAD"] = flat[at : at + numel].clone()
                at += numel


class Trainer(Role):
    """Computes one (step, slot) at a time; its pushes lie in `pushed`, by shard and bucket."""

    def __init__(self, job: Job, shards: Sequence[Shard], batches: Batches) -> None:
        super().__init__(job.trainer_program(), comm=self, queue=self, data=self, slots=self, local=self)
        self.job, self.shards, self.batches = job, shards, batches
        self.pushed: dict[int, dict[int, Tensor]] = {}
        self.work: Located | None = None
        self.ended = False
        self.current: ChunkWork | None = None
        self.losses: tuple[Tensor, ...] = ()
        for v in self.program.of_kind(Kind.PARAM, Kind.BUFFER):
            self.ctx.scope[v.name] = torch.full([int(d) for d in v.shape], -7, dtype=dtype_of(v.type))
        self.run("init")

    def compute(self, step: int, slot: int, fetch: tuple[str, ...] = ()) -> tuple[Any, ...]:
        """One step of one slot. Without data it runs the step's end alone, and pushes nothing."""
        self.ctx.step, self.ctx.slot, self.pushed, self.ended = step, slot, {}, False
        self.work = self.job.config.plan.locate(step, slot)
        try:
            return self.run("step", fetch=fetch)
        except NoData:
            ops = [op.type for op in self.program.blocks["step"].ops]
            self.run("step", start=ops.index("send_barrier"))
            return ()
        finally:
            assert self.ended

    def push(
        self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Sequence[tuple[int, int]], check: bool
    ) -> None:
        assert bucket not in self.pushed.setdefault(shard, {})
        self.pushed[shard][bucket] = torch.cat([t.reshape(-1)[a:b] for t, (a, b) in zip(tensors, slices, strict=True)])

    def check_loss(self, loss: Tensor) -> None: ...

    def report(self, values: Sequence[torch.Tensor]) -> None: ...

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: str) -> None:
        self.ended = True

    def pull(
        self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Sequence[tuple[int, int]], refresh: bool
    ) -> None:
        flat, at = self.shards[shard].buckets[bucket][0], 0
        for t, (a, b) in zip(tensors, slices, strict=True):
            t.view(-1)[a:b] = flat[at : at + b - a]
            at += b - a
        assert at == flat.numel()

    def end_pull(self, shards: int) -> None: ...

    def get(self, terms: object = None) -> ChunkWork:
        if self.work is None:
            raise NoData
        w = self.work
        seed = batch_seed(self.job.config.seed, self.ctx.step, self.ctx.slot)
        return ChunkWork(w.pass_index, w.chunk, w.batch, w.samples, seed)

    def begin_pass(self) -> None: ...

    def complete(self) -> None: ...

    def release_slots(self) -> None: ...

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> Sequence[Tensor]:
        assert self.work is not None
        found = self.batches(replace(self.work, batch=work.batch, samples=work.samples))
        return [found[c] for c in columns]

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config = self.job.config
        batches = config.epochs * sum(config.data.batches(config.batch_size, config.drop_last))
        done = self.ctx.step * batches // config.total_steps
        order = config.plan.order(unit.pass_index, unit.chunk)
        options = {"count": count, "batch_size": config.batch_size, "seed": config.seed}
        for work in batches_of(unit, order=order, number=done, **options):
            self.current = work
            self.losses += self.run(block, fetch=(str(self.program.attrs["loss"]),))

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        assert self.current is not None
        return self.current


class InProcess:
    """All roles of a job. `run` trains it to its end; `model()` is the model then."""

    def __init__(self, job: Job, batches: Batches) -> None:
        self.job = job
        self.shards = [Shard(p) for p in job.programs.pservers]
        self.trainer = Trainer(job, self.shards, batches)

    def run(self, steps: int | None = None) -> None:
        config = self.job.config
        for step in range(config.total_steps if steps is None else steps):
            contributions: dict[int, tuple[int, dict[int, dict[int, Tensor]]]] = {}
            for slot in reversed(range(config.trainers if config.sync else 1)):  # they arrive in any order
                self.trainer.compute(step, slot)
                if self.trainer.work is not None:
                    contributions[slot] = self.trainer.work.samples, self.trainer.pushed
            in_slot_order = [contributions[slot] for slot in sorted(contributions)]
            self._close(in_slot_order)

    def _close(self, contributions: list[tuple[int, dict[int, dict[int, Tensor]]]]) -> None:
        """A round: reduce, schedule, global norm, optimize."""
        for i, shard in enumerate(self.shards):
            shard.reduce([(samples, pushed[i]) for samples, pushed in contributions])
            for option in ("schedule_block", "reduce_block"):
                if block := getattr(shard.options, option):
                    shard.run(block)
        self._exchange_norms()
        for shard in self.shards:
            for block in shard.options.optimize_blocks:
                shard.run(block)

    def _exchange_norms(self) -> None:
        """Lays the shards' partial sums out as they all say: attributes of block `reduce`."""
        blocks = [s.program.blocks.get(s.options.reduce_block) for s in self.shards]
        order: Any = next((b.attrs["order"] for b in blocks if b is not None and "order" in b.attrs), ())
        parts = []
        for owner, start, count in order:
            partials: Any = blocks[owner].attrs["partials"]  # type: ignore[union-attr]
            (sums,) = self.shards[owner].run("reduce", fetch=(partials.name,))
            parts.append(sums[start : start + count])
        for shard in self.shards if parts else ():
            shard.ctx.scope[ALL_NORMS] = torch.cat(parts)

    def model(self) -> dict[str, Tensor]:
        return assemble(self.job.trainer_program(), [s.ctx.scope for s in self.shards])

    def state(self) -> dict[str, Tensor]:
        """Everything that a checkpoint would hold, of all shards."""
        state = {}
        for shard in self.shards:
            shard.run("checkpoint")
            state.update({n: shard.ctx.scope[n].clone() for n in shard.saved})
        return state
