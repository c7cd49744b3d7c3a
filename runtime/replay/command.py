"""`graphft replay`: computes one batch of a job again, and shows what of it is not finite."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from graphft.errors import UsageError
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.job_files import local_folder
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.data import open_reader
from graphft.runtime.execute.determinism import enforce
from graphft.runtime.execute.finite import nonfinite_of, nonfinite_rows
from graphft.runtime.process.role_process import EXIT_OK
from graphft.runtime.replay.recompute import Computed, LocalShards, LocalTrainer, Observer, Reached, reach
from graphft.transpiler.job import Job

ORIGINS, SAMPLES = 10, 8  # that are shown
INDENT = 13 * " "


def replay(options: argparse.Namespace) -> int:
    """Prints to stdout, and its progress to stderr."""
    folder = local_folder(find_run(options.job))
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
        shown = zip(rows, names([computed.numbers[row] for row in rows[:SAMPLES]]), strict=False)
        named = ", ".join(f"{row} ({record})" for row, record in shown)
        more = f" and {len(rows) - SAMPLES} more" if len(rows) > SAMPLES else ""
        count = int((~values.isfinite()).sum())
        lines.append(f"column       {name}: {count} values are not finite, in samples {named}{more}")
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
