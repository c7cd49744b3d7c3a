"""A job under faults, compared with the undisturbed run; the parser of `graphft chaos` is here."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    add = (parser := commands.add_parser("chaos", help="run a job under faults, and compare it")).add_argument
    add(
        "--job",
        default="",
        metavar="JOB",
        help="a job's name or folder; a complete run is the one that is compared with",
    )
    add("--faults", type=int, default=50, metavar="N", help="how many (default: 50)")
    add("--seed", type=int, default=0, help="of the schedule (default: 0)")
    add("--kinds", default="", metavar="K,K...", help="only these kinds of faults (default: all)")
    hang = "seconds without progress that count as a hang (default: 120)"
    add("--patience", type=float, default=120.0, metavar="S", help=hang)
    add("--dir", default="", metavar="DIR", help="where to run (default: jobs/<name>-chaos-<seed>)")
    add("--keep", action="store_true", help="keep the folders of the runs, also when all is well")
    add("script", nargs="?", help="a Python script that calls job.run()")
    add("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command="graphft.runtime.chaos.experiment:chaos")
