"""Serves the page of a job over HTTP on this machine's loopback, to GET alone.

    /                      the page
    /status.json           what it shows
    /metrics               the same for Prometheus
    /healthz               200

Everything comes from here, and the Content-Security-Policy allows nothing else. A request must name this machine as its
host: else a web page elsewhere could have its own name point here and read what only this machine is to see.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphft.errors import UsageError, describe, plain_text
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.process.http_server import REQUEST_SECONDS, BoundedServer

log = logging.getLogger("graphft")

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


LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d*)?|::1")
"""A request may call this machine so. The port may be another one: ssh -L forwards one to this."""
POLL_SECONDS = 0.1
WATCHED_SECONDS, LAST_LOOK_SECONDS = 3.0, 4.0
"""The page is looked at if it was asked for so shortly before the end; then that waits so long to be asked for."""
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Answer = tuple[int, str, bytes]
"""Status, content type, body."""


def answer(page: JobPage, path: str) -> Answer:
    """Answers a request for this path, without its query."""
    name = path.removeprefix("/")
    if name in ("", *_FILES):
        file = name or "page.html"
        return 200, _FILES[file], Path(__file__).with_name(file).read_bytes()
    if name == "healthz":
        return _plain(200, "ok")
    if name == "status.json":
        return 200, "application/json", page.json()
    if name == "metrics":
        return 200, CONTENT_TYPE, metrics_of(page.document())
    return _plain(404, f"there is no {path}, but /, /status.json, /metrics and /healthz")


def _plain(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


class PageServer:
    """Answers from a thread of its own. Raises UsageError if there is no such port here, or it is taken."""

    def __init__(self, page: JobPage, port: int = 0) -> None:
        self.page, self.answered_at = page, float("-inf")
        """`answered_at`: when `status.json` was last asked for by somebody who has got the answer (monotonic)."""
        handler = type("Handler", (_Handler,), {"owner": self})
        try:
            self._server = BoundedServer((LOOPBACK, port), handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"the page cannot be served at {LOOPBACK}:{port}: {error}",
                rule="page",
                help="give another port, or none: a free one is taken then",
            ) from error
        self.port = int(self._server.server_address[1])
        self.url = f"http://{LOOPBACK}:{self.port}/"
        threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), name="page", daemon=True).start()

    def show_end(self) -> None:
        """Waits a moment, so that a page that is open shows how the job ended."""
        now = time.monotonic()
        end = now + LAST_LOOK_SECONDS if now < self.answered_at + WATCHED_SECONDS else now
        while self.answered_at <= now and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: PageServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "graphft", ""

    def do_GET(self) -> None:
        path, asked_at = self.path.partition("?")[0], time.monotonic()
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or _HOST.fullmatch(hosts[0].strip().lower()) is None:
            self._send(_plain(421, "this is served to its own machine alone: ask for 127.0.0.1 or localhost"))
            return
        try:
            found = answer(self.owner.page, path)
        except Exception as error:
            log.warning("%s of the page cannot be answered", path, exc_info=True)
            found = _plain(500, f"{path} cannot be answered: {describe(error)}")
        self._send(found)
        if path.endswith("status.json"):
            self.owner.answered_at = max(asked_at, self.owner.answered_at)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses requests that are none, and methods other than GET."""
        self._send(_plain(405, "GET alone") if code == 501 else _plain(code, message or "no request"))

    def _send(self, answer: Answer) -> None:
        status, kind, body = answer
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), "Allow": "GET", **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A browser asks each second."""
