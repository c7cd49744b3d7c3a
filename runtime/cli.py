"""The `graphft` command."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import runpy
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphft
from graphft.errors import GraphftError, UsageError
from graphft.runtime.chaos import add_parser as add_chaos
from graphft.runtime.coordination.connect import connect
from graphft.runtime.coordination.job_files import is_published, local_folder, publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import describe_run, forget_dead
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.engines.commands import add_parsers as add_slurm_kubernetes
from graphft.runtime.engines.ssh import HOSTS, PYTHON
from graphft.runtime.interchange import add_parser as add_checkpoint
from graphft.runtime.launcher.commands import add_parsers as add_looks
from graphft.runtime.launcher.commands import port
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.options import CALLED, COMMAND_LINE, LaunchOptions
from graphft.runtime.prediction import add_parser as add_predict
from graphft.runtime.process.role_process import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    PARENT,
    die_with_parent,
    hear_of_children,
    role_environment,
)
from graphft.runtime.roles.health import Attendance


class _Parser(argparse.ArgumentParser):
    """Parses the command, and each command below it: takes options by their whole names only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `graphft` and `python -m graphft`. Returns the exit status."""
    hear_of_children()
    if PARENT in os.environ:  # before anything is loaded, which can take seconds; and not for children of our own
        die_with_parent(int(os.environ.pop(PARENT)))
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if arguments is None and options.subcommand in ("start", "replay") and "PYTHONHASHSEED" not in os.environ:
        # By hand. A launcher sets it; it counts from Python's start on.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **role_environment()})
    try:
        command = options.command  # by name, where torch is needed: it is imported only now
        return int((pkgutil.resolve_name(command) if isinstance(command, str) else command)(options))
    except GraphftError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED if error.rule == "job-failed" else EXIT_USAGE
    except KeyboardInterrupt as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int):  # of a launch, which has said all
            return error.code
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `graphft show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="graphft", description="fault-tolerant training, in the graph")
    parser.add_argument("--version", action="version", version=f"graphft {graphft.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="subcommand")
    _add_launch(commands)

    start = commands.add_parser("start", help="run one role of a saved job in this process")
    start.add_argument("role", choices=("trainer", "pserver", "coordinator"))
    start.add_argument("--job", required=True, metavar="DIR", help="the job's folder, or the URL of its storage")
    start.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the folder says)")
    start.add_argument("--index", type=int, default=-1, help="the pserver's index (default: any free one)")
    health, help = os.environ.get("GRAPHFT_HEALTH", ""), "answer /healthz and /readyz over HTTP there"
    start.add_argument("--health", metavar="HOST:PORT", default=health, help=f"{help} (default: nowhere)")
    help = "when the job is complete, wait for SIGTERM before ending with status 0"
    start.add_argument("--stay", action="store_true", help=help)
    help = "exit status of a role that SIGTERM asked to leave before the job was complete (default: 0)"
    start.add_argument("--leave-status", type=int, default=EXIT_OK, metavar="N", help=help)
    start.set_defaults(command=_start)

    fork_server = commands.add_parser("fork-server")  # what the launcher starts; of no use to people
    fork_server.add_argument("--job", required=True, type=Path)
    fork_server.set_defaults(command="graphft.runtime.engines.fork_server_process:serve")

    add_looks(commands)

    forget = commands.add_parser("forget", help="delete a dead run's records from an etcd that outlives jobs")
    forget.add_argument("job", metavar="NAME", help="the job's name")
    forget.add_argument("--etcd", required=True, help="host:port[,host:port...]")
    help = "also if processes of it are registered, and known to be dead: they would end with an error"
    forget.add_argument("--force", action="store_true", help=help)
    forget.set_defaults(command=_forget)

    user = commands.add_parser("etcd-user", help="make a user of a shared etcd that may touch one job's records only")
    user.add_argument("job", metavar="NAME", help="the job's name")
    user.add_argument("--etcd", required=True, help="host:port[,host:port...]; $GRAPHFT_ETCD_USER has root's rights")
    user.set_defaults(command=_etcd_user)

    show = commands.add_parser("show", help="print programs of a job, or a saved program")
    show.add_argument("path", help="a job's folder, the URL of its storage, or a program's folder")
    show.add_argument("--role", help="trainer, pserver0, pserver1, ..., coordinator (default: all)")
    show.add_argument("--passes", action="store_true", help="the programs after each pass of the transpiler")
    show.add_argument("--diff", action="store_true", help="what ft=True changes, as a diff")
    show.add_argument("--dot", action="store_true", help="as a graph: GraphViz source")
    show.set_defaults(command="graphft.runtime.show:show")

    replay = commands.add_parser("replay", help="compute one batch of a job again: loss, gradients, what is not finite")
    replay.add_argument("--job", required=True, help="the job's name or folder, or the URL of its storage")
    replay.add_argument("--step", required=True, type=int, help="the step, as messages and metrics name it")
    replay.add_argument("--slot", type=int, default=0, help="the slot (default: 0)")
    replay.set_defaults(command="graphft.runtime.replay.command:replay")

    add_predict(commands)
    add_checkpoint(commands)
    add_chaos(commands)
    add_slurm_kubernetes(commands)
    return parser


def _add_launch(commands: Any) -> None:
    """Each option is named like its field of LaunchOptions; what is not given is None, and the script's to say."""
    launch = commands.add_parser("launch", help="run a script (or a saved job) with all roles on this machine")
    launch.add_argument("--trainers", type=int, help="trainers to start here (default: what the job says)")
    launch.add_argument("--pservers", type=int, help="pservers to start here (default: what the job says)")
    launch.add_argument("--coordinators", type=int, help='(dispatch "coordinator") to start here (default: 1)')
    launch.add_argument("--etcd", help="host:port[,host:port...] (default: start one)")
    help = "the run's folder; without a script, also a job's name, or the URL of its storage"
    launch.add_argument("--job", dest="job_dir", metavar="DIR", help=help)
    help = "failures of a role without a step in between before giving up (default: 3)"
    launch.add_argument("--max-restarts", type=int, help=help)
    help = "where the processes run: local (this machine, the default), ray, slurm or ssh"
    launch.add_argument("--engine", help=help)
    launch.add_argument("--hosts", metavar="HOST,...", help="the machines on which the processes run, by ssh")
    help = "(--hosts) the interpreter there (default: the path of this one)"
    launch.add_argument("--python", metavar="PATH", help=help)
    launch.add_argument("--page-port", dest="page", type=port, metavar="PORT", help="as --page, at this port")
    switches = {
        "page": ("--page", "serve a page that shows the job on this machine's loopback, at a free port"),
        "fork_server": ("--no-fork-server", "start each role from nothing, none as a fork"),
        "quiet": ("--quiet", "no progress display"),
        "save_only": ("--save-only", "save the script's job to --job DIR, and end there"),
        "fresh": ("--fresh", "begin another run, also if there is an unfinished or complete one of the same job"),
        "wait": ("--no-wait", "an error, when another launcher runs the job (default: wait for its end)"),
    }
    for name, (flag, help) in switches.items():
        launch.add_argument(flag, dest=name, action="store_const", const=not flag.startswith("--no-"), help=help)
    launch.add_argument("script", nargs="?", help="a Python script that calls job.run(); without one, --job is run")
    help = "arguments of the script (options of launch stand before it)"
    launch.add_argument("args", nargs=argparse.REMAINDER, help=help)
    flags = frozenset(flag for action in launch._actions for flag in action.option_strings)
    launch.set_defaults(command=_launch, flags=flags)


def _launch(options: argparse.Namespace) -> int:
    _take_hosts(options)
    fields = LaunchOptions.__dataclass_fields__
    given = {name: value for name in fields if (value := getattr(options, name, None)) is not None}
    chosen, script = LaunchOptions(**given), options.script
    if script is None:
        if not chosen.job_dir:
            raise UsageError("nothing to launch", rule="usage", help="give a script, or --job DIR of a saved job")
        from graphft.runtime.launcher.launch import launch_saved

        launch_saved(local_folder(find_run(chosen.job_dir)), chosen)
        return EXIT_OK
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script}", rule="missing-file", help="check the path")
    if own := [argument for argument in options.args if argument.partition("=")[0] in options.flags]:
        tell(f"{', '.join(own)} stands behind {script}, and is given to it: options of graphft launch stand before it")
    os.environ[COMMAND_LINE] = json.dumps(given)
    os.environ.pop(CALLED, None)
    sys.argv = [script, *options.args]
    sys.path.insert(0, str(Path(script).resolve().parent))
    nothing = f"{script} ended and never called job.run(): nothing was run"
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # one that ends with sys.exit(0), as --help does, ends so
        if end.code in (None, 0) and CALLED not in os.environ:
            tell(nothing)
        raise
    if CALLED not in os.environ:
        help = "call run() on what graphft.transpile returns, below `if __name__ == '__main__':`"
        raise UsageError(nothing, rule="nothing-run", help=help)
    return EXIT_OK


def _take_hosts(options: argparse.Namespace) -> None:
    """Has the engine ssh use the machines that are named."""
    given = {HOSTS: options.hosts, PYTHON: options.python}
    given = {name: value for name, value in given.items() if value is not None}
    if given and options.engine not in (None, "ssh"):
        text = f"--hosts and --python are for the engine ssh, and --engine says {options.engine}"
        raise UsageError(text, rule="option", help="leave one of them out")
    if given:
        options.engine = "ssh"
        os.environ.update(given)


def _start(options: argparse.Namespace) -> int:
    attendance = Attendance(options.health, options.stay, options.leave_status)  # from before torch is loaded
    from graphft.runtime.roles.environment import RoleSpec, explain_on_signal, run_role
    from graphft.transpiler.job import Job

    explain_on_signal()
    folder = local_folder(find_run(options.job))
    if not is_published(folder):  # else a role that is started again waits for a storage that is away
        publish(folder)
    spec = RoleSpec(options.role, options.index, str(folder), options.etcd)
    return attendance.end(run_role(Job.load(folder), folder, spec, attendance.health.watch), folder)


def _forget(options: argparse.Namespace) -> int:
    with connect(options.etcd) as etcd:
        spec = forget_dead(etcd, Keys(options.job), options.force)
    print(f"forgotten: run {describe_run(spec)}; its folder stays, and can be gone on with from its checkpoints")
    return EXIT_OK


def _etcd_user(options: argparse.Namespace) -> int:
    user, password = f"graphft-{options.job}", secrets.token_urlsafe(24)
    with connect(options.etcd) as etcd:
        etcd.grant(user, password, Keys(options.job).everything)
    if "GRAPHFT_ETCD_USER" not in os.environ:
        tell("this etcd asks nobody for a login: `etcdctl user add root`, `etcdctl auth enable` (package etcd-client)")
    print(f"export GRAPHFT_ETCD_USER={user}\nexport GRAPHFT_ETCD_PASSWORD={password}")
    return EXIT_OK
