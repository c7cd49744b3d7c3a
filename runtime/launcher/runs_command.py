"""`graphft runs`: the jobs in a folder, a line each: how far, how good, how large, when."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from graphft.disk.fileio import size_in_words
from graphft.disk.sealed_json import readable_json
from graphft.errors import UsageError
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.launcher.run_list import Run
    from graphft.transpiler.criteria import Criterion, Mode

SORTS = ("when", "name", "state", "step", "loss", "best", "size")


def add_parser(commands: Any) -> None:
    runs = commands.add_parser("runs", help="the jobs in a folder: state, step, best metric, size, when")
    where = "a folder of jobs, or the URL below which their storages are (default: ./jobs)"
    runs.add_argument("folder", nargs="?", metavar="FOLDER", default="jobs", help=where)
    whose = "whose best value is told (default: that by which a job keeps its best model, or the loss)"
    runs.add_argument("--metric", metavar="NAME", help=whose)
    best = "which value is the best (default: min of a loss or an error, max of anything else)"
    runs.add_argument("--best", choices=("max", "min"), default=None, help=best)
    order = "in which order; of what is largest, newest or best the last (default: when)"
    runs.add_argument("--sort", choices=SORTS, default="when", help=order)
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(command=_show_runs)


def _show_runs(options: argparse.Namespace) -> int:
    show_runs(options.folder, options.metric, options.best, options.sort, as_json=options.json)
    return EXIT_OK


def show_runs(
    place: str, metric: str | None = None, mode: Mode | None = None, sort: str = "when", *, as_json: bool = False
) -> None:
    """Prints them. `metric`, `mode`: whose best value is told, of each job; by default what it says itself.

    Raises UsageError for a place without jobs, a metric that none of them has, and an order that makes no sense."""
    from graphft.runtime.launcher.run_list import list_runs
    from graphft.transpiler.criteria import Criterion

    found = list_runs(place)
    wanted = None if metric is None and mode is None else Criterion(metric or "loss", mode or "")
    if wanted is not None:
        _check_metric(found, wanted.metric)
    told = {run.criterion(wanted) for run in found}
    if sort == "best" and len(told) > 1:
        raise UsageError(
            f"these jobs tell their best by {', '.join(sorted({c.metric for c in told}))}: that is no order of them",
            rule="option",
            help="name one: --sort best --metric loss",
        )
    found.sort(key=_keys(wanted)[sort])
    if as_json:
        print(readable_json([run.to_json(wanted) for run in found]))
        return
    metrics = {criterion.metric for criterion in told}
    print_table([_header(metrics), *(_row(run, wanted, len(metrics) > 1) for run in found)])
    for run in found:
        for text in run.remarks():
            print(f"{run.status.row()[0]}: {text}")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _check_metric(found: Sequence[Run], metric: str) -> None:
    known = {"loss"}.union(*(run.figures.names for run in found))
    if metric not in known:
        raise UsageError(
            f"none of these jobs has a metric {metric!r}",
            rule="unknown-metric",
            help=f"there are {', '.join(sorted(known))}",
        )


def _keys(wanted: Criterion | None) -> dict[str, Callable[[Run], Any]]:
    """By what is sorted; what is unknown comes first."""

    def goodness(run: Run) -> float:
        best = run.best(wanted)
        sign = 1 if run.criterion(wanted).mode == "max" else -1
        return float("-inf") if best is None else sign * best.value

    return {
        "when": lambda run: run.status.at,
        "name": lambda run: run.status.row()[0],
        "state": lambda run: run.status.state,
        "step": lambda run: -1 if run.status.step is None else run.status.step,
        "loss": lambda run: float("-inf") if run.loss is None else run.loss,
        "best": goodness,
        "size": lambda run: run.figures.sizes.get("total", 0),
    }


def _header(metrics: Collection[str]) -> tuple[str, ...]:
    """`metrics`: whose best is told; of several, a row says which."""
    best = f"best {next(iter(metrics))}" if len(metrics) == 1 else "best"
    ends = ("launches", "preempted", "failed")
    return ("folder", "state", "step", "pass", "loss", best, "size", *ends, "worked on last")


def _row(run: Run, wanted: Criterion | None, named: bool) -> tuple[str, ...]:
    ends, best, at_pass = run.figures.ends, run.best(wanted), run.at_pass
    name = f"{run.criterion(wanted).metric} " * named
    passes = f"/{run.config.passes}" if run.config is not None and not run.status.on_demand else ""
    of = "" if best is None else "validation" if best.of == "validation" else "pass"
    return (
        *run.status.row(),
        "" if at_pass is None else f"{at_pass}{passes}",
        "-" if run.loss is None else f"{run.loss:.4g}",
        "-" if best is None else f"{name}{best.value:.4g} ({of} {best.epoch})",
        size_in_words(run.figures.sizes.get("total", 0)),
        *map(str, (ends.launches, sum(ends.preemptions.values()), sum(ends.failures.values()))),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.status.at)),
    )
