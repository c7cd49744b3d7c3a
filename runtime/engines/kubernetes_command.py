"""`graphft kubernetes JOB`: prints the manifests that run a saved job on Kubernetes.

They are `kubernetes_job.yaml`, filled in, with pods of `kubernetes_pod.yaml`. What else a cluster wants of them is
edited there. Kubernetes' own controllers start processes again: no launcher is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import posixpath
import re
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from graphft.errors import UsageError
from graphft.runtime.coordination.job_files import is_url, publish, url_of
from graphft.runtime.coordination.run_record import check_asked_for
from graphft.runtime.coordination.runs import copy_of, find_run
from graphft.runtime.engines.templates import check_endpoints, fill
from graphft.runtime.process.role_process import EXIT_OK, role_environment
from graphft.transpiler.config import JobConfig
from graphft.transpiler.record import read_record

JOB, POD = (Path(__file__).with_name(f"kubernetes_{name}.yaml") for name in ("job", "pod"))
MAX_NAME = 40
"""Labels have at most 63 characters; a StatefulSet's pods have one with a hash of 11 behind the name and its suffix."""
LEFT = 143
"""Exit status of a role that was asked to go, as of a process that SIGTERM ends: 0 is for a job that is complete."""
STOP_SECONDS = 30
"""A role needs so long to end beyond the step that it is at."""
SMALL = {"cpu": "250m", "memory": "1Gi"}
"""A coordinator takes this."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_ITS_OWN = frozenset(re.findall(r"- \{name: ([A-Z_]+),", POD.read_text(encoding="utf-8")))
_OPTIONS = {"trainer": ["--leave-status", str(LEFT)], "pserver": ["--stay"], "coordinator": ["--stay"]}
_INDEX = {
    "trainer": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
    "pserver": "metadata.labels['apps.kubernetes.io/pod-index']",
}
"""The field of a controller's pod that holds its index."""


def print_manifests(options: argparse.Namespace) -> int:
    """Carries `graphft kubernetes` out. Returns its exit status."""
    job = find_run(options.job)
    folder = copy_of(job) if is_url(job) else Path(job)
    record = read_record(folder)
    job = job if is_url(job) else url_of(folder)
    if not job and options.volume:
        job = posixpath.join(_volume(options.volume)[1], folder.resolve().name)
    if not job:
        raise UsageError(
            f"the job in {folder} has no storage that pods could find it in",
            rule="kubernetes",
            help='transpile it with storage="s3://...", or copy the folder into a volume and give --volume CLAIM:/PATH',
        )
    check_asked_for(record.config, job, "run it by another engine: on Kubernetes no process of the script's is there")
    text = of_job(options, record.config, job)
    if not is_url(options.job) and url_of(folder):
        publish(folder)  # once it is known that its pods could run
    sys.stdout.write(text)
    return EXIT_OK


def of_job(options: argparse.Namespace, config: JobConfig, job: str) -> str:
    """Returns all objects of a saved job, in an order in which they may be made. `job`: what its pods find it by."""
    trainers = config.trainers if options.trainers is None else options.trainers
    etcd = options.etcd or ",".join(config.etcd_endpoints or ())
    _check(config, options, job, trainers, etcd)
    name, scheme = options.name or config.name, "https" if options.tls_secret else "http"
    if not _LABEL.fullmatch(name) or len(name) > MAX_NAME:
        raise UsageError(
            f"{name!r} is no name for objects of Kubernetes",
            rule="kubernetes",
            help=f"give --name: at most {MAX_NAME} small letters, digits and '-', a letter first",
        )
    members = [] if etcd else [f"{name}-etcd-{number}" for number in range(options.etcd_members)]
    # An etcd that is deployed has one name, of its Service: a client that was given its members' would keep the
    # addresses that these had at first.
    endpoints = etcd or f"{scheme}://{name}-etcd:2379"
    claim, mount = map(json.dumps, _volume(options.volume)) if options.volume else ("", "")
    env = {**role_environment(), "OMP_NUM_THREADS": str(config.threads), **dict(map(_variable, options.env))}
    common = {
        "name": name,
        "tls_secret": options.tls_secret and json.dumps(options.tls_secret),
        "image": json.dumps(options.image),
        "env": _entries({"name": name, "value": literal(value)} for name, value in env.items()),
        "env_from": _entries({"secretRef": {"name": name}} for name in options.env_from_secret),
        "claim": claim,
        "mount": mount,
        "grace": math.ceil(config.chunk_timeout) + STOP_SECONDS,
        "patience": math.ceil(config.chunk_timeout / 10) + 2,
    }
    resources = {"cpu": options.cpu, "memory": options.memory}

    def with_gpus(device: str, asked: int | None) -> dict[str, str]:
        gpus = int(device.startswith("cuda")) if asked is None else asked
        return resources | ({"nvidia.com/gpu": str(gpus)} if gpus else {})

    def pod(role: str, resources: dict[str, str]) -> str:
        command = ["graphft", "start", role, "--job", literal(job), "--etcd", literal(endpoints)]
        command += ["--health", "0.0.0.0:8080", *(["--index", "$(POD_INDEX)"] if role in _INDEX else [])]
        limits = {name: amount for name, amount in resources.items() if name != "cpu"}
        own = {
            "role": role,
            "command": json.dumps([*command, *_OPTIONS[role]]),
            "index": _INDEX.get(role, ""),
            "resources": json.dumps({"requests": resources, "limits": limits}),
            "restart": "Never" if role == "trainer" else "Always",
        }
        return fill(POD, {**common, **own})

    own = {
        "members": len(members),
        "scheme": scheme,
        "cluster": ",".join(f"{member}={scheme}://{member}.{name}-etcd-peer:2380" for member in members),
        "trainers": trainers,
        "pservers": config.pservers,
        "trainer": pod("trainer", with_gpus(config.device, options.gpus)),
        "pserver": pod("pserver", with_gpus(config.pserver_device, None)),
        "coordinator": pod("coordinator", SMALL) if config.dispatch == "coordinator" else "",
    }
    return fill(JOB, {**common, **own})


def literal(text: str) -> str:
    """Returns the text as a container's arguments and variables have it: `$(NAME)` is replaced there, and `$$` is a
    `$`."""
    return text.replace("$", "$$")


def _entries(items: Iterable[object]) -> str:
    return "\n".join(f"- {json.dumps(item, ensure_ascii=False)}" for item in items)


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
        return
    raise UsageError(why, rule="kubernetes", help=help)


def _variable(text: str) -> tuple[str, str]:
    """Returns name and value of an --env. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"--env is {text!r}, expected NAME=VALUE", rule="option", help="give --env NAME=VALUE")
    if name in _ITS_OWN:
        raise UsageError(f"--env {name} is set already: each pod has its own", rule="option", help="leave it out")
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
