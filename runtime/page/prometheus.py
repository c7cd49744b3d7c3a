"""`/metrics`: what the page shows, for Prometheus. Names and labels are stable: dashboards are made of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphft.errors import plain_text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("not begun", "starting", "running", "idle", "stopped", "complete", "failed", "unknown")

METRICS = (
    ("graphft_state", "1 for the state that the job is in", "states.{state}"),
    ("graphft_step", "Step that all shards have reached", "step"),
    ("graphft_job_steps", "Steps that the job will have", "total_steps"),
    ("graphft_epoch", "Epoch that is worked on, from 0", "epoch"),
    ("graphft_job_epochs", "Epochs that the job will have", "epochs"),
    ("graphft_generation", "How often the job has gone back", "generation"),
    ("graphft_loss", "Of the newest step", "loss"),
    ("graphft_metric", "Of the newest step, by name", "metrics.{name}"),
    ("graphft_samples_per_second", "Of all trainers, of late", "samples_per_second"),
    ("graphft_steps_per_second", "Of the last minute of training", "time.steps_per_second"),
    ("graphft_seconds_left", "Until the last step, at that pace", "time.seconds_left"),
    ("graphft_time_seconds_total", "Where the run's time went", "time.seconds.{category}"),
    ("graphft_goodput_ratio", "Part of the run's time in which new steps were made", "time.goodput"),
    ("graphft_skipped_steps", "Steps that were skipped as not finite", "skipped_steps"),
    ("graphft_discarded_batches", "Batches that were discarded", "discarded"),
    ("graphft_trainers", "Trainers that are registered", "counts.trainers"),
    ("graphft_pservers", "Pservers that are registered", "counts.shards"),
    ("graphft_slots", "Slots (logical trainers) of the job", "counts.slots"),
    ("graphft_slots_held", "Slots that a trainer holds", "counts.held"),
    ("graphft_queue_chunks", "Chunks of the epoch by state", "queue.{state}"),
    ("graphft_validation_step", "Step of the newest validation", "validated.step"),
    ("graphft_validation", "Its means, by name", "validated.means.{name}"),
    ("graphft_checkpoint_step", "Step of the newest checkpoint", "checkpoint.step"),
    ("graphft_checkpoint_age_seconds", "Since it was made", "checkpoint.age"),
    ("graphft_checkpoint_bytes", "Of its own files", "checkpoint.bytes"),
    ("graphft_trainer_step", "Step that a trainer is at", "trainers.[trainer=id].step"),
    ("graphft_trainer_samples_per_second", "Of a trainer, of late", "trainers.[trainer=id].samples_per_second"),
    ("graphft_trainer_straggles", "1 if the others wait for it", "trainers.[trainer=id].straggler"),
    ("graphft_trainer_seconds_total", "Where a trainer's time went", "trainers.[trainer=id].seconds.{at}"),
    ("graphft_shard_version", "Version of a shard's parameters", "shards.[shard=shard].version"),
    ("graphft_shard_updates_per_second", "Of a shard's parameters, of late", "shards.[shard=shard].per_second"),
    ("graphft_shard_staleness_mean", "Async: versions behind", "shards.[shard=shard].staleness_mean"),
    ("graphft_shard_staleness_max", "Async: versions behind at most", "shards.[shard=shard].staleness_max"),
)
"""Name, help, and where the document has the value: `{label}` stands for each name of a mapping, `[label=key]` for each
entry of a list, which is labelled with what it has at `key`. What is not known is left out."""


def metrics_of(document: Mapping[str, Any]) -> bytes:
    """Returns the text of this job."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Job(_with_counts(document)))
    return generate_latest(registry)


class _Job(Collector):
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        job = {"job": str(self._document.get("job", ""))}
        for name, help, path in METRICS:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            found = list(_values(self._document, path.split("."), job))
            if found:
                family = kind(name, help, labels=list(found[0][0]))
                for labels, value in found:
                    family.add_metric([plain_text(label) for label in labels.values()], float(value))
                yield family


def _values(value: Any, path: Sequence[str], labels: dict[str, str]) -> Iterator[tuple[dict[str, str], Any]]:
    if value is None:
        return
    if not path:
        yield labels, value
    elif path[0].startswith("{"):
        for name, inner in value.items():
            yield from _values(inner, path[1:], {**labels, path[0][1:-1]: name})
    elif path[0].startswith("["):
        label, _, key = path[0][1:-1].partition("=")
        for inner in value:
            yield from _values(inner, path[1:], {**labels, label: str(inner[key])})
    else:
        yield from _values(value.get(path[0]), path[1:], labels)


def _with_counts(document: Mapping[str, Any]) -> dict[str, Any]:
    groups = ("trainers", "shards", "slots")
    counts = {group: len(document[group]) for group in groups if document.get(group) is not None}
    if "slots" in document:
        counts["held"] = sum(bool(slot["trainer"]) for slot in document["slots"])
    checkpoint = dict(document.get("checkpoint") or {})
    if checkpoint.get("at") is not None:
        checkpoint["age"] = max(0.0, time.time() - checkpoint["at"])
    states = {state: document.get("state") == state for state in STATES}
    return {**document, "counts": counts, "checkpoint": checkpoint, "states": states}
