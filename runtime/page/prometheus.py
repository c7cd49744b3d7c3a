"""`/metrics`: what the page shows, for Prometheus. Names and labels are stable: dashboards are made of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphft.errors import plain_text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("not begun", "starting", "running", "idle", "stopped", "complete", "failed", "unknown")

Labels = dict[str, str]
Samples = Iterable[tuple[Labels, Any]]
"""A value that is None is left out."""


def metrics_of(documents: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of these jobs, each with the label `job`, by which they differ."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Jobs(documents))
    return generate_latest(registry)


class _Jobs(Collector):
    def __init__(self, documents: Sequence[Mapping[str, Any]]) -> None:
        self._documents = documents

    def collect(self) -> Iterator[Metric]:
        for name, help, samples in (*_JOB, *_PROCESSES):
            counts = name.endswith("_total")
            found = [
                ({"job": str(document.get("job", ""))} | labels, value)
                for document in self._documents
                for labels, value in samples(document)
                if value is not None
            ]
            if not found:
                continue
            family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, help, labels=list(found[0][0]))
            for labels, value in found:
                family.add_metric([plain_text(label) for label in labels.values()], float(value))
            yield family


def _one(*path: str) -> Any:
    def samples(document: Mapping[str, Any]) -> Samples:
        value: Any = document
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return [({}, value)]

    return samples


def _each(group: str, label: str, key: str, *path: str) -> Any:
    """Of each entry of a list: its value at `path`, labelled with what it has at `key`."""

    def samples(document: Mapping[str, Any]) -> Samples:
        for entry in document.get(group) or ():
            (_, value), *_ = _one(*path)(entry)
            yield {label: str(entry[key])}, value

    return samples


def _by_name(label: str, *path: str) -> Any:
    """Of each name in a mapping at `path`."""

    def samples(document: Mapping[str, Any]) -> Samples:
        (_, found), *_ = _one(*path)(document)
        return [({label: name}, value) for name, value in (found or {}).items()]

    return samples


def _count(group: str) -> Any:
    return lambda document: [({}, len(document[group]) if group in document else None)]


def _state(document: Mapping[str, Any]) -> Samples:
    return [({"state": state}, float(document.get("state") == state)) for state in STATES]


def _slots_held(document: Mapping[str, Any]) -> Samples:
    return [({}, sum(bool(slot["trainer"]) for slot in document["slots"]) if "slots" in document else None)]


def _checkpoint_age(document: Mapping[str, Any]) -> Samples:
    at = (document.get("checkpoint") or {}).get("at")
    return [({}, max(0.0, time.time() - at) if at is not None else None)]


def _trainer_seconds(document: Mapping[str, Any]) -> Samples:
    for trainer in document.get("trainers") or ():
        for what, seconds in trainer["seconds"].items():
            yield {"trainer": trainer["id"], "at": what}, seconds


_JOB: tuple[tuple[str, str, Any], ...] = (
    ("graphft_state", "1 for the state that the job is in", _state),
    ("graphft_step", "Step that all shards have reached", _one("step")),
    ("graphft_job_steps", "Steps that the job will have", _one("total_steps")),
    ("graphft_pass", "Pass that is worked on, from 0", _one("pass")),
    ("graphft_job_passes", "Passes that the job will have", _one("passes")),
    ("graphft_generation", "How often the job has gone back", _one("generation")),
    ("graphft_loss", "Of the newest step", _one("loss")),
    ("graphft_metric", "Of the newest step, by name", _by_name("name", "metrics")),
    ("graphft_samples_per_second", "Of all trainers, of late", _one("samples_per_second")),
    ("graphft_steps_per_second", "Of the last minute of training", _one("time", "steps_per_second")),
    ("graphft_seconds_left", "Until the last step, at that pace", _one("time", "seconds_left")),
    ("graphft_time_seconds_total", "Where the run's time went", _by_name("category", "time", "seconds")),
    ("graphft_goodput_ratio", "Part of the run's time in which new steps were made", _one("time", "goodput")),
    ("graphft_skipped_steps", "Steps that were left out as not finite", _one("skipped_steps")),
    ("graphft_discarded_batches", "Batches that were discarded", _one("discarded")),
    ("graphft_trainers", "Trainers that are registered", _count("trainers")),
    ("graphft_pservers", "Pservers that are registered", _count("shards")),
    ("graphft_slots", "Slots (logical trainers) of the job", _count("slots")),
    ("graphft_slots_held", "Slots that a trainer holds", _slots_held),
    ("graphft_queue_chunks", "Chunks of the pass by state", _by_name("state", "queue")),
    ("graphft_validation_step", "Step of the newest validation", _one("validated", "step")),
    ("graphft_validation", "What it came to", _by_name("name", "validated", "means")),
    ("graphft_checkpoint_step", "Step of the newest checkpoint", _one("checkpoint", "step")),
    ("graphft_checkpoint_age_seconds", "Since it was made", _checkpoint_age),
    ("graphft_checkpoint_bytes", "Of its own files", _one("checkpoint", "bytes")),
)
_PROCESSES: tuple[tuple[str, str, Any], ...] = (
    ("graphft_trainer_step", "Step that a trainer is at", _each("trainers", "trainer", "id", "step")),
    (
        "graphft_trainer_samples_per_second",
        "Of a trainer, of late",
        _each("trainers", "trainer", "id", "samples_per_second"),
    ),
    ("graphft_trainer_straggles", "1 if the others wait for it", _each("trainers", "trainer", "id", "straggler")),
    ("graphft_trainer_seconds_total", "Where a trainer's time went since it began", _trainer_seconds),
    ("graphft_shard_version", "Version of a shard's parameters", _each("shards", "shard", "shard", "version")),
    (
        "graphft_shard_updates_per_second",
        "Of a shard's parameters, of late",
        _each("shards", "shard", "shard", "per_second"),
    ),
    (
        "graphft_shard_staleness_mean",
        "Async: versions that gradients were behind",
        _each("shards", "shard", "shard", "staleness_mean"),
    ),
    (
        "graphft_shard_staleness_max",
        "Async: versions that a gradient was behind at most",
        _each("shards", "shard", "shard", "staleness_max"),
    ),
)
