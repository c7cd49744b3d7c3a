"""Measures how the modes converge:
`python benchmarks/convergence.py [--seeds 3] [--faults 0] [--json FILE] [--write docs]`.

Trains the examples' models, digits (all images) and flights (a tenth of them), in every mode: transpiled jobs, each
role a process of its own. The modes see the same batches of the same passes, with the same learning rate. Every pass a
checkpoint is taken, which is evaluated on data that were held out. With `--faults N`, async training on digits is done
again while N trainers and pservers are killed, and its loss held against the undisturbed runs'. `--write docs` puts
the tables into docs/convergence.md, between its marks, and makes docs/convergence.svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import runpy
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import graphft
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.transpiler.job import Job
from graphft.transpiler.layout import assemble

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BEGIN, END = "<!-- begin of what benchmarks/convergence.py --write has written -->", "<!-- end of it -->"
TRAINERS, PSERVERS, LOCAL_STEPS = 4, 2, 4
MODES: dict[str, dict[str, Any]] = {
    "one trainer": {"trainers": 1},
    "sync": {},
    "async": {"sync": False},
    "dc_asgd": {"sync": False, "mode": "dc_asgd", "dc_lambda": 2.0, "dc_decay": 0.95},
    "half_async": {"sync": False, "mode": "half_async", "local_steps": LOCAL_STEPS},
    "geo_sgd": {"sync": False, "mode": "geo_sgd", "local_steps": LOCAL_STEPS},
}
Columns = Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """A model and its data. `score` is higher for better predictions."""

    name: str
    make_model: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor]
    train: Columns
    held_out: Columns
    optimizer: Callable[[], Any]
    score_name: str
    score: Callable[[nn.Module, Columns], float]
    batch: int
    chunk: int
    passes: int

    def job(self, seed: int, **options: Any) -> Job:
        """A job that takes a checkpoint at the end of every pass, by the number of updates."""
        torch.manual_seed(seed)
        program = graphft.build(
            self.make_model(),
            self.loss_fn,
            name=self.name,
            inputs={n: ((None, *c.shape[1:]), c.dtype) for n, c in self.train.items()},
        )
        graphft.minimize(program, self.optimizer())
        data = graphft.arrays(chunk_size=self.chunk, **self.train)
        job = graphft.transpile(
            program,
            data=data,
            batch_size=self.batch,
            epochs=self.passes,
            seed=seed,
            ft=True,
            keep_checkpoints=self.passes + 1,
            checkpoint_seconds=0,
            **{"trainers": TRAINERS, "pservers": PSERVERS, **options},
        )
        every = job.config.total_steps // self.passes
        return replace(Job.make(job.source, job.config.replace(checkpoint_every=every)), run_id=job.run_id)

    def look(self, state: Mapping[str, Tensor]) -> tuple[float, float, float]:
        """Held-out loss, held-out score, and training loss of a model."""
        model = self.make_model()
        model.load_state_dict(dict(state))
        model.eval()
        with torch.no_grad():
            losses = [float(self.loss_fn(model, **columns)) for columns in (self.held_out, self.train)]
            return losses[0], self.score(model, self.held_out), losses[1]


def digits() -> Subject:
    example = runpy.run_path(str(EXAMPLES / "02_digits.py"))
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, train = ({"x": x[rows], "y": y[rows]} for rows in (order[:360], order[360:]))
    return Subject(
        "digits",
        example["make_model"],
        example["loss_fn"],
        train,
        held_out,
        lambda: graphft.SGD(lr=0.1),
        "accuracy",
        lambda model, c: float((model(c["x"]).argmax(1) == c["y"]).float().mean()),
        batch=16,
        chunk=128,
        epochs=6,
    )


def flights() -> Subject:
    example = runpy.run_path(str(EXAMPLES / "03_flights.py"))
    found = example["load_flights"]()
    order = torch.randperm(len(found.late), generator=torch.Generator().manual_seed(0))[: len(found.late) // 10].numpy()
    parts = [found[order[: len(order) // 5]], found[order[len(order) // 5 :]]]
    held_out, train = (
        {n: torch.from_numpy(getattr(p, n)) for n in ("common", "rare", "distance", "late")} for p in parts
    )
    return Subject(
        "flights",
        lambda: example["LateNet"](found.sizes),
        example["loss_fn"],
        train,
        held_out,
        lambda: graphft.Adam(lr=2e-3),
        "AUC",
        lambda model, c: float(roc_auc_score(c["late"], model(c["common"], c["rare"], c["distance"]))),
        batch=128,
        chunk=1024,
        epochs=5,
    )


@dataclass
class Run:
    """One training. Lists are by pass; `staleness[s]` counts updates, of all shards, that were s versions behind."""

    subject: str
    mode: str
    seed: int
    faults: int = 0
    updates: int = 0
    seconds: float = 0.0
    loss: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    staleness_max: int = 0


class Killer:
    """Kills a trainer or a pserver, drawn by the seed, at `faults` steps evenly through the job; and reads events."""

    def __init__(self, job: Job, faults: int, seed: int) -> None:
        steps, self.random = job.config.total_steps, random.Random(seed)
        self.left = [round((k + 0.5) * steps / faults) for k in range(faults)]
        self.killed, self.last = 0, None

    def __call__(self, supervisor: Any, status: Any) -> None:
        self.last = status
        if self.left and status.step >= self.left[0] and len(status.pservers) == PSERVERS:
            role, count = self.random.choice((("trainer", TRAINERS), ("pserver", PSERVERS)))
            if supervisor.signal(role, self.random.randrange(count), signal.SIGKILL):
                self.killed += 1
                self.left.pop(0)


def train(subject: Subject, mode: str, seed: int, faults: int = 0) -> Run:
    job = subject.job(seed, **MODES[mode])
    watch = Killer(job, faults, seed)
    run = Run(subject.name, mode, seed, updates=job.config.total_steps)
    with tempfile.TemporaryDirectory() as scratch:
        folder, start = Path(scratch, "job"), time.monotonic()
        job.run(job_dir=str(folder), quiet=True, fork_server=faults > 0, on_status=watch)
        run.seconds, run.faults = time.monotonic() - start, watch.killed
        for state in snapshots(job, folder):
            loss, score, train_loss = subject.look(state)
            run.loss.append(loss)
            run.score.append(score)
            run.train_loss.append(train_loss)
    for event in watch.last.events if watch.last is not None else ():
        if event.kind == "applied":
            counts = event.fields["staleness"]
            run.staleness = [a + b for a, b in itertools.zip_longest(run.staleness, counts, fillvalue=0)]
            run.staleness_max = max(run.staleness_max, event.fields["staleness_max"])
    return run


def snapshots(job: Job, folder: Path) -> Iterable[dict[str, Tensor]]:
    """The model as it was when each pass's number of updates was made: in async mode, by each shard for itself."""
    c = job.config
    stores = [checkpoints_of(folder, None if c.sync else i) for i in range(c.pservers)]
    found = [{m.step: m for m in store.manifests()} for store in stores]
    for step in range(c.checkpoint_every, c.total_steps + 1, c.checkpoint_every):
        parts = [
            store.read_part(by_step[step], i)[0] for i, (store, by_step) in enumerate(zip(stores, found, strict=True))
        ]
        yield assemble(job.trainer_program(), parts)


# -- what it says -----------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


def table(subject: Subject, runs: Sequence[Run]) -> str:
    lines = [
        f"| mode | runs | updates | training loss | held-out loss | {subject.score_name} | staleness |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for mode in MODES:
        mine = [r for r in runs if (r.subject, r.mode, r.faults) == (subject.name, mode, 0)]
        if mine:
            lines.append(
                f"| {mode} | {len(mine)} | {mine[0].updates:,} | {spread([r.train_loss[-1] for r in mine])} "
                f"| {spread([r.loss[-1] for r in mine])} | {spread([r.score[-1] for r in mine])} "
                f"| {_staleness(mine)} |"
            )
    return "\n".join(lines)


def _staleness(runs: Sequence[Run]) -> str:
    counts = [sum(c) for c in zip(*(r.staleness for r in runs if r.staleness), strict=True)]
    if not counts:
        return "-"
    mean = sum(s * n for s, n in enumerate(counts)) / sum(counts)
    within = list(itertools.accumulate(counts))
    return (
        f"{mean:.2f}, {next(s for s, n in enumerate(within) if n >= 0.95 * within[-1])}, "
        f"{max(r.staleness_max for r in runs)}"
    )


def compare_faults(runs: Sequence[Run]) -> str:
    """Final training losses of disturbed runs against undisturbed ones, by an exact permutation test of the means."""
    groups = [
        [r.train_loss[-1] for r in runs if (r.subject, r.mode) == ("digits", "async") and bool(r.faults) == hurt]
        for hurt in (False, True)
    ]
    calm, hurt = groups
    killed = [r.faults for r in runs if r.faults]
    return (
        f"| async on digits | runs | training loss | smallest | largest |\n| --- | ---: | ---: | ---: | ---: |\n"
        f"| undisturbed | {len(calm)} | {spread(calm)} | {min(calm):.4f} | {max(calm):.4f} |\n"
        f"| {sum(killed)} kills | {len(hurt)} | {spread(hurt)} | {min(hurt):.4f} | {max(hurt):.4f} |\n\n"
        f"Permutation test of the difference of the means: p = {permutation_test(calm, hurt):.2f}."
    )


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """The share of all ways to divide the values into groups of these sizes whose means differ at least as much."""
    both = [*one, *other]

    def difference(chosen: Iterable[int]) -> float:
        mine = [both[i] for i in chosen]
        rest = (sum(both) - sum(mine)) / (len(both) - len(mine))
        return abs(statistics.mean(mine) - rest)

    seen, ways = difference(range(len(one))), list(itertools.combinations(range(len(both)), len(one)))
    return sum(difference(w) >= seen * (1 - 1e-9) for w in ways) / len(ways)


def plot(subjects: Sequence[Subject], runs: Sequence[Run], file: Path) -> None:
    """Held-out loss by pass: the mean over the seeds, and the range that they span."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "graphft"
    figure, axes = pyplot.subplots(1, len(subjects), figsize=(5 * len(subjects), 3.6), squeeze=False)
    for axis, subject in zip(axes[0], subjects, strict=True):
        for mode in MODES:
            mine = [r.loss for r in runs if (r.subject, r.mode, r.faults) == (subject.name, mode, 0)]
            if mine:
                passes, by_pass = range(1, len(mine[0]) + 1), list(zip(*mine, strict=True))
                (line,) = axis.plot(passes, [statistics.mean(v) for v in by_pass], label=mode, linewidth=1.2)
                axis.fill_between(
                    passes,
                    [min(v) for v in by_pass],
                    [max(v) for v in by_pass],
                    alpha=0.12,
                    color=line.get_color(),
                    linewidth=0,
                )
        low, high = axis.get_ylim()
        axis.set(
            title=subject.name,
            xlabel="pass",
            ylabel="held-out loss",
            xticks=range(1, subject.passes + 1),
            yscale="log" if low <= 0 or high > 3 * low else "linear",
        )
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", default="digits,flights")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=0, help="kills in each of five runs (default: no such runs)")
    parser.add_argument("--json", type=Path, help="figures of every run; those that are in the file are not run again")
    parser.add_argument("--write", type=Path, help="folder for convergence.md and convergence.svg")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

    subjects = [{"digits": digits, "flights": flights}[n]() for n in options.subjects.split(",")]
    modes = options.modes.split(",")
    wanted = [(s, mode, seed, 0) for s in subjects for seed in range(options.seeds) for mode in modes]
    if options.faults:
        wanted += [(subjects[0], "async", seed, 0) for seed in range(options.seeds, 5)]
        wanted += [(subjects[0], "async", seed, options.faults) for seed in range(5)]
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    runs = [Run(**r) for r in known]
    for subject, mode, seed, faults in wanted:
        if any((r.subject, r.mode, r.seed, bool(r.faults)) == (subject.name, mode, seed, faults > 0) for r in runs):
            continue
        run = train(subject, mode, seed, faults)
        runs.append(run)
        print(
            f"{run.subject} {run.mode} seed {seed}: loss {run.loss[-1]:.4f}, {subject.score_name} "
            f"{run.score[-1]:.4f}, training loss {run.train_loss[-1]:.4f}, staleness {_staleness([run])}, "
            f"{run.faults} kills, {run.seconds:.1f} s",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps([asdict(r) for r in runs], indent=1))
    tables = [f"### {s.name.capitalize()}\n\n{table(s, runs)}\n" for s in subjects]
    if options.faults:
        tables.append(f"### With faults\n\n{compare_faults(runs)}\n")
    print("\n" + "\n".join(tables))
    if options.write:
        page = options.write / "convergence.md"
        before, _, behind = page.read_text().partition(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(tables) + f"\n{END}{behind.partition(END)[2]}")
        plot(subjects, runs, options.write / "convergence.svg")


if __name__ == "__main__":
    main()
