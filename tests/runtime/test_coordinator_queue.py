"""An async trainer tells the coordinator of finished tasks in one call, if they gather while another is made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from graphft.ops.context import NO_TERMS
from graphft.plan import Plan
from graphft.runtime.protocol.messages import TASK_CALLS, FinishTasks, RenewTasks, Tasks, TasksSettled
from graphft.runtime.queue import coordinator_queue
from graphft.runtime.queue.chunk_queue import Claim
from graphft.runtime.queue.coordinator_queue import CoordinatorOpenQueue


class SlowClient:
    """Notes calls, and answers the first one when it may."""

    def __init__(self) -> None:
        self.calls: list[TASK_CALLS] = []
        self.called, self.may = threading.Event(), threading.Event()

    def call(self, message: TASK_CALLS, answer: type) -> Tasks | TasksSettled:
        if answer is Tasks:
            return Tasks(99, 0, [(4, 1)])
        self.calls.append(message)
        self.called.set()
        assert self.may.wait(120)
        return TasksSettled(len(self.calls))

    def cast(self, message: TASK_CALLS) -> None:
        self.calls.append(message)


@pytest.fixture
def client() -> Iterator[SlowClient]:
    client = SlowClient()
    yield client
    client.may.set()


@pytest.fixture
def fences() -> list[int]:
    """The revision of each shard's record, now."""
    return [7]


@pytest.fixture
def claims(client: SlowClient, fences: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[CoordinatorOpenQueue]:
    member: Any = SimpleNamespace(id="0-3f2a", config=SimpleNamespace(plan=Plan([1] * 9, slots=1, batch_size=1)))
    pace: Any = SimpleNamespace(pass_index=0, pace=1.0, alive_since=lambda _: True)
    link: Any = client
    claims = CoordinatorOpenQueue(member, link, pace, lambda: [0])
    records = lambda *_: [SimpleNamespace(mod_revision=fence) for fence in fences]  # noqa: E731
    monkeypatch.setattr(coordinator_queue, "shard_generations", records)
    yield claims
    client.may.set()
    claims.close()


def finished(client: SlowClient) -> list[tuple[list[int], list[int]]]:
    """By call: chunks and fences."""
    return [([c for c, _ in m.tasks], m.fences) for m in client.calls if isinstance(m, FinishTasks)]


def test_what_gathers_is_told_together_with_the_fences_of_its_time(
    client: SlowClient, claims: CoordinatorOpenQueue, fences: list[int]
) -> None:
    claims.complete([Claim((0, 0), 1, 1)])
    assert client.called.wait(120)
    for chunk in (1, 2, 3):
        claims.complete([Claim((0, chunk), 1, chunk + 1)])
    fences[0] = 9
    claims.complete([Claim((0, 4), 1, 5)])
    claims.complete([Claim((1, 5), 1, 6)])
    client.may.set()
    claims._background.wait()
    assert finished(client) == [([0], [7]), ([1, 2, 3], [7]), ([4], [9]), ([5], [9])]


def test_a_trainer_says_that_it_holds_nothing(client: SlowClient, claims: CoordinatorOpenQueue) -> None:
    claims.renew([], 0.0)
    assert client.calls == [], "it never was given anything"
    (claim,) = claims.take(NO_TERMS)
    claims.renew([claim], 0.0)
    client.may.set()
    claims.complete([claim])
    claims._background.wait()
    claims.renew([], 0.0)
    assert [call for call in client.calls if isinstance(call, RenewTasks)] == [
        RenewTasks(99, "0-3f2a", [(0, 4, 1, 0)]),
        RenewTasks(99, "0-3f2a", []),
    ]
