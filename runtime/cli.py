"""The `graphft` command."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, UsageError
from graphft.runtime.chaos.command import add_parser as add_chaos
from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK, EXIT_USAGE, PARENT, die_with_parent
from graphft.runtime.replay.command import add_parser as add_replay
from graphft.runtime.replay.command import replay

if TYPE_CHECKING:
    from graphft.ir import Program
    from graphft.runtime.etcd import Etcd
    from graphft.transpiler import Job

MODEL = "model.safetensors"
"""In a job's folder, when it is complete."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `graphft` and `python -m graphft`. Returns the exit status."""
    if PARENT in os.environ:  # before anything is loaded, which can take seconds; and not for children of our own
        die_with_parent(int(os.environ.pop(PARENT)))
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    if arguments is None and command in (_start, replay) and "PYTHONHASHSEED" not in os.environ:
        # By hand. A launcher sets it; it counts from Python's start on.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **role_environment()})
    try:
        return command(options)
    except GraphftError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED if error.rule == "job-failed" else EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `graphft show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="graphft", description="fault-tolerant training, in the graph")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    launch = commands.add_parser("launch", help="run a script (or a saved job) with all roles on this machine")
    launch.add_argument("--trainers", type=int, help="trainers to start here (default: what the job says)")
    launch.add_argument("--pservers", type=int, help="pservers to start here (default: what the job says)")
    launch.add_argument("--etcd", default="", help="host:port[,host:port...] (default: start one)")
    launch.add_argument("--job", default="", metavar="DIR", help="the job's folder (default: jobs/<name>)")
    launch.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        help="failures of a role without a step in between before giving up (default: 3)",
    )
    launch.add_argument("--no-fork-server", action="store_true", help="start each role from nothing, none as a fork")
    launch.add_argument("--quiet", action="store_true", help="no progress display")
    launch.add_argument("--save-only", action="store_true", help="save the script's job to --job DIR, and end there")
    launch.add_argument("script", nargs="?", help="a Python script that calls job.run(); without one, --job is run")
    launch.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    launch.set_defaults(command=_launch)

    start = commands.add_parser("start", help="run one role of a saved job in this process")
    start.add_argument("role", choices=("trainer", "pserver", "coordinator"))
    start.add_argument("--job", required=True, metavar="DIR", help="the job's folder")
    start.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the folder says)")
    start.add_argument("--index", type=int, default=-1, help="the pserver's index (default: any free one)")
    start.set_defaults(command=_start)

    fork_server = commands.add_parser("fork-server")  # what the launcher starts; of no use to people
    fork_server.add_argument("--job", required=True)
    fork_server.set_defaults(command=_fork_server)

    status = commands.add_parser("status", help="what a running job is doing")
    status.add_argument("--job", default="", help="the job's name or folder (default: the only one)")
    status.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the job's folder says)")
    status.add_argument("--watch", action="store_true", help="stay and update")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=_status)

    forget = commands.add_parser("forget", help="delete a dead run's records from an etcd that outlives jobs")
    forget.add_argument("name", help="the job's name")
    forget.add_argument("--etcd", required=True, help="host:port[,host:port...]")
    forget.add_argument(
        "--force",
        action="store_true",
        help="also if processes of it are registered, and known to be dead: they would end with an error",
    )
    forget.set_defaults(command=_forget)

    show = commands.add_parser("show", help="print programs of a job, or a saved program")
    show.add_argument("path", help="a job's folder, or a program's")
    show.add_argument("--role", help="trainer, pserver0, pserver1, ..., coordinator (default: all)")
    show.add_argument("--passes", action="store_true", help="the programs after each pass of the transpiler")
    show.add_argument("--diff", action="store_true", help="what ft=True changes, as a diff")
    formats = show.add_mutually_exclusive_group()
    formats.add_argument("--dot", action="store_true", help="GraphViz")
    formats.add_argument("--mermaid", action="store_true", help="Mermaid")
    show.set_defaults(command=_show)

    add_replay(commands)
    add_chaos(commands)
    return parser


def _launch(options: argparse.Namespace) -> int:
    from graphft.runtime.launcher.launch import LaunchOptions, launch_directory

    chosen = LaunchOptions(
        options.trainers,
        options.pservers,
        options.etcd,
        options.job,
        options.max_restarts,
        options.quiet,
        not options.no_fork_server,
        options.save_only,
    )
    if options.script is None:
        if not options.job:
            raise GraphftError("nothing to launch", rule="usage", help="give a script, or --job DIR of a saved job")
        from graphft.transpiler import read_record

        record, model = read_record(Path(options.job)), Path(options.job) / MODEL
        if model.exists():
            print(f"{options.job} is complete: {model}")
        else:
            launch_directory(record, Path(options.job), chosen)
        return EXIT_OK
    if not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script}", rule="missing-file", help="check the path")
    os.environ["GRAPHFT_LAUNCH"] = json.dumps(asdict(chosen))
    sys.argv = [options.script, *options.args]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    runpy.run_path(options.script, run_name="__main__")
    return EXIT_OK


def _start(options: argparse.Namespace) -> int:
    from graphft.runtime.roles.environment import RoleSpec, explain_on_signal, run_role

    explain_on_signal()
    job = _load_job(options.job)
    return run_role(job, Path(options.job), RoleSpec(options.role, options.index, options.job, options.etcd))


def _fork_server(options: argparse.Namespace) -> int:
    from graphft.runtime.launcher.fork_server import serve

    return serve(Path(options.job))


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import list_jobs, read_status
    from graphft.runtime.launcher.display import render

    name, endpoints, folder = _locate(options)
    with _connect(endpoints, folder) as etcd:
        if not name:
            names = list_jobs(etcd)
            if len(names) != 1:
                raise GraphftError(
                    f"etcd knows {len(names)} jobs: {', '.join(names) or 'none'}",
                    rule="unknown-job",
                    help="name one with --job",
                )
            name = names[0]
        keys = Keys(name)
        if options.json:
            print(read_status(etcd, keys).to_json())
        elif options.watch:
            with Live(render(read_status(etcd, keys)), refresh_per_second=4) as live:
                while (status := read_status(etcd, keys)).state == "running":
                    live.update(render(status))
                    time.sleep(0.5)
                live.update(render(status))
        else:
            Console(highlight=False, markup=False, emoji=False).print(render(read_status(etcd, keys)))
    return EXIT_OK


def _forget(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.run_record import describe_run
    from graphft.runtime.coordination.stale_run import forget_dead

    with connect(options.etcd) as etcd:
        spec = forget_dead(etcd, Keys(options.name), options.force)
    print(f"forgotten: run {describe_run(spec)}; its folder stays, and can be gone on with from its checkpoints")
    return EXIT_OK


def _connect(endpoints: str, folder: Path | None) -> Etcd:
    """A client of the etcd that was named, or else of the one whose endpoints are in `folder`."""
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.etcd import EtcdUnreachable

    try:
        return connect(endpoints)
    except EtcdUnreachable as error:
        if folder is None:
            raise
        model = folder / MODEL
        state, help = (
            ("complete", f"the model is {model}")
            if model.exists()
            else ("not running", f"graphft launch --job {folder} goes on with it")
        )
        raise GraphftError(
            f"the job in {folder} is {state}: its etcd at {endpoints} does not answer",
            rule="etcd-unreachable",
            help=help,
        ) from error


def _locate(options: argparse.Namespace) -> tuple[str, str, Path | None]:
    """(job name, endpoints, folder that the endpoints are from) from --job, which is a name or a folder, and --etcd."""
    from graphft.runtime.coordination.connect import read_endpoints

    name, endpoints = options.job, options.etcd
    folders = [f for f in (Path(name), Path("jobs") / name) if (f / "job.json").exists()] if name else []
    if folders:
        config = _load_job(folders[0]).config
        name = config.name
        endpoints = endpoints or read_endpoints(folders[0]) or ",".join(config.etcd_endpoints or ())
    elif "/" in name or (name and not endpoints and Path(name).is_dir()):
        _load_job(name)  # says what is wrong with the folder
    if not endpoints and folders:
        raise GraphftError(
            f"the job in {folders[0]} is not running on this machine, or has just begun to",
            rule="etcd-endpoints",
            help="wait a moment; or give --etcd HOST:PORT",
        )
    if not endpoints:
        raise GraphftError(
            "no etcd endpoints",
            rule="etcd-endpoints",
            help="give --etcd HOST:PORT, or --job with the folder of a job launched on this machine",
        )
    return name, endpoints, folders[0] if folders and not options.etcd else None


def _show(options: argparse.Namespace) -> int:
    path = Path(options.path)
    if not path.exists():
        raise UsageError(
            f"there is no {path}", rule="missing-file", help="give the folder of a job, or one that Program.save wrote"
        )
    if not (path / "job.json").exists():
        return _show_program(path, options)
    from graphft.transpiler import Stage

    job = _load_job(path)
    if options.diff:
        print(job.diff())
        return EXIT_OK
    stages = job.passes if options.passes else [Stage("", job.programs)]
    role = options.role
    if role is not None and role not in job.programs.by_name():
        raise UsageError(
            f"the job has no program {role}", rule="role", help=f"it has {', '.join(job.programs.by_name())}"
        )
    for stage in stages:
        if options.passes:
            print(f"===== after {stage.after or 'capture'}")
        for name, program in stage.programs.by_name().items():
            if role in (None, name):
                _print_program(program, options)
    return EXIT_OK


def _show_program(path: Path, options: argparse.Namespace) -> int:
    from graphft.storage import load_program

    for option in ("role", "passes", "diff"):
        if getattr(options, option):
            raise GraphftError(
                f"--{option} is for jobs, and {path} holds none",
                rule="usage",
                help="give the folder that Job.save or graphft launch wrote",
            )
    _print_program(load_program(path), options)
    return EXIT_OK


def _print_program(program: Program, options: argparse.Namespace) -> None:
    from graphft.views import to_dot, to_mermaid

    print(to_dot(program) if options.dot else to_mermaid(program) if options.mermaid else program)


def _load_job(path: str | Path) -> Job:
    from graphft.transpiler import Job

    return Job.load(path)
