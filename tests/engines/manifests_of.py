"""The manifests of a job, by the options of `graphft kubernetes`."""

from __future__ import annotations

import argparse
from typing import Any

from graphft.runtime.engines.kubernetes.command import add_parser, of_job
from graphft.transpiler import Job

PLAIN = ("--image", "registry.example/graphft:1")


def text_of(job: Job, url: str, *arguments: str) -> str:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return of_job(parser.parse_args(["kubernetes", url, *PLAIN, *arguments]), job.config, url)


def manifests_of(job: Job, url: str, *arguments: str) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all(text_of(job, url, *arguments)))
