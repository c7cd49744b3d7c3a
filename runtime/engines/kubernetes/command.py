"""`graphft kubernetes`: the manifests of a job, on stdout."""

from __future__ import annotations

import argparse
import posixpath
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError
from graphft.runtime.engines.saved_job import check_gpus, tell_idle
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object
    from graphft.transpiler import JobConfig, JobRecord


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kubernetes", help="print the manifests that run a saved job on Kubernetes")
    add = parser.add_argument
    add("job", help="the URL of the job's storage, or its folder; or a Python script, with a graphft.Trainer say")
    add("--image", required=True, help="with graphft and what the job's data need")
    add("--name", default="", help="of the objects (default: the job's, as Kubernetes allows it)")
    add("--namespace", default="", help="(default: the one that kubectl uses)")
    add("--trainers", type=int, metavar="N", help="pods (default: what the job says)")
    add("--coordinators", type=int, metavar="N", help='with dispatch "coordinator" (default: 2)')
    add("--etcd", default="", metavar="ENDPOINTS", help="host:port[,host:port...] of an etcd that runs already")
    add("--etcd-members", type=int, metavar="N", help="of the etcd that is deployed without --etcd (default: 3)")
    add("--etcd-image", default="", metavar="IMAGE", help="etcd 3.5.6 or later")
    add("--etcd-storage", default="", metavar="SIZE", help="disk of a member (default: 4Gi)")
    add("--storage-class", default="", metavar="NAME", help="of these disks (default: the cluster's)")
    add("--tls-secret", default="", metavar="NAME", help="Secret with ca.crt, tls.crt and tls.key for etcd")
    add("--cpu", default="1", help="of a trainer; of a script's own pod (default: 1)")
    add("--memory", default="4Gi", help="of the same, at most (default: 4Gi)")
    add("--gpus", type=int, metavar="N", help='of a trainer and a pserver (default: 1 with device "cuda", else 0)')
    add("--gpu-resource", metavar="NAME", help="(default: nvidia.com/gpu)")
    add("--pserver-cpu", metavar="CPU", help="(default: 1)")
    add("--pserver-memory", metavar="SIZE", help="at most (default: 4Gi)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for every role; may be repeated")
    add("--env-from-secret", action="append", default=[], metavar="NAME", help="its keys are variables; repeatable")
    add("--volume", default="", metavar="CLAIM:/PATH", help="a claim that all pods mount, for a job without a storage")
    add("--image-pull-secret", default="", metavar="NAME", help="for --image and --etcd-image")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    add("--max-failures", type=int, default=20, metavar="N", help="of trainers, or of a script, in all (default: 20)")
    parser.set_defaults(command=print_manifests)


def print_manifests(options: argparse.Namespace) -> int:
    from graphft.runtime.coordination.wanted_passes import check_asked_for
    from graphft.runtime.engines.kubernetes.cluster_job import check
    from graphft.runtime.engines.kubernetes.manifests import manifests
    from graphft.runtime.engines.kubernetes.options import check_options
    from graphft.runtime.engines.kubernetes.yaml_text import to_yaml

    if options.job.endswith(".py"):
        sys.stdout.write(to_yaml(_of_script(options)))
        return EXIT_OK
    if options.args:
        raise UsageError("--args is for a script", rule="option", help="a saved job has none: leave --args out")
    record, job = _find(options)
    check_asked_for(record.config, job, "print the manifests of that script: graphft kubernetes SCRIPT.py")
    wanted = cluster_job(options, record.config, job)
    check(record.config, wanted)
    check_options(wanted)
    _check_together(options, wanted)
    check_gpus("--gpus", options.gpus, record.config)
    _publish(options)
    tell_idle(options.job, record)
    sys.stdout.write(to_yaml(manifests(wanted)))
    return EXIT_OK


def _of_script(options: argparse.Namespace) -> list[Object]:
    from graphft.runtime.engines.kubernetes.cluster_job import check_cluster
    from graphft.runtime.engines.kubernetes.driver import driver_manifests
    from graphft.runtime.engines.kubernetes.options import check_options
    from graphft.runtime.engines.script_arguments import words

    script = Path(options.job)
    for name in ("trainers", "coordinators", "gpus", "gpu_resource", "pserver_cpu", "pserver_memory"):
        if getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} is for a saved job, and {script} is a script",
                rule="option",
                help='the script says it: num_workers=, pservers=, resources={"trainer": {"cpu": 2, "memory": 8e9}}',
            )
    wanted = _driver(options)
    check_cluster(wanted)
    check_options(wanted)
    _check_together(options, wanted)
    return driver_manifests(wanted, script, words(options.args))


def _check_together(options: argparse.Namespace, job: ClusterJob) -> None:
    """Raises UsageError for options that would do nothing, or contradict each other."""
    for name in ("etcd_members", "etcd_image", "etcd_storage", "storage_class"):
        if job.etcd and getattr(options, name) not in (None, ""):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} is of an etcd that is deployed, and there is one at {job.etcd}",
                rule="option",
                help=f"leave {option} out, or the endpoints (--etcd, etcd_endpoints=)",
            )
    if options.gpu_resource is not None and not job.trainer.gpus:
        raise UsageError(
            f"--gpu-resource is {options.gpu_resource!r}, and no GPU is asked for",
            rule="option",
            help="give --gpus, too; or leave --gpu-resource out",
        )
    if job.tls_secret and "http://" in job.etcd:
        raise UsageError(
            f"--tls-secret is given, and etcd at {job.etcd} would be asked without TLS",
            rule="option",
            help="write https://, or leave --tls-secret out",
        )


def _find(options: argparse.Namespace) -> tuple[JobRecord, str]:
    """The job's record, and what its pods find it by. Raises UsageError."""
    from graphft.runtime.coordination.job_storage import fetch, is_url, storage_of
    from graphft.runtime.engines.kubernetes.options import volume
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
        return record, posixpath.join(volume(options.volume)[1], folder.resolve().name)
    raise UsageError(
        f"the job in {folder} has no storage that pods could find it in",
        rule="kubernetes",
        help='transpile it with storage="s3://...", or copy the folder into a volume and give --volume CLAIM:/PATH',
    )


def _publish(options: argparse.Namespace) -> None:
    """A folder's job, to the storage in which its pods look for it: once it is known that they could run."""
    from graphft.runtime.coordination.job_storage import is_url, publish, storage_of

    if not is_url(options.job) and storage_of(Path(options.job)):
        publish(Path(options.job))


def cluster_job(options: argparse.Namespace, config: JobConfig, job: str) -> ClusterJob:
    from graphft.runtime.engines.kubernetes.cluster_job import GPU, ClusterJob, Resources, object_name

    gpus = options.gpus if options.gpus is not None else int(config.device.startswith("cuda"))
    coordinators = 2 if options.coordinators is None else options.coordinators
    gpu = GPU if options.gpu_resource is None else options.gpu_resource
    pserver = options.pserver_cpu or "1", options.pserver_memory or "4Gi"
    return ClusterJob(
        name=options.name or object_name(config.name),
        job=job,
        trainers=config.trainers if options.trainers is None else options.trainers,
        pservers=config.pservers,
        coordinators=coordinators if config.dispatch == "coordinator" else min(coordinators, 0),
        threads=config.threads,
        chunk_timeout=config.chunk_timeout,
        trainer=Resources(options.cpu, options.memory, gpus, gpu),
        pserver=Resources(*pserver, gpus, gpu),
        etcd=options.etcd or ",".join(config.etcd_endpoints or ()),
        **_asked_for(options),
    )


def _driver(options: argparse.Namespace) -> ClusterJob:
    """A script's own pod; it says itself what its job is."""
    from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Resources, object_name

    own = Resources(options.cpu, options.memory)
    return ClusterJob(
        name=options.name or object_name(Path(options.job).stem),
        job="",
        trainers=1,
        pservers=1,
        coordinators=0,
        threads=1,
        chunk_timeout=0.0,
        trainer=own,
        pserver=own,
        etcd=options.etcd,
        **_asked_for(options),
    )


def _asked_for(options: argparse.Namespace) -> dict[str, Any]:
    """Of the cluster."""
    from graphft.runtime.engines.kubernetes.options import variable, volume

    return {
        "image": options.image,
        "namespace": options.namespace,
        "etcd_members": 3 if options.etcd_members is None else options.etcd_members,
        "etcd_image": options.etcd_image,
        "etcd_storage": options.etcd_storage or "4Gi",
        "storage_class": options.storage_class,
        "tls_secret": options.tls_secret,
        "env": [variable(text) for text in options.env],
        "env_from_secrets": options.env_from_secret,
        "volume": volume(options.volume) if options.volume else None,
        "pull_secret": options.image_pull_secret,
        "max_failures": options.max_failures,
    }
