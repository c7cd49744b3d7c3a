"""The manifests of a job: which controller starts which role again, and when it does not."""

from __future__ import annotations

from collections.abc import Sequence

from graphft.runtime.engines.kubernetes.budgets import at_least_one_there, at_most_one_away
from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object, Resources
from graphft.runtime.engines.kubernetes.etcd import etcd_objects
from graphft.runtime.engines.kubernetes.pods import HEALTH_PORT, LEFT, role_pod
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, EXIT_USAGE

COORDINATOR = Resources("250m", "1Gi")
JOB_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ORDINAL = "metadata.labels['apps.kubernetes.io/pod-index']"


def manifests(job: ClusterJob) -> list[Object]:
    """All objects, in an order in which they may be made."""
    coordinators = [at_most_one_away(job, "coordinator"), _coordinators(job)] if job.coordinators else []
    budget = [at_least_one_there(job, "trainer")] if job.trainers > 1 else []  # a single one could never be drained
    return [
        only_each_other(job),
        *([] if job.etcd else etcd_objects(job)),
        _pserver_service(job),
        at_most_one_away(job, "pserver"),
        _pservers(job),
        *coordinators,
        *budget,
        _trainers(job),
    ]


def only_each_other(job: ClusterJob) -> Object:
    """Nothing between roles is encrypted, and an etcd without TLS asks nobody who they are. Probes come from the node,
    which is always let in."""
    everyone = {"matchLabels": {"app.kubernetes.io/instance": job.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": job.metadata("network"),
        "spec": {
            "podSelector": everyone,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": everyone}]}],
        },
    }


def _pserver_service(job: ClusterJob) -> Object:
    """What a StatefulSet must have. Trainers find pservers in etcd."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": job.metadata("pserver"),
        "spec": {
            "clusterIP": "None",
            "selector": job.labels("pserver"),
            "ports": [{"name": "health", "port": HEALTH_PORT}],
        },
    }


def _pservers(job: ClusterJob) -> Object:
    """One for each shard: the ordinal is the index. A StatefulSet starts again whatever ends, so a pserver of a
    complete job stays, until the StatefulSet is deleted."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": job.metadata("pserver"),
        "spec": {
            "serviceName": f"{job.name}-pserver",
            "replicas": job.pservers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": job.labels("pserver")},
            "template": role_pod(job, "pserver", ORDINAL, job.pserver, ["--stay"]),
        },
    }


def _coordinators(job: ClusterJob) -> Object:
    """One serves, the others stand by."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": job.metadata("coordinator"),
        "spec": {
            "replicas": job.coordinators,
            "selector": {"matchLabels": job.labels("coordinator")},
            "template": role_pod(job, "coordinator", "", COORDINATOR, ["--stay"]),
        },
    }


def _trainers(job: ClusterJob) -> Object:
    """A Job: it ends when the training job does, gives back what its pods held, and is what one waits for. What a
    Deployment would do, start again what has ended for good, it does not.

    A trainer that was asked to leave, or lost its lease, is replaced, and counts as no failure. One that cannot run
    here at all (status 2) ends the Job: no other pod could.
    """
    pod = role_pod(job, "trainer", JOB_INDEX, job.trainer, ["--leave-status", str(LEFT)])
    return indexed_job(job, "trainer", job.trainers, pod, (EXIT_LEASE_LOST, LEFT))


def indexed_job(job: ClusterJob, component: str, count: int, pod: Object, no_failures: Sequence[int]) -> Object:
    """So many pods that end. An eviction is no failure of theirs, and neither are the exit statuses `no_failures`."""
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [evicted, _ended_with("Ignore", *no_failures), _ended_with("FailJob", EXIT_USAGE)]
    pod["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job.metadata(component),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": job.max_failures,
            "podFailurePolicy": {"rules": rules},
            "template": pod,
        },
    }


def _ended_with(action: str, *statuses: int) -> Object:
    """The empty list is for the schemas of older versions, which require it."""
    return {"action": action, "onExitCodes": {"operator": "In", "values": [*statuses]}, "onPodConditions": []}
