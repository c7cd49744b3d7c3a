"""A real job and its page: trainers are killed, the launcher is killed, and the page tells of it, up to the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphft.runtime.launcher.page_command import FolderLooks
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.time_keeper import read_time
from graphft.transpiler import read_record
from tests.integration.plays import SCRIPT, Pace, Program
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
ROUNDED = 0.02
"""Seconds that a cost may be above the account, which is told with more digits."""
OPTIONS = {"trainers": 2, "pservers": 1, "epochs": 8}


class Page:
    """Of a program that has printed its URL."""

    def __init__(self, program: Program) -> None:
        program.says("page: http://127.0.0.1:")
        found = re.search(r"page: (http://127\.0\.0\.1:\d+/)", program.output)
        assert found is not None
        self.url = found[1]

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return bytes(response.read())

    def told(self) -> dict[str, Any]:
        return dict(json.loads(self.get("status.json")))

    def until(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            found.append(self.told())
            return bool(condition(found[-1]))

        until(holds, 300)
        return found[-1]


def check_time(told: dict[str, Any]) -> None:
    """Its seconds are all of the run's."""
    time = told["time"]
    assert time["wall"] > 0
    assert 0.99 * time["wall"] <= sum(time["seconds"].values()) <= 1.01 * time["wall"]
    assert time["until"] - time["began"] == pytest.approx(time["wall"], abs=0.1)


def goes_on(told: dict[str, Any]) -> bool:
    """Whether both trainers have told where their time went, and what is left is known."""
    trainers = told.get("trainers", ())
    return (
        (told["step"] or 0) >= 6
        and len(trainers) == 2
        and all(trainer.get("seconds", {}).get("data", 0) > 0 for trainer in trainers)
        and len(told["curve"]["series"].get("loss", ())) >= 5
        and bool((told["time"] or {}).get("seconds_left"))
    )


def launch(folder: Path, pace: Pace) -> Program:
    return Program(folder, "-m", "graphft", "launch", "--quiet", "--page", SCRIPT, pace.file, json.dumps(OPTIONS))


@pytest.mark.slow
def test_a_job_that_is_killed_in_parts_and_as_a_whole(folder: Path, pace: Pace) -> None:
    pace.set(0.2)
    first = launch(folder, pace)
    page = Page(first)
    told = page.until(goes_on)
    assert told["state"] == "running"
    assert told["time"]["mode"] == "training"
    assert told["time"]["seconds_left"] > 0
    assert told["curve"]["source"] == "table"
    assert len(told["curve"]["series"]["loss"]) >= 5
    assert all(trainer["seconds"]["data"] > 0 for trainer in told["trainers"]), "reading takes its time here"
    assert told["time"]["seconds"]["data"] > 0
    check_time(told)

    for trainer in told["trainers"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer["pid"], signal.SIGKILL)
    told = page.until(lambda t: [e for e in t["events"] if "cost" in e and t["time"]["mode"] == "training"])
    event = next(e for e in told["events"] if "cost" in e)
    assert re.match(r"trainer [01] died \(killed by SIGKILL", event["text"])
    assert told["time"]["seconds"]["recovering"] > max(0.0, event["cost"] - ROUNDED)
    check_time(told)
    families = text_string_to_metric_families(page.get("metrics").decode())
    samples = {(s.name, s.labels.get("category")): s.value for family in families for s in family.samples}
    assert samples["graphft_step", None] >= 6
    assert samples["graphft_time_seconds_total", "recovering"] > 0

    job_dir = folder / "jobs" / "blobs" / "runs" / "1"
    run = read_record(job_dir).run_id
    until(  # it is written a few seconds later
        lambda: read_time(job_dir, run)["seconds"]["recovering"] > max(0.0, event["cost"] - ROUNDED)
    )
    first.kill()
    pace.set(0)
    second = launch(folder, pace)
    assert second.wait() == 0, second.output
    at_rest = JobPage(FolderLooks(folder / "jobs" / "blobs" / "runs" / "1")).document()
    assert at_rest["state"] == "complete"
    seconds = at_rest["time"]["seconds"]
    assert seconds["idle"] > 0, "the time between the launches, and what the killed one had not written"
    assert seconds["recovering"] > event["cost"] - ROUNDED, "the account goes on"
    assert [e["text"] for e in at_rest["events"]].count("the job was launched") == 2
    assert any("cost" in e for e in at_rest["events"])
    check_time(at_rest)
