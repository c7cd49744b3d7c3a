"""A page over HTTP: who may ask for what, what becomes of a job that ends or is out of reach; `/metrics`; curves."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from graphft.errors import GraphftError
from graphft.runtime.coordination.records import Event
from graphft.runtime.page import job_page
from graphft.runtime.page import server as server_module
from graphft.runtime.page.job_page import BUCKETS, Curve, JobPage
from graphft.runtime.page.server import PageServer, metrics_of
from graphft.runtime.process.metric_table import FILE
from graphft.runtime.process.threads import side_by_side
from graphft.runtime.protocol.time_ledger import CATEGORIES
from tests.page.plays import Job, status
from tests.support.metric_rows import write_rows
from tests.support.waiting import until


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def server(job: Job, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(job_page, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(job_page, "LOOK_PART", 1e9)
    served = PageServer(JobPage(job.look))
    yield served
    served.close()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    found = response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}
    connection.close()
    return found


def told(server: PageServer) -> dict[str, Any]:
    return dict(json.loads(ask(server, "/status.json")[1]))


def test_what_is_served(server: PageServer) -> None:
    for path, kind in {"/": "html", "/page.css": "css", "/page.js": "javascript"}.items():
        code, body, headers = ask(server, path)
        assert (code, kind in headers["content-type"]) == (200, True)
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b""), "nothing comes from elsewhere"
        assert b"https://" not in body
        assert b"innerHTML" not in body
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert headers["x-content-type-options"] == "nosniff"
    assert ask(server, "/healthz?x=1")[:2] == (200, b"ok\n")
    assert ask(server, "/metrics")[2]["content-type"].startswith("text/plain; version=0.0.4")


def test_what_is_refused(server: PageServer) -> None:
    for path in ("/nosuch", "/../setup.cfg", "/job/flights", "/job/x/status.json", "//etc/passwd"):
        code, _, headers = ask(server, path)
        assert (code, headers["content-type"][:10]) == (404, "text/plain")
    for method in ("POST", "HEAD", "OPTIONS", "BREW"):
        code, _, headers = ask(server, "/", method)
        assert (code, headers["allow"]) == (405, "GET")
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        client.sendall(b"hello\r\n\r\n")
        assert b"Bad request" in client.makefile("rb").read()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("[::1]:9999", 200),  # an ssh tunnel has a port of its own
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_names_that_point_here(server: PageServer, host: str, code: int) -> None:
    """A web page elsewhere may have its own name point to 127.0.0.1 (DNS rebinding)."""
    found, body, _ = ask(server, "/status.json", Host=host)
    assert found == code
    assert (b"flights" in body) == (code == 200)


def test_the_document(server: PageServer, job: Job) -> None:
    job.events = [Event(1.0, "launcher", "died", "trainer 1 died (killed by SIGKILL)", {"step": 7})]
    found = told(server)
    assert (found["job"], found["state"], found["step"], found["total_steps"]) == ("flights", "running", 400, 1000)
    assert sum(found["time"]["seconds"].values()) == pytest.approx(found["time"]["wall"], rel=0.01)
    assert [slot["trainer"] for slot in found["slots"]] == ["0-aa", "1-bb", "0-aa"]
    assert [shard["version"] for shard in found["shards"]] == [400, 401]
    assert found["queue"] == {"todo": 3, "pending": 2, "done": 5}
    assert found["curve"]["source"] == "looks"
    assert found["curve"]["series"] == {"loss": [0.25], "accuracy": [0.9]}
    (event,) = found["events"]
    assert (event["fault"], event["step"]) == (True, 7)
    assert "cost" not in event, "nothing is known of what it cost"


def test_losses_that_are_no_numbers(server: PageServer, job: Job) -> None:
    job.status = status(pservers={0: {"id": "p0", "host": "a", "pid": 1, "metrics": {"loss": float("nan")}}})
    found = told(server)
    assert found["loss"] is None
    assert b"graphft_loss" in ask(server, "/metrics")[1]


def test_a_job_that_is_out_of_reach_and_ends(server: PageServer, job: Job) -> None:
    assert told(server)["step"] == 400
    job.error = GraphftError("etcd does not answer")
    found = told(server)
    assert (found["error"], found["step"]) == ("etcd does not answer", 400), "what was seen last is shown, and that"
    job.error = ZeroDivisionError("a fault of the page's")
    assert "ZeroDivisionError" in told(server)["error"]
    assert ask(server, "/metrics")[0] == 200
    job.error, job.status = None, status(1000, state="complete", trainers={}, pservers={})
    found = told(server)
    assert (found["state"], found["step"]) == ("complete", 1000)
    assert "error" not in found
    assert found["time"]["mode"] == "over"


def test_all_browsers_share_one_look(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_page, "LOOK_SECONDS", 1e9)
    page = JobPage(job.look)
    side_by_side(lambda _: page.json(), range(20))
    assert job.looks == 1


def test_who_looks_sees_the_end(server: PageServer, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCHED_SECONDS", "LAST_LOOK_SECONDS"):
        monkeypatch.setattr(server_module, name, 120.0)
    told(server)
    until(lambda: server.answered_at > 0)
    shown = threading.Event()

    def end() -> None:
        server.show_end()
        shown.set()

    threading.Thread(target=end).start()
    assert not shown.wait(0.2)

    def seen() -> bool:
        told(server)
        return shown.is_set()

    until(seen)


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


def test_the_table_is_read_on_from_where_it_was_read_to(tmp_path: Path) -> None:
    curve = Curve()
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {}
    write_rows(tmp_path, [2.0], accuracy=0.5)
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {"loss": [2.0], "accuracy": [0.5]}
    write_rows(tmp_path, [1.5, 1.0], 1, accuracy=0.75)
    curve.read(tmp_path)
    curve.read(tmp_path)
    told = curve.to_json()
    assert told["steps"] == [0, 1, 2]
    assert told["series"] == {"loss": [2.0, 1.5, 1.0], "accuracy": [0.5, 0.75, 0.75]}


def test_it_stays_small_and_true() -> None:
    """The mean over all is that of the rows, by their samples, however many steps there are."""
    curve, steps = Curve(), np.arange(100_000)
    for part in np.split(steps, 10):
        curve.add(("loss",), part, 1 + part % 3, part[:, None].astype(float), part.astype(float))
    told = curve.to_json()
    assert BUCKETS / 2 < len(told["steps"]) <= BUCKETS
    assert told["width"] == 256
    assert told["series"]["loss"][0] == pytest.approx(255 / 2, rel=0.01)
    assert told["steps"][-1] == 100_000 // 256 * 256


def test_values_that_are_not_finite_and_files_that_are_no_table(tmp_path: Path) -> None:
    write_rows(tmp_path, [math.nan, math.inf, 4.0])
    curve = Curve()
    curve.read(tmp_path)
    assert curve.to_json()["series"] == {"loss": [None, None, 4.0]}
    (tmp_path / FILE).write_text("[]")
    curve.read(tmp_path)
    assert "cannot be read" in curve.unread


def test_the_step_at_a_time() -> None:
    curve, steps = Curve(), np.arange(10)
    curve.add(("loss",), steps, np.ones(10), np.ones((10, 1)), 100.0 + steps)
    assert curve.step_at(99.0) is None
    assert curve.step_at(104.5) == 4
    assert curve.step_at(1e9) == 9
