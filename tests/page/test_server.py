"""A page over HTTP: who may ask for what, and what a job that ends or is out of reach makes of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.records import Event
from graphft.runtime.page import job_page
from graphft.runtime.page import server as server_module
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.server import PageServer
from graphft.runtime.process.threads import side_by_side
from tests.page.plays import Job, status
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
    """DNS rebinding: a web page elsewhere has its own name point to 127.0.0.1."""
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
