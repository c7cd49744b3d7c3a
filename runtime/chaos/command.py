"""`graphft chaos`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK

PATIENCE = 120.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("chaos", help="run a job under faults, and compare it with the undisturbed run")
    parser.add_argument(
        "--job", default="", metavar="DIR", help="a saved job; if it is complete, it is the run that is compared with"
    )
    parser.add_argument("--faults", type=int, default=50, metavar="N", help="how many (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default: 0)")
    parser.add_argument("--kinds", default="", metavar="K,K...", help="only these kinds of faults (default: all)")
    parser.add_argument("--etcd-members", type=int, choices=(1, 3, 5), default=1, help="size of etcd (default: 1)")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        metavar="S",
        help=f"seconds without progress that count as a hang (default: {PATIENCE:.0f})",
    )
    parser.add_argument("--dir", default="", metavar="DIR", help="where to run (default: jobs/<name>-chaos-<seed>)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs, also when all is well")
    parser.add_argument("script", nargs="?", help="a Python script that calls job.run()")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command=_chaos)


def _chaos(options: argparse.Namespace) -> int:
    from rich.console import Console

    from graphft.runtime.chaos.prepare import prepare, run_chaos, save_script
    from graphft.runtime.chaos.run import ChaosOptions

    if bool(options.job) == bool(options.script):
        raise GraphftError("which job?", rule="usage", help="give a script, or --job DIR of a saved job")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    chosen = ChaosOptions(
        options.faults,
        options.seed,
        tuple(k for k in options.kinds.split(",") if k),
        options.etcd_members,
        options.patience,
    )
    name = Path(options.job or options.script).resolve().name.removesuffix(".py")
    work = Path(options.dir or f"jobs/{name}-chaos-{options.seed}")
    source = Path(options.job or work / "job")
    if options.script:
        save_script(options.script, options.args, source)
    prepared = prepare(source, work, options.patience)
    report = run_chaos(prepared, chosen, console.print)
    console.print(report.render())
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if report.ok and not options.keep:
        shutil.rmtree(work)
    else:
        console.print(f"the runs are in {work}")
    return EXIT_OK if report.ok else EXIT_FAILED
