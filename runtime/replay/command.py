"""`graphft replay`: computes steps of a sync job again, in one process: without protocol, transport and etcd;
and shows what of a batch is not finite."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.errors import LISTED, UsageError, listed
from graphft.ir import Block, Kind, Program, registry
from graphft.ir.printer import format_operator
from graphft.ir.registry import writes_of
from graphft.ops.context import ChunkWork, Context, Slices
from graphft.plan import Located, batch_seed
from graphft.runtime.checkpoint.manifest import Manifest, directory_key
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.coordination.job_files import local_folder
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.data import BatchKey, Reader, open_reader
from graphft.runtime.execute.determinism import enforce
from graphft.runtime.execute.finite import is_finite, nonfinite_of, nonfinite_rows
from graphft.runtime.execute.lowering import Observe, lower
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.role_process import EXIT_OK
from graphft.runtime.protocol.round import Contribution, means_of
from graphft.runtime.roles.programs import trainer_scope
from graphft.runtime.roles.pserver.norms import lay_out
from graphft.runtime.roles.pserver.shard_buffers import ShardBuffers
from graphft.runtime.roles.role import Blocks
from graphft.runtime.roles.trainer.step_check import TrialBatch, TrialComm
from graphft.runtime.transport.buffers import byte_view
from graphft.transpiler.job import Job
from graphft.transpiler.layout import ALL_NORMS, gradient_of

log = logging.getLogger("graphft")

Pushed = Mapping[tuple[int, int], Tensor]
"""By (shard, bucket), what a slot contributes."""


class LocalShard:
    """The program and the values of one pserver."""

    def __init__(self, program: Program, device: str) -> None:
        self.scope: dict[str, Any] = {n: value.detach().to(device, copy=True) for n, value in program.values.items()}
        self.blocks = Blocks(program, Context(scope=self.scope, device=device), Progress())
        self.buffers = ShardBuffers(self.scope)
        for op in program.blocks["init"].ops:
            if op.type == "bucket":
                self.buffers.make_bucket(op.attrs["index"], op.reads, registry.attr(op, "reduce"))
        self.serve = next(op for op in program.blocks["serve"].ops if op.type == "listen_and_serv")
        reduce = program.blocks.get("reduce")
        self.partials = reduce.attrs["partials"].name if reduce is not None else ""
        self.order = reduce.attrs["order"] if reduce is not None else ()

    def block(self, attribute: str) -> None:
        """Runs the block that this attribute of `listen_and_serv` names, if any."""
        self.blocks.run(registry.attr(self.serve, attribute))


class LocalShards:
    """The state of all shards: the initial values, until `restore`."""

    def __init__(self, job: Job) -> None:
        self.shards = [LocalShard(program, job.config.pserver_device) for program in job.programs.pservers]

    def restore(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        for shard, values in zip(self.shards, parts, strict=True):
            shard.buffers.restore(values)

    def apply(self, contributions: Mapping[int, tuple[int, Pushed]]) -> None:
        """Applies a step. `contributions`: by slot, its samples and what it pushed."""
        if not contributions:
            return
        for index, shard in enumerate(self.shards):
            given = [
                Contribution(slot, samples, {b: byte_view(v) for (s, b), v in pushed.items() if s == index})
                for slot, (samples, pushed) in sorted(contributions.items())
            ]
            shard.buffers.reduce(given)
        sums: dict[int, Tensor] = {}
        for index, shard in enumerate(self.shards):
            if shard.partials:  # for clipping by the global norm
                (sums[index],) = shard.blocks.run("reduce", fetch=(shard.partials,))
        for shard in self.shards:
            norms = lay_out(shard.order, sums)
            if norms is not None:
                shard.scope[ALL_NORMS] = norms
            shard.block("schedule_block")
            for block in registry.attr(shard.serve, "optimize_blocks"):
                shard.blocks.run(block)

    def leave_out(self) -> None:
        """Skips a step with a contribution that is not finite."""
        for shard in self.shards:
            shard.block("schedule_block")
            shard.block("skip_block")


class LocalComm(TrialComm):
    """Gives the parameters of shards in this process. `finite`: what the job's own check would find."""

    def __init__(self, job: Job, shards: LocalShards) -> None:
        super().__init__(job)
        self.shards, self.finite = shards, True

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        super().push(shard, bucket, tensors, slices, check)
        self.finite = self.finite and (not check or is_finite(self.pushed[shard, bucket]))

    def check_loss(self, loss: Tensor) -> None:
        self.finite = self.finite and is_finite(loss)

    def values_of(self, shard: int, bucket: int) -> Tensor:
        return self.shards.shards[shard].buffers.buckets[bucket].flat


@dataclass
class Computed:
    """A contribution. `numbers`: of its records in the data. When observed, `gradients`: by parameter; `parameters`:
    those received, with the number of values that are not finite; `origins`: (op, what values) of each op that makes
    such values of operands that are finite, in order."""

    work: Located
    columns: Mapping[str, Tensor]
    loss: float
    pushed: Mapping[tuple[int, int], Tensor]
    finite: bool
    numbers: Sequence[int]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    origins: list[tuple[str, str]] = field(default_factory=list)


class LocalTrainer:
    """Computes any (step, slot) with the present values of the shards."""

    def __init__(self, job: Job, reader: Reader, shards: LocalShards) -> None:
        self.job, self.reader, self.shards = job, reader, shards
        self.program, self.config = job.trainer_program(), job.config
        self.loss = str(self.program.attrs["loss"])
        self._quiet = self._lowered(None)

    def compute(self, step: int, slot: int, observer: Observer | None = None) -> Computed | None:
        """Returns None if the slot has no batch at this step."""
        found = self.config.plan.locate(step, slot)
        if found is None:
            return None
        key = BatchKey(found.pass_index, found.chunk, found.batch, self.config.batch_size)
        columns = self.reader.batch(*key)
        seed = batch_seed(self.config.seed, step, slot)
        batch = TrialBatch(ChunkWork(found.pass_index, found.chunk, found.batch, found.samples, seed), columns)
        comm = LocalComm(self.job, self.shards)
        ctx = Context(trainer_scope(self.program, self.config.device), step, slot, self.config.device)
        ctx.queue, ctx.slots, ctx.data, ctx.comm = batch, batch, batch, comm
        run = self._quiet if observer is None else self._lowered(observer.look)
        with torch.random.fork_rng(devices=[]):
            (loss,) = run(ctx, ctx.scope)
        computed = Computed(found, columns, float(loss), comm.pushed, comm.finite, self.reader.numbers(key))
        if observer is not None:
            computed.gradients, computed.origins = observer.gradients, observer.origins
            computed.parameters = nonfinite_of({v.name: ctx.scope[v.name] for v in self.program.of_kind(Kind.PARAM)})
        return computed

    def _lowered(self, look: Observe | None) -> Any:
        return lower(self.program.blocks["step"], fetch=(self.loss,), device=self.config.device, observe=look)


class Observer:
    """Looks at each op that has run. Infinities may be meant, as in a mask, so an op is an origin of NaN if none of its
    operands has NaN."""

    def __init__(self, job: Job) -> None:
        parameters = job.trainer_program().of_kind(Kind.PARAM)
        self._parameter = {gradient_of(v): v.name for v in parameters}
        self._nan: set[str] = set()
        self._infinite: set[str] = set()
        self.gradients: dict[str, Tensor] = {}
        self.origins: list[tuple[str, str]] = []

    def look(self, block: Block, index: int, values: Mapping[str, Any]) -> None:
        op = block.ops[index]
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
        if op.type == "send":
            sent = ((self._parameter[n], v) for n, v in tensors.items() if n in self._parameter)
            self.gradients |= {name: value.detach().clone() for name, value in sent}
        clean, made = not any(n in self._nan | self._infinite for n in op.reads), []
        had_nan = bool(self._nan.intersection(op.reads))
        for name in (n for n in writes_of(op) if n in tensors):
            nan, infinite = int(tensors[name].isnan().sum()), int(tensors[name].isinf().sum())
            if (nan and not had_nan) or (infinite and clean):
                counts = " and ".join(f"{n} {what}" for n, what in ((nan, "nan"), (infinite, "infinite")) if n)
                made.append(f"%{name}: {counts} of {tensors[name].numel()} values")
            for known, found in ((self._nan, nan), (self._infinite, infinite)):
                (known.add if found else known.discard)(name)
        if made:
            self.origins.append((format_operator(op, block.program), ", ".join(made)))


@dataclass(frozen=True)
class Reached:
    """The state of `step` was reached from the checkpoint of step `start` in `folder` ("": the initial values).
    `same`: steps in between whose losses are recorded with the same bits; `other`: (step, here, there) of others."""

    step: int
    start: int
    folder: str
    same: int
    other: tuple[tuple[int, float, float], ...]


def newest_before(job: Job, job_dir: Path, step: int) -> tuple[Manifest, list[dict[str, Tensor]]] | None:
    """Returns the newest whole checkpoint of this run at or before `step`, and its parts. Raises StorageUnavailable."""
    store = checkpoints_of(job_dir)
    for directory in (d for d in store.directories() if directory_key(d)[0] <= step):
        try:
            manifest = store.read_manifest(directory)
            if manifest.run == job.run_id:
                return manifest, [store.read_part(manifest, i)[0] for i in range(job.config.pservers)]
        except DamagedCheckpoint as error:
            if store.has_manifest(directory):  # else it is being written, or was given up
                log.error("%s; the steps since the one before it are computed again", error.message)
    return None


def reach(
    job: Job, job_dir: Path, shards: LocalShards, trainer: LocalTrainer, step: int, tell: Callable[[str], object]
) -> Reached:
    """Brings the shards to `step`. Raises UsageError if the job itself would not have got there."""
    found, start, folder = newest_before(job, job_dir, step), 0, ""
    if found is not None:
        manifest, parts = found
        start, folder = manifest.step, manifest.directory
        shards.restore(parts)
    recorded = {k: values["loss"] for k, values in read_rows(job_dir, start, step - start).steps()}
    same, other = 0, []
    for k in range(start, step):
        computed = {v: c for v in range(job.config.trainers) if (c := trainer.compute(k, v)) is not None}
        if computed and k in recorded:
            (here,), there = means_of([(c.work.samples, (c.loss,)) for c in computed.values()]), recorded[k]
            if here == there or (math.isnan(here) and math.isnan(there)):
                same += 1
            else:
                other.append((k, here, there))
        _apply(job, shards, k, computed)
        tell(f"step {k} of {step}")
    return Reached(step, start, folder, same, tuple(other))


def _apply(job: Job, shards: LocalShards, step: int, computed: dict[int, Computed]) -> None:
    bad = [v for v, c in computed.items() if not c.finite]
    if bad and job.config.on_nonfinite == "stop":
        text = f"step {step} of slot {bad[0]} is not finite already: the job stops there"
        raise UsageError(text, rule="replay", help=f"graphft replay --step {step} --slot {bad[0]}")
    if bad:
        shards.leave_out()
    else:
        shards.apply({v: (c.work.samples, c.pushed) for v, c in computed.items()})


ORIGINS = 10  # that are shown
INDENT = 13 * " "


def replay(options: argparse.Namespace) -> int:
    """Prints to stdout, and its progress to stderr."""
    folder = local_folder(find_run(options.job)).absolute()
    job = Job.load(folder)
    _check(job, options.step, options.slot)
    enforce(job.config)
    shards = LocalShards(job)
    reader = open_reader(job.config.data, folder, job.config.seed, job.config.trainers + 1)
    trainer = LocalTrainer(job, reader, shards)
    reached = reach(job, folder, shards, trainer, options.step, _tell)
    computed = trainer.compute(options.step, options.slot, Observer(job))
    if computed is None:
        text = f"slot {options.slot} has no batch at step {options.step}: its epoch is over for it"
        raise UsageError(text, rule="replay", help="name another step or slot")
    print("\n".join([*_origin_of_state(folder, reached), *_report(options, computed, reader.names)]))
    return EXIT_OK


def _check(job: Job, step: int, slot: int) -> None:
    config = job.config
    if not config.sync:
        text = f"job {config.name} is async: which parameters a batch was computed from is recorded nowhere"
        raise UsageError(text, rule="replay", help="compute it by graphft.Executor with a checkpoint's parameters")
    if not (0 <= step < config.total_steps and 0 <= slot < config.trainers):
        help = f"the job has steps 0 to {config.total_steps - 1}, slots 0 to {config.trainers - 1}"
        raise UsageError(f"there is no step {step} of slot {slot}", rule="replay", help=help)


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _origin_of_state(folder: Path, reached: Reached) -> list[str]:
    start = checkpoints_of(folder).where(reached.folder) if reached.folder else "the initial values"
    lines = [f"parameters   {start}"]
    if reached.start < reached.step:
        lines[0] += f", and steps {reached.start} to {reached.step - 1} computed again"
        lines.append(f"{INDENT}the losses of {reached.same} of these steps are recorded, with the same bits")
    for step, here, there in reached.other[:1]:
        lines.append(
            f"{INDENT}BUT those of {len(reached.other)} are recorded otherwise, first that of step {step}: "
            f"{here} here, {there} in the job. Were batches discarded? Here they are computed all the same"
        )
    return lines


def _report(options: argparse.Namespace, computed: Computed, names: Callable[[Sequence[int]], list[str]]) -> list[str]:
    """`names`: what a person finds records by."""
    work = computed.work
    where = f"batch {work.batch} of chunk {work.chunk} in epoch {work.pass_index}, {work.samples} samples"
    lines = [f"batch        step {options.step}, slot {options.slot}: {where}", f"loss         {computed.loss}"]
    for name in nonfinite_of(computed.columns):
        values = computed.columns[name]
        rows = nonfinite_rows(values)
        shown = zip(rows, names([computed.numbers[row] for row in rows[:LISTED]]), strict=False)
        named = listed([f"{row} ({record})" for row, record in shown], total=len(rows))
        count = int((~values.isfinite()).sum())
        lines.append(f"column       {name}: {count} values are not finite, in samples {named}")
    lines += [f"parameter    {n}: {count} values are not finite" for n, count in computed.parameters.items()]
    lines += ["gradients    norm, values that are not finite, of all"]
    for name, gradient in computed.gradients.items():
        bad = int((~gradient.isfinite()).sum())
        lines.append(f"{INDENT}{float(gradient.double().norm()):<12.6g} {bad:>8} of {gradient.numel():<10} {name}")
    if not computed.origins:
        return [*lines, "ops          all results are finite"]
    lines.append("ops          that make nan or infinities of operands without, the first one first")
    for op, what in computed.origins[:ORIGINS]:
        lines += [f"{INDENT}{op}", f"{INDENT}  {what}"]
    others = len(computed.origins) - ORIGINS
    return lines + ([f"{INDENT}and {others} more"] if others > 0 else [])
