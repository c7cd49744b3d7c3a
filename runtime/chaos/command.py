"""The options of `graphft chaos`."""

from __future__ import annotations

import argparse

PATIENCE = 120.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chaos", help="run a job under faults, and compare it with the undisturbed run")
    add = parser.add_argument
    add("--job", default="", metavar="DIR", help="a saved job; if it is complete, it is the run that is compared with")
    add("--faults", type=int, default=50, metavar="N", help="how many (default: 50)")
    add("--seed", type=int, default=0, help="of the schedule (default: 0)")
    add("--kinds", default="", metavar="K,K...", help="only these kinds of faults (default: all)")
    hang = f"seconds without progress that count as a hang (default: {PATIENCE:.0f})"
    add("--patience", type=float, default=PATIENCE, metavar="S", help=hang)
    add("--dir", default="", metavar="DIR", help="where to run (default: jobs/<name>-chaos-<seed>)")
    add("--keep", action="store_true", help="keep the folders of the runs, also when all is well")
    add("script", nargs="?", help="a Python script that calls job.run()")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command=_chaos)


def _chaos(options: argparse.Namespace) -> int:
    from graphft.runtime.chaos.experiment import chaos

    return chaos(options)
