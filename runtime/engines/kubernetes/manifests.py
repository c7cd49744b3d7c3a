"""`graphft kubernetes`: the manifests of a job, on stdout: `job.yaml` filled in, and the pods in it, `pod.yaml`.

What else a cluster wants of them is edited there.
"""

from __future__ import annotations

import argparse
import json
import math
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.engines.templates import check_endpoints, check_gpus, fill, tell_idle, words
from graphft.runtime.process.role_process import EXIT_OK, role_environment

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig, JobRecord

JOB, POD = (Path(__file__).with_name(name) for name in ("job.yaml", "pod.yaml"))
MAX_NAME = 40
"""Labels have at most 63 characters; a StatefulSet's pods have one with a hash of 11 behind the name and its suffix."""
LEFT = 143
"""Exit status of a role that was asked to go, as of a process that SIGTERM ends: 0 is for a job that is complete."""
STOP_SECONDS = 30
"""A role needs so long to end beyond the step that it is at."""
DRIVER_STOP_SECONDS = 120
"""A script's pod has so long after SIGTERM: its roles end their step, and write a checkpoint."""
USUAL = {"cpu": "1", "memory": "4Gi"}
SMALL = {"cpu": "250m", "memory": "1Gi"}
"""A coordinator takes this."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_ITS_OWN = frozenset(re.findall(r"- \{name: ([A-Z_]+),", POD.read_text(encoding="utf-8")))
_INDEX = {
    "trainer": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "pserver": "metadata.labels['apps.kubernetes.io/pod-index']",
}
"""The field of a controller's pod that holds its index."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kubernetes", help="print the manifests that run a saved job on Kubernetes")
    add = parser.add_argument
    add("job", help="the URL of the job's storage, or its folder; or a Python script, with a graphft.Trainer say")
    add("--image", required=True, help="with graphft and what the job's data need")
    add("--name", default="", help="of the objects (default: the job's)")
    add("--trainers", type=int, metavar="N", help="pods (default: what the job says)")
    add("--etcd", default="", metavar="ENDPOINTS", help="host:port[,host:port...] of an etcd that runs already")
    add("--etcd-members", type=int, choices=(1, 3), default=3, help="of an etcd that is deployed (default: 3)")
    add("--tls-secret", default="", metavar="NAME", help="Secret with ca.crt, tls.crt and tls.key for etcd")
    add("--cpu", default=USUAL["cpu"], help="of a trainer and a pserver; of a script's own pod (default: 1)")
    add("--memory", default=USUAL["memory"], help="of the same, at most (default: 4Gi)")
    add("--gpus", type=int, metavar="N", help='of a trainer and a pserver (default: 1 with device "cuda", else 0)')
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for every role; may be repeated")
    add("--env-from-secret", action="append", default=[], metavar="NAME", help="its keys are variables; repeatable")
    add("--volume", default="", metavar="CLAIM:/PATH", help="a claim that all pods mount, for a job without a storage")
    add("--image-pull-secret", default="", metavar="NAME", help="for --image")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    parser.set_defaults(command=print_manifests)


def print_manifests(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.job_files import is_url, publish, url_of
    from graphft.runtime.coordination.run_record import check_asked_for

    if options.job.endswith(".py"):
        sys.stdout.write(_of_script(options, Path(options.job)))
        return EXIT_OK
    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    record, job = _find(options)
    check_asked_for(record.config, job, "print the manifests of that script: graphft kubernetes SCRIPT.py")
    text = of_job(options, record.config, job)
    if not is_url(options.job) and url_of(Path(options.job)):
        publish(Path(options.job))  # once it is known that its pods could run
    tell_idle(options.job, record)
    sys.stdout.write(text)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of a job: what they have in common. `name`: of the job's objects. `volume`: a PersistentVolumeClaim, and
    where pods have it. `threads`, `chunk_timeout`: the job's; 0 seconds for the pod of a script."""

    name: str
    image: str
    endpoints: str = ""
    tls_secret: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    env_from_secrets: Sequence[str] = ()
    volume: Sequence[str] | None = None
    pull_secret: str = ""
    threads: int = 1
    chunk_timeout: float = 0.0

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name) or len(self.name) > MAX_NAME:
            raise UsageError(
                f"{self.name!r} is no name for objects of Kubernetes",
                rule="kubernetes",
                help=f"give --name (name=): at most {MAX_NAME} small letters, digits and '-', a letter first",
            )
        for name in _ITS_OWN & self.env.keys():
            raise UsageError(
                f"--env {name} is set already: each pod has its own", rule="option", help=f"leave out --env {name}"
            )

    def role(self, role: str, job: str, resources: Mapping[str, str], index: int | None = None, **own: object) -> str:
        """Returns the pod of a role. `index`: None if a controller gives it one. `own`: values of a pod without
        controller."""
        options = {"trainer": ["--leave-status", str(LEFT)], "pserver": ["--stay"], "coordinator": ["--stay"]}
        field, numbered = ("", str(index)) if index is not None else (_INDEX.get(role, ""), "$(POD_INDEX)")
        command = ["graphft", "start", role, "--job", literal(job), "--etcd", literal(self.endpoints)]
        command += ["--health", "0.0.0.0:8080"]
        command += ["--index", numbered] if field or index is not None else []
        command += options[role] if index is None else []
        values = {
            "restart": "Never" if role == "trainer" or index is not None else "Always",
            "grace": math.ceil(self.chunk_timeout) + STOP_SECONDS,
            "patience": math.ceil(self.chunk_timeout / 10) + 2,
        }
        return self._pod(role, command, resources, index=field, **values, **own)

    def script(self, program: Sequence[str], resources: Mapping[str, str]) -> str:
        """Returns the pod of a script that has its job's pods made like itself (`engine.py`)."""
        names = ("name", "env", "env_from_secrets", "tls_secret", "pull_secret", "volume")
        given = {name: value for name in names if (value := getattr(self, name))}
        driver = json.dumps(literal(json.dumps(given)))
        command = ["python", *map(literal, program)]
        return self._pod("driver", command, resources, restart="Never", grace=DRIVER_STOP_SECONDS, driver=driver)

    def _pod(self, role: str, command: Sequence[str], resources: Mapping[str, str], **own: object) -> str:
        limits = {name: amount for name, amount in resources.items() if name != "cpu"}
        env = {**role_environment(), "OMP_NUM_THREADS": str(self.threads), **self.env}
        claim, mount = map(json.dumps, self.volume or ("", ""))
        values: dict[str, object] = {
            "name": self.name,
            "role": role,
            "image": json.dumps(self.image),
            "endpoints": self.endpoints,
            "command": json.dumps(command),
            "resources": json.dumps({"requests": dict(resources), "limits": limits}),
            "env": _entries({"name": name, "value": literal(value)} for name, value in env.items()),
            "env_from": _entries({"secretRef": {"name": name}} for name in self.env_from_secrets),
            "pull_secret": self.pull_secret and json.dumps(self.pull_secret),
            "tls_secret": self.tls_secret and json.dumps(self.tls_secret),
            "claim": claim,
            "mount": mount if self.volume else "",
            "role_only": role != "driver",
        }
        none = dict.fromkeys(("pod", "labels", "owner", "driver", "index", "patience"), "")
        return fill(POD, {**none, **values, **own})


def literal(text: str) -> str:
    """Returns the text as a container's arguments and variables have it: `$(NAME)` is replaced there, and `$$` is a
    `$`."""
    return text.replace("$", "$$")


def _entries(items: Iterable[object]) -> str:
    return "\n".join(f"- {json.dumps(item, ensure_ascii=False)}" for item in items)


def of_job(options: argparse.Namespace, config: JobConfig, job: str) -> str:
    """Returns all objects of a saved job. `job`: what its pods find it by."""
    trainers = config.trainers if options.trainers is None else options.trainers
    etcd = options.etcd or ",".join(config.etcd_endpoints or ())
    _check(config, options, job, trainers, etcd)
    pods = _pods(options, config.name, etcd, threads=config.threads, chunk_timeout=config.chunk_timeout)
    resources = {"cpu": options.cpu, "memory": options.memory}
    if gpus := options.gpus if options.gpus is not None else int(config.device.startswith("cuda")):
        resources["nvidia.com/gpu"] = str(gpus)
    has_coordinator = config.dispatch == "coordinator"
    return _manifests(
        pods,
        0 if etcd else options.etcd_members,
        trainers=trainers,
        several=trainers > 1,
        pservers=config.pservers,
        trainer=pods.role("trainer", job, resources),
        pserver=pods.role("pserver", job, resources),
        coordinator=pods.role("coordinator", job, SMALL) if has_coordinator else "",
    )


def _of_script(options: argparse.Namespace, script: Path) -> str:
    for name in ("trainers", "gpus"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name} is for a saved job, and {script} is a script",
                rule="option",
                help='the script says it: num_workers=, resources={"trainer": {"cpu": 2, "memory": 8e9}}',
            )
    try:
        text = script.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{script} cannot be read: {error}", rule="option", help="name a Python script") from error
    check_endpoints(options.etcd)
    pods = _pods(options, script.stem, options.etcd)
    program = [f"/etc/graphft/script/{script.name}", *words(options.args)]
    driver = pods.script(program, {"cpu": options.cpu, "memory": options.memory})
    held = json.dumps({script.name: text}, ensure_ascii=False)
    return _manifests(pods, 0 if options.etcd else options.etcd_members, driver=driver, script=held)


def _manifests(pods: Pods, members: int, **values: object) -> str:
    """Returns all objects, in an order in which they may be made. `members`: of an etcd that is deployed with the job,
    or 0; `values`: of `job.yaml`, those for a job or those for a script."""
    scheme, peers = "https" if pods.tls_secret else "http", f"{pods.name}-etcd-peer"
    names = [f"{pods.name}-etcd-{number}" for number in range(members)]
    none = dict.fromkeys(("trainers", "pservers", "coordinator", "several", "driver"), "")
    own = {
        "name": pods.name,
        "members": members,
        "scheme": scheme,
        "cluster": ",".join(f"{member}={scheme}://{member}.{peers}:2380" for member in names),
        "tls_secret": pods.tls_secret and json.dumps(pods.tls_secret),
        "pull_secret": pods.pull_secret and json.dumps(pods.pull_secret),
    }
    return fill(JOB, {**none, **own, **values})


def _pods(options: argparse.Namespace, name: str, etcd: str, *, threads: int = 1, chunk_timeout: float = 0.0) -> Pods:
    """An etcd that is deployed has one name, of its Service: a client that was given its members' would keep the
    addresses that these had at first."""
    name = options.name or name
    return Pods(
        name=name,
        image=options.image,
        endpoints=etcd or f"{'https' if options.tls_secret else 'http'}://{name}-etcd:2379",
        tls_secret=options.tls_secret,
        env=dict(map(_variable, options.env)),
        env_from_secrets=options.env_from_secret,
        volume=_volume(options.volume) if options.volume else None,
        pull_secret=options.image_pull_secret,
        threads=threads,
        chunk_timeout=chunk_timeout,
    )


def _check(config: JobConfig, options: argparse.Namespace, job: str, trainers: int, etcd: str) -> None:
    """Raises UsageError for what cannot work on a cluster."""
    path = job.removeprefix("file://")
    if not config.ft:
        why, help = f"job {config.name} has no fault tolerance, and a cluster moves pods", "transpile it with ft=True"
    elif path != job and not (options.volume and PurePosixPath(path).is_relative_to(_volume(options.volume)[1])):
        why = f"{job} is on this machine's disk, where pods do not find it"
        help = "give the job a storage on the network, or --volume CLAIM:/PATH with that path"
    elif trainers < 1:
        why = f"{trainers} trainers were asked for, expected at least 1"
        help = "give --trainers; those beyond the job's slots stand by"
    else:
        check_endpoints(etcd)
        check_gpus("--gpus", options.gpus, config)
        return
    raise UsageError(why, rule="kubernetes", help=help)


def _find(options: argparse.Namespace) -> tuple[JobRecord, str]:
    """Returns the job's record, and what its pods find it by. Raises UsageError."""
    from graphft.runtime.coordination.job_files import fetch, is_url, url_of
    from graphft.transpiler import read_record

    if is_url(options.job):
        url = options.job.rstrip("/")
        with tempfile.TemporaryDirectory() as scratch:
            fetch(url, Path(scratch, "job"), whole=False)
            return read_record(Path(scratch, "job")), url
    folder = Path(options.job)
    record = read_record(folder)
    if url := url_of(folder):
        return record, url
    if options.volume:
        return record, posixpath.join(_volume(options.volume)[1], folder.resolve().name)
    raise UsageError(
        f"the job in {folder} has no storage that pods could find it in",
        rule="kubernetes",
        help='transpile it with storage="s3://...", or copy the folder into a volume and give --volume CLAIM:/PATH',
    )


def _variable(text: str) -> tuple[str, str]:
    """Returns name and value of an --env. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"--env is {text!r}, expected NAME=VALUE", rule="option", help="give --env NAME=VALUE")
    return name, value


def _volume(text: str) -> tuple[str, str]:
    """Returns claim and path of a --volume. Raises UsageError."""
    claim, _, path = text.partition(":")
    plain = posixpath.normpath("/" + path.lstrip("/"))
    if not claim or not path.startswith("/") or plain == "/":
        raise UsageError(
            f"--volume is {text!r}, expected CLAIM:/PATH",
            rule="option",
            help="name a PersistentVolumeClaim, and where its pods have it",
        )
    return claim, plain
