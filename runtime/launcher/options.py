"""Chooses how a job is launched: by what the script asks for, and by what the command line says."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from graphft.errors import UsageError
from graphft.options import unknown_option
from graphft.runtime.engines.base import Options
from graphft.runtime.launcher.ending import tell
from graphft.runtime.process.role_process import ROLES

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

COMMAND_LINE = "GRAPHFT_LAUNCH"
"""In the environment of a script that `graphft launch` runs: the options that were given, as JSON."""

ENGINE = "GRAPHFT_ENGINE"
"""In the environment of a script: where its job's processes run, unless the script says."""

CALLED = "GRAPHFT_CALLED"
"""Set in the environment as soon as the script calls `job.run()`: `graphft launch` looks whether it ever did."""

_ELSEWHERE = dict.fromkeys(("epochs", "max_epochs"), "transpile(epochs=...) says how many")
_ELSEWHERE["resume"] = "leave it out: an unfinished run of the same job always goes on"


class Counts(NamedTuple):
    """Holds how many processes of each role a launcher starts."""

    trainers: int
    pservers: int
    coordinators: int = 0

    def processes(self) -> Iterator[tuple[str, int]]:
        for role, count in (("coordinator", self.coordinators), ("pserver", self.pservers), ("trainer", self.trainers)):
            yield from ((role, index) for index in range(count))


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Says how many processes to start here, and where. None: what the job says."""

    trainers: int | None = None
    """Trainers to start here; those beyond the number of slots wait as spares."""
    pservers: int | None = None
    """Pservers to start here."""
    coordinators: int | None = None
    """Coordinators to start here: of a job with dispatch "coordinator" 1, and no other job has any. One serves, the
    others stand by."""
    etcd: str = ""
    """`host:port[,host:port...]` of an etcd that runs; "": one is started, with its data in the folder."""
    job_dir: str = ""
    """The run's folder; "": the newest of `jobs/<name>/runs` if that is this very job's, else the next one."""
    max_restarts: int = 3
    """Failures of one role in a row, without a step of the job in between, before the launcher gives up."""
    quiet: bool = False
    """No progress display. The line that says what is run, errors and what is lost are told all the same."""
    fork_server: bool = True
    """Make roles by forking a process that has loaded everything: each starts in a fraction of a second."""
    page: bool | int | None = None
    """Serve a page that shows the job, on this machine's loopback: True, or 0, on a free port; a number, on that port.
    The launch prints its URL."""
    engine: str | Options = "local"
    """The processes run there: `local` (this machine), `ray`, `slurm`, `ssh`, or an engine's options."""
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By role, what one process of it takes, in the engine's own names: {"trainer": {"CPU": 2, "GPU": 1}}."""
    save_only: bool = False
    """Write the job's folder and end there, instead of running it."""
    fresh: bool = False
    """Begin another run, also if there is an unfinished or complete one of this very job."""
    wait: bool = True
    """While another launcher runs the job: wait for its end. False: an error."""

    def __post_init__(self) -> None:
        for name in ("trainers", "pservers", "coordinators", "max_restarts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise _refused(f"{name} is {value}, expected 0 or more", f"correct {name}")
        if self.page is not None and not (isinstance(self.page, int) and 0 <= self.page < 1 << 16):
            help = "page=True takes a free port; page=8080 that one"
            raise _refused(f"page is {self.page!r}, expected True or a port", help)
        for role, wants in self.resources.items():
            if role not in ROLES or not isinstance(wants, Mapping):
                raise _refused(
                    f"resources has {role}={wants!r}, expected a role ({', '.join(ROLES)}) and what a process takes",
                    'resources={"trainer": {"CPU": 2, "GPU": 1}}',
                )

    def counts(self, config: JobConfig) -> Counts:
        return Counts(
            self.trainers if self.trainers is not None else config.trainers,
            self.pservers if self.pservers is not None else config.pservers,
            self.coordinators if self.coordinators is not None else int(config.dispatch == "coordinator"),
        )

    def missing(self, config: JobConfig) -> str:
        trainers, pservers, coordinators = self.counts(config)
        lacks = {"trainers": not trainers, f"{config.pservers - pservers} pservers": pservers < config.pservers}
        lacks["coordinators"] = config.dispatch == "coordinator" and not coordinators
        return " and ".join(name for name, lacking in lacks.items() if lacking)

    def endpoints(self, config: JobConfig) -> str:
        """Returns the endpoints of etcd; "": the launcher starts one."""
        return self.etcd or ",".join(config.etcd_endpoints or ()) or os.environ.get("GRAPHFT_ETCD", "")


def _refused(what: str, help: str) -> UsageError:
    return UsageError(what, rule="option", help=help)


def choose_options(options: LaunchOptions | None, overrides: Mapping[str, Any]) -> LaunchOptions:
    """Returns the arguments of `job.run` and of the command line (or `options`): that one counts where they differ,
    loudly. Raises UsageError for an argument that is none."""
    known = LaunchOptions.__dataclass_fields__
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise unknown_option("run", unknown[0], (*known, "callbacks", "on_status"), _ELSEWHERE)
    script = {name: value for name, value in overrides.items() if value is not None}
    if options is not None:
        return replace(options, **script)
    command_line: dict[str, Any] = json.loads(os.environ.get(COMMAND_LINE) or "{}")
    if os.environ.get(ENGINE):
        script.setdefault("engine", os.environ[ENGINE])
    for name in sorted(script.keys() & command_line.keys()):
        if script[name] != command_line[name]:
            tell(f"{name}={command_line[name]!r} of the command line counts, not {name}={script[name]!r} of the script")
    return LaunchOptions(**{**script, **command_line})


def check_counts(config: JobConfig, counts: Counts, embedded: bool) -> None:
    """Raises UsageError for numbers of processes with which the job can never complete. `embedded`: this launcher
    starts the etcd, which no other launcher can join."""
    trainers, pservers, coordinators = counts
    if pservers > config.pservers:
        raise _refused(
            f"pservers is {pservers}, but the job has {config.pservers}", f"start {config.pservers} or fewer"
        )
    if coordinators and config.dispatch != "coordinator":
        what = f"coordinators is {coordinators}, but the job's trainers claim their chunks in etcd"
        raise _refused(what, 'leave it out, or transpile(dispatch="coordinator")')
    if not config.ft and config.sync and trainers not in (0, config.trainers):
        raise _refused(
            f"{trainers} trainers cannot run a job of {config.trainers} without fault tolerance: each computes its own "
            "part of every step",
            f"start {config.trainers}, or use ft=True, where any number will do",
        )
    lacks = "trainers" if trainers == 0 else "pservers" if pservers < config.pservers else ""
    lacks = lacks or ("coordinators" if coordinators == 0 and config.dispatch == "coordinator" else "")
    if embedded and lacks:
        raise _refused(
            f"{lacks} is {getattr(counts, lacks)}, and this launcher brings its own etcd: the job would wait for ever",
            "leave it out, or give --etcd HOST:PORT of one that runs, which launchers on other machines can join",
        )
