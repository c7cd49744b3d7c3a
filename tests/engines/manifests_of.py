"""The manifests of a job, by the options of `graphft kubernetes`."""

from __future__ import annotations

import argparse
from typing import Any

from graphft.runtime.engines.kubernetes.cluster_job import ClusterJob, check
from graphft.runtime.engines.kubernetes.command import add_parser, cluster_job
from graphft.runtime.engines.kubernetes.manifests import manifests
from graphft.transpiler import Job

PLAIN = ("--image", "registry.example/graphft:1")


def wanted(job: Job, url: str, *arguments: str) -> ClusterJob:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return cluster_job(parser.parse_args(["kubernetes", url, *PLAIN, *arguments]), job.config, url)


def manifests_of(job: Job, url: str, *arguments: str) -> list[dict[str, Any]]:
    made = wanted(job, url, *arguments)
    check(job.config, made)
    return manifests(made)
