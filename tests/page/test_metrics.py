"""`/metrics`, as Prometheus' own parser reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.server import metrics_of
from graphft.runtime.protocol.time_ledger import CATEGORIES
from tests.page.plays import Job, status


def samples(document: dict[str, object]) -> dict[tuple[str, ...], float]:
    """By name and the labels' values, in the order of the labels' names."""
    found = {}
    for family in text_string_to_metric_families(metrics_of(document).decode()):
        for sample in family.samples:
            found[(sample.name, *(value for _, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_a_running_job() -> None:
    found = samples(JobPage(Job().look).document())
    assert found["graphft_step", "flights"] == 400
    assert found["graphft_job_steps", "flights"] == 1000
    assert found["graphft_loss", "flights"] == 0.25
    assert found["graphft_metric", "flights", "accuracy"] == 0.9
    assert found["graphft_trainers", "flights"] == 2
    assert found["graphft_slots_held", "flights"] == 3
    assert found["graphft_shard_version", "flights", "1"] == 401
    assert found["graphft_queue_chunks", "flights", "pending"] == 2
    assert found["graphft_validation_step", "flights"] == 300
    assert found["graphft_validation", "flights", "auc"] == 0.75
    assert found["graphft_state", "flights", "running"] == 1
    assert found["graphft_trainer_seconds_total", "computing", "flights", "0-aa"] == 40
    assert found["graphft_checkpoint_step", "flights"] == 300
    spent = {c: found["graphft_time_seconds_total", c, "flights"] for c in CATEGORIES}
    assert spent["productive"] >= 80
    assert "graphft_checkpoint_age_seconds" not in {name for name, *_ in found}, "what is not known is left out"


def test_names_that_need_quoting_and_a_job_that_has_not_begun() -> None:
    job = Job()
    job.status = status(7, trainers={'0-"\n\\': {"id": "x", "host": "a", "pid": 1, "step": 7}})
    assert samples(JobPage(job.look).document())["graphft_trainer_step", "flights", '0-"\n\\'] == 7
    found = samples({"job": "saved", "state": "not begun", "step": 0})
    assert found["graphft_state", "saved", "not begun"] == 1
