"""How many pods may be away because somebody wants their node: a drain waits for the rest."""

from __future__ import annotations

from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, Object


def at_most_one_away(job: ClusterJob, component: str) -> Object:
    return _budget(job, component, {"maxUnavailable": 1})


def at_least_one_there(job: ClusterJob, component: str) -> Object:
    """Of a Job's pods: for these a budget can only say how many must stay."""
    return _budget(job, component, {"minAvailable": 1})


def _budget(job: ClusterJob, component: str, rule: Object) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": job.metadata(component),
        "spec": {**rule, "selector": {"matchLabels": job.labels(component)}},
    }
