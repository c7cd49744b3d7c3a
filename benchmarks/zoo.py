"""Does graphft capture what users of torch train, and train it as torch does?

    make zoo ZOO="--only architectures --match llama --kills"

Each case of zoo_cases.py is three steps in a `graphft.Executor`, and three of eager torch from the same weights,
batches and seed. Losses, parameters, buffers and the optimizer's state are compared:

| outcome | what it means |
| --- | --- |
| bits | all tensors have the same bits |
| 1e-6, sqrt(eps) | each differs by at most 1e-6, or 3.5e-4, of its own largest magnitude (see LEAST) |
| WRONG | one differs by more |
| refused | `build`, `minimize` or the comparison with the module raises, also with capture=False |
| capture=False: | the outcome with it, where `build` or the comparison refuses to capture |
| fails, hangs, crashes | a step raises; there is no result within the limit; the process died |
| no reference | eager torch fails, or differs from itself |

With capture=False, eager torch draws from Python's and NumPy's generators as op `eager_step` seeds them: from the state
of torch's. What is refused for a batch of any size is tried once more with fixed sizes. With `--kills`, each tenth
architecture is also a small job (2 trainers, 1 pserver, ft) that runs twice, and a trainer of one run is killed with
SIGKILL: their final weights must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo_cases import FAMILIES, Batch, Case, Spec, Subject, spec

import graphft
from graphft.data import seeded_by_torch

LIMITS = {"bits": 0.0, "1e-6": 1e-6, "sqrt(eps)": torch.finfo(torch.float32).eps ** 0.5}
LEAST, LEAST_MEAN = 1e-6, 1e-3
"""The magnitude that counts where there is less, and of a running mean: a bias before a batch norm has a gradient of
mere rounding, and a mean of what was normalized is rounding of values around 1."""
BAD = ("WRONG", "fails", "hangs", "crashes")
OPAQUE = {"capture": False}
BATCH, STEPS, EPOCHS = 4, 10, 20
"""A job has batches of so many samples, steps and epochs."""


@dataclass
class Found:
    outcome: str
    detail: str = ""
    """The tensor that differs most, or the error."""
    note: str = ""
    """The way in which it was captured, if not at the first try, and why that was refused."""
    family: str = ""
    name: str = ""
    seconds: float = 0.0


# -- three steps ---------------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def made(case: Case) -> Subject:
    seed(0)
    return case.make()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


def eager(case: Case, batches: list[Batch], seeding: Callable[[], Any] = nullcontext) -> dict[str, Tensor]:
    subject, values = made(case), {}
    optimizer = subject.optimizer(subject.model.parameters())
    seed(1)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        with seeding():
            loss = subject.loss_fn(subject.model, **batch)
            loss.backward()
        optimizer.step()
        values[f"loss of step {step}"] = loss.detach()
    for n, p in subject.model.named_parameters():
        values |= {f"{n}@{k}": t for k, t in optimizer.state[p].items() if isinstance(t, Tensor)}
    return values | tensors_of(subject.model)


def program_of(subject: Subject, inputs: Spec, **options: Any) -> graphft.Program:
    program = graphft.build(subject.model, subject.loss_fn, inputs, allow_unused=True, **options)
    graphft.minimize(program, subject.optimizer(subject.model.parameters()), model=subject.model)
    return program


def replayed(model: nn.Module, program: graphft.Program, batches: list[Batch]) -> dict[str, Tensor]:
    executor, values = graphft.Executor(), {}
    seed(1)
    for step, batch in enumerate(batches):
        values[f"loss of step {step}"] = executor.run(program, batch, "loss")["loss"]
    return values | tensors_of(model) | executor.scope(program)  # the model's own: those that the program does without


def compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[str, str]:
    """The outcome, and in words the tensor that differs most."""
    apart = {n: distance(n, t, found[n]) if n in found else math.inf for n, t in expected.items()}
    worst = max(apart, key=lambda n: apart[n])
    differing = sum(d > 0 for d in apart.values())
    outcome = next((name for name, limit in LIMITS.items() if apart[worst] <= limit), "WRONG")
    return outcome, f"{worst} by {apart[worst]:.1e} ({differing} of {len(apart)} tensors differ)" if differing else ""


def distance(name: str, one: Tensor, other: Tensor) -> float:
    """0 for the same bits; else the largest difference, relative to the largest magnitude."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return math.inf
    if torch.equal(*(t.contiguous().reshape(-1, 1).view(torch.uint8) for t in (one, other))):
        return 0.0
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    one, other = (t.double().nan_to_num() for t in (one, other))
    magnitude = one.abs().max().clamp_min(LEAST_MEAN if name.endswith("running_mean") else LEAST)
    return max(float((one - other).abs().max() / magnitude), 1e-30)


def fixed(subject: Subject) -> tuple[Spec, list[Batch]]:
    sizes = {n: min(len(b[n]) for b in subject.batches) for n, t in subject.batches[0].items() if t.dim()}
    batches = [{n: t[: sizes[n]] if n in sizes else t for n, t in b.items()} for b in subject.batches]
    return spec(batches[0], batched=False), batches


def check(case: Case) -> Found:
    """Captures, replays and compares: in the first of three ways that is not refused."""
    first, refusals = made(case), []
    ways: dict[str, Any] = {"": (first.inputs, first.batches, {}), "fixed sizes": (*fixed(first), {})}
    ways["capture=False"] = (first.inputs, first.batches, {**OPAQUE, "example": first.batches[0]})
    for way, (inputs, batches, options) in ways.items():
        try:
            expected = eager(case, batches, seeded_by_torch if options else nullcontext)
        except Exception as error:
            return Found("no reference", told(error))
        subject, program = made(case), None
        note = "; ".join([way, *refusals[:1]] if way else [])
        try:
            program = program_of(subject, inputs, **options)
        except graphft.GraphftError as error:
            refusals.append(told(error))
        if changed := compare(tensors_of(made(case).model), tensors_of(subject.model))[1]:
            return Found("WRONG", f"build has changed the model: {changed}", note)
        if program is None:
            continue
        try:
            outcome, detail = compare(expected, replayed(subject.model, program, batches))
        except graphft.GraphftError as error:
            if error.rule != "capture-check":
                return Found("fails", told(error), note)
            refusals.append(told(error))
            continue
        except Exception as error:
            return Found("fails", told(error), note)
        if outcome == "WRONG" and compare(expected, eager(case, batches))[1]:
            outcome, detail = "no reference", "eager torch differs from itself"
        return Found(f"capture=False: {outcome}" if options else outcome, detail, note)
    return Found("refused", refusals[0])


def told(error: BaseException) -> str:
    message = str(getattr(error, "message", error)).strip().split("\n")[0]
    return f"{getattr(error, 'rule', type(error).__name__)}: {message}"


# -- a job, and a kill ---------------------------------------------------------------------------------------------


def job_of(case: Case, **options: Any) -> graphft.Job:
    subject, rows = made(case), 2 * BATCH * STEPS
    columns = {n: torch.cat([b[n] for b in subject.batches]) for n in subject.inputs}
    columns = {n: t.repeat(rows // len(t) + 1, *[1] * (t.dim() - 1))[:rows] for n, t in columns.items()}
    data = graphft.arrays(**columns, chunk_size=2 * BATCH)
    program = program_of(subject, subject.inputs, **options)
    return graphft.transpile(program, data=data, batch_size=BATCH, epochs=EPOCHS, trainers=2, pservers=1, ft=True)


def survive(case: Case) -> Found:
    """A job that runs undisturbed, and again with `kill -9` of a trainer once a step is done."""
    killed = False

    def kill(supervisor: Any, status: Any) -> None:
        nonlocal killed
        killed = killed or (status.step >= 1 and supervisor.signal("trainer", 1, signal.SIGKILL))

    try:
        try:
            job = job_of(case)
        except graphft.GraphftError:
            job = job_of(case, **OPAQUE)
        with tempfile.TemporaryDirectory() as scratch:
            calm = load_file(job.run(job_dir=f"{scratch}/calm", quiet=True).model)
            disturbed = load_file(job.run(job_dir=f"{scratch}/killed", quiet=True, on_status=kill).model)
    except graphft.GraphftError as error:
        return Found("fails", told(error))
    outcome, detail = compare(calm, disturbed)
    if not killed:
        return Found("fails", "the job was over before the kill")
    return Found("bits" if outcome == "bits" else "WRONG", detail)


# -- each case in a process of its own -----------------------------------------------------------------------------


def isolated(run: Callable[[Case], Found], family: str, limit: float, case: Case) -> Found:
    """`run(case)` in a fork of this process, which has imported all that is slow to import."""
    context, began = multiprocessing.get_context("fork"), time.monotonic()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=in_child, args=(there, run, case))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(limit) else Found("hangs", f"no result within {limit:.0f} s")
    except EOFError:
        process.join()
        found = Found("crashes", f"exit status {process.exitcode}")
    if process.is_alive() and found.outcome == "hangs":
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    found.family, found.name, found.seconds = family or case.family, case.name, time.monotonic() - began
    return found


def in_child(there: Any, run: Callable[[Case], Found], case: Case) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        there.send(run(case))
    except Exception as error:
        there.send(Found("fails", told(error)))


# -- the report ----------------------------------------------------------------------------------------------------


def report(results: list[Found]) -> str:
    """Markdown: how many cases of each family came to which outcome, and all that is not the same to rounding."""
    outcomes = sorted({f.outcome for f in results}, key=lambda o: (o not in LIMITS, o.endswith(BAD), o))
    families = list(dict.fromkeys(f.family for f in results))
    lines = [f"| family | cases | {' | '.join(outcomes)} |", "| --- " * (2 + len(outcomes)) + "|"]
    for family in (*families, "all"):
        counts = Counter(f.outcome for f in results if family in (f.family, "all"))
        lines.append(f"| {family} | {counts.total()} | {' | '.join(str(counts[o] or '') for o in outcomes)} |")
    rest = [f"- {f.family}: {f.name}: {told_of(f)}" for f in results if f.outcome not in ("bits", "1e-6")]
    return "\n".join([*lines, "", *rest, ""])


def told_of(found: Found) -> str:
    return f"**{found.outcome}** {found.detail}{f' ({found.note})' if found.note else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FAMILIES, action="append", help="this part (may be repeated)")
    parser.add_argument("--match", default="", metavar="TEXT", help="cases whose family and name have this text")
    parser.add_argument("--kills", action="store_true", help="a job of each tenth architecture, too")
    parser.add_argument("--limit", type=float, default=60, metavar="S", help="of a case (60; of a job 5 times that)")
    parser.add_argument("--workers", type=int, default=1, help="so many cases at a time (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = {part: list(FAMILIES[part]()) for part in options.only or FAMILIES}
    todo = [(partial(isolated, check, "", options.limit), c) for cases in wanted.values() for c in cases]
    if options.kills:
        job = partial(isolated, survive, "jobs with a kill", 5 * options.limit)
        todo += [(job, c) for c in wanted.get("architectures", [])[::10]]
    todo = [(run, case) for run, case in todo if options.match in f"{case.family} {case.name}"]
    results: list[Found] = []
    with ThreadPoolExecutor(options.workers) as pool:
        for found in pool.map(lambda each: each[0](each[1]), todo):
            results.append(found)
            place = f"[{len(results)}/{len(todo)}] {found.seconds:4.1f} s"
            print(f"{place} {found.family}: {found.name}: {told_of(found)[:250]}", flush=True)
    print("\n" + report(results))
    if options.markdown:
        options.markdown.write_text(report(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in results], indent=1))
    sys.exit(any(f.outcome.endswith(BAD) for f in results))


if __name__ == "__main__":
    main()
