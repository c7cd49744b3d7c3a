"""`graphft kubernetes`: the manifests of a job, on stdout. What else a cluster wants of them is edited there."""

from __future__ import annotations

import argparse
import json
import posixpath
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.engines.kubernetes.manifests import Pods, deployed_etcd, manifests, object_name
from graphft.runtime.engines.saved_job import check_endpoints, check_gpus, tell_idle, words
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig, JobRecord

SMALL = {"cpu": "250m", "memory": "1Gi"}
"""A coordinator takes this."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kubernetes", help="print the manifests that run a saved job on Kubernetes")
    add = parser.add_argument
    add("job", help="the URL of the job's storage, or its folder; or a Python script, with a graphft.Trainer say")
    add("--image", required=True, help="with graphft and what the job's data need")
    add("--name", default="", help="of the objects (default: the job's, as Kubernetes allows it)")
    add("--trainers", type=int, metavar="N", help="pods (default: what the job says)")
    add("--etcd", default="", metavar="ENDPOINTS", help="host:port[,host:port...] of an etcd that runs already")
    add("--etcd-members", type=int, choices=(1, 3), default=3, help="of an etcd that is deployed (default: 3)")
    add("--tls-secret", default="", metavar="NAME", help="Secret with ca.crt, tls.crt and tls.key for etcd")
    add("--cpu", default="1", help="of a trainer and a pserver; of a script's own pod (default: 1)")
    add("--memory", default="4Gi", help="of the same, at most (default: 4Gi)")
    add("--gpus", type=int, metavar="N", help='of a trainer and a pserver (default: 1 with device "cuda", else 0)')
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for every role; may be repeated")
    add("--env-from-secret", action="append", default=[], metavar="NAME", help="its keys are variables; repeatable")
    add("--volume", default="", metavar="CLAIM:/PATH", help="a claim that all pods mount, for a job without a storage")
    add("--image-pull-secret", default="", metavar="NAME", help="for --image")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    parser.set_defaults(command=print_manifests)


def print_manifests(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.job_storage import is_url, publish, storage_of
    from graphft.runtime.coordination.wanted_passes import check_asked_for

    if options.job.endswith(".py"):
        sys.stdout.write(_of_script(options, Path(options.job)))
        return EXIT_OK
    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    record, job = _find(options)
    check_asked_for(record.config, job, "print the manifests of that script: graphft kubernetes SCRIPT.py")
    text = of_job(options, record.config, job)
    if not is_url(options.job) and storage_of(Path(options.job)):
        publish(Path(options.job))  # once it is known that its pods could run
    tell_idle(options.job, record)
    sys.stdout.write(text)
    return EXIT_OK


def of_job(options: argparse.Namespace, config: JobConfig, job: str) -> str:
    """`job`: what its pods find it by."""
    trainers = config.trainers if options.trainers is None else options.trainers
    _check(config, options, job, trainers)
    etcd = options.etcd or ",".join(config.etcd_endpoints or ())
    pods = _pods(options, config.name, etcd, config)
    resources = {"cpu": options.cpu, "memory": options.memory}
    if gpus := options.gpus if options.gpus is not None else int(config.device.startswith("cuda")):
        resources["nvidia.com/gpu"] = str(gpus)
    has_coordinator = config.dispatch == "coordinator"
    return manifests(
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
    return manifests(pods, 0 if options.etcd else options.etcd_members, driver=driver, script=held)


def _pods(options: argparse.Namespace, name: str, etcd: str, config: JobConfig | None = None) -> Pods:
    name = options.name or object_name(name)
    return Pods(
        name=name,
        image=options.image,
        endpoints=etcd or deployed_etcd(name, bool(options.tls_secret)),
        tls_secret=options.tls_secret,
        env=dict(map(_variable, options.env)),
        env_from_secrets=options.env_from_secret,
        volume=_volume(options.volume) if options.volume else None,
        pull_secret=options.image_pull_secret,
        threads=config.threads if config is not None else 1,
        chunk_timeout=config.chunk_timeout if config is not None else 0.0,
    )


def _check(config: JobConfig, options: argparse.Namespace, job: str, trainers: int) -> None:
    """Raises UsageError for what cannot work on a cluster."""
    if not config.ft:
        raise UsageError(
            f"job {config.name} has no fault tolerance, and a cluster moves pods",
            rule="kubernetes",
            help="transpile it with ft=True",
        )
    path = job.removeprefix("file://")
    if path != job and not (options.volume and PurePosixPath(path).is_relative_to(_volume(options.volume)[1])):
        raise UsageError(
            f"{job} is on this machine's disk, where pods do not find it",
            rule="kubernetes",
            help="give the job a storage on the network, or --volume CLAIM:/PATH with that path",
        )
    if trainers < 1:
        raise UsageError(
            f"{trainers} trainers were asked for, expected at least 1",
            rule="kubernetes",
            help="give --trainers; those beyond the job's slots stand by",
        )
    check_endpoints(options.etcd or ",".join(config.etcd_endpoints or ()))
    check_gpus("--gpus", options.gpus, config)


def _find(options: argparse.Namespace) -> tuple[JobRecord, str]:
    """The job's record, and what its pods find it by. Raises UsageError."""
    from graphft.runtime.coordination.job_storage import fetch, is_url, storage_of
    from graphft.transpiler import read_record

    if is_url(options.job):
        url = options.job.rstrip("/")
        with tempfile.TemporaryDirectory() as scratch:
            return fetch(url, Path(scratch, "job"), whole=False), url
    folder = Path(options.job)
    record = read_record(folder)
    if url := storage_of(folder):
        return record, url
    if options.volume:
        return record, posixpath.join(_volume(options.volume)[1], folder.resolve().name)
    raise UsageError(
        f"the job in {folder} has no storage that pods could find it in",
        rule="kubernetes",
        help='transpile it with storage="s3://...", or copy the folder into a volume and give --volume CLAIM:/PATH',
    )


def _variable(text: str) -> tuple[str, str]:
    """Name and value of an --env. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise UsageError(f"--env is {text!r}, expected NAME=VALUE", rule="option", help="give --env NAME=VALUE")
    return name, value


def _volume(text: str) -> tuple[str, str]:
    """Claim and path of a --volume. Raises UsageError."""
    claim, _, path = text.partition(":")
    plain = posixpath.normpath("/" + path.lstrip("/"))
    if not claim or not path.startswith("/") or plain == "/":
        raise UsageError(
            f"--volume is {text!r}, expected CLAIM:/PATH",
            rule="option",
            help="name a PersistentVolumeClaim, and where its pods have it",
        )
    return claim, plain
