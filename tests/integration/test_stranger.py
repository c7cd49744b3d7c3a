"""A process that does not know the run's secret gets nothing of a running job, changes nothing, and costs no memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from graphft import ir
from graphft.runtime.coordination.connect import read_note
from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.protocol.messages import (
    BatchPush,
    Empty,
    Hello,
    Ledger,
    Message,
    Parameters,
    Partials,
    PartialsQuery,
    Pull,
    Push,
    Query,
    Refused,
    decode,
    encode,
)
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, play

pytestmark = pytest.mark.timeout(600)
FLOOD = [bytes(1 << 20)] * 200
"""Of parts smaller than any limit on one of them: ZeroMQ takes a whole message into memory before it hands it over."""

SILENCE_MS, ANSWER_MS = 500, 30_000

NONSENSE: list[Message] = [
    PartialsQuery(0, 0, 99),
    Partials(0, 0, -1),
    Pull(0, 2**40, 0),
    Empty(0, 0, 99, True),
    Ledger(0, 0, [(-9, 9)]),
    BatchPush(0, 0, 0, 0, 1, 0, 1, 0),
    Parameters(0, 0, 0),
]


class Attack:
    """Knows the shards' addresses, the run's id and the programs; but not the secret."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.answers: dict[str, list[Message]] = {}
        self.frames: list[bytes] = []
        self.grown: list[int] = []
        self.secret = ""

    def __call__(self, supervisor: Supervisor) -> None:
        folder, keys = Path(supervisor.job_dir), Keys(self.job.config.name)
        with Etcd(read_note(folder).endpoints.split(",")) as etcd:
            shards = read_view(keys, etcd.range(keys.control).kvs).pservers
            secret = etcd.get(keys.secret)
            assert secret is not None
            self.secret = secret.value.decode()
        run = self.job.run_id
        for shard in shards.values():
            before = psutil.Process(shard.pid).memory_info().rss
            self.talk("no words", shard, None, Hello(run, self.secret, "t"), flood=True)
            self.talk("another secret", shard, (run, self.secret[:-1] + "?"), Hello(run, self.secret, "t"), flood=True)
            self.grown.append(psutil.Process(shard.pid).memory_info().rss - before)
            # Even one who came through the door says hello first.
            self.talk("no hello", shard, (run, self.secret), Hello(run, "guess", "t"))
            self.talk("of the run, but faulty", shard, (run, self.secret), Hello(run, self.secret, "t"), faulty=True)

    def talk(
        self,
        name: str,
        shard: Registration,
        words: tuple[str, str] | None,
        hello: Hello,
        flood: bool = False,
        faulty: bool = False,
    ) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            if words is not None:
                stranger.plain_username, stranger.plain_password = (w.encode() for w in words)
            stranger.connect(shard.address)
            messages = (hello, *(NONSENSE if faulty else (Query(), Pull(0, -1, 0), PartialsQuery(0, 0, 1))))
            for message in messages:
                stranger.send(encode(message))
            stranger.send_multipart([encode(Push(0, 10, 0, 0, 4, True)), bytes(7)])
            stranger.send_multipart([b"junk"])
            if flood:
                stranger.send_multipart([encode(Query()), *FLOOD], copy=False)
            # Whoever is answered gets one answer to each message, however busy the machine; then there is silence.
            due = 0 if flood else len(messages) + 2
            while stranger.poll(SILENCE_MS if due <= 0 else ANSWER_MS):
                header, *frames = stranger.recv_multipart()
                self.answers.setdefault(name, []).append(decode(header))
                self.frames += frames
                due -= 1


def texts(folder: Path) -> dict[str, bytes]:
    """All files of a job but etcd's own, which only its user may read."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and "etcd" not in path.relative_to(folder).parts[:1]:
                found[str(path)] = path.read_bytes()
    return found


@pytest.mark.slow
def test_a_stranger_gets_nothing_and_changes_nothing(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    """A plain ZeroMQ client trained the model; one message of many parts took gigabytes."""
    job = training.job(program, pace=pace.file, lease_ttl=60)
    attack = Attack(job)

    def attack_and_go_on(supervisor: Supervisor) -> None:
        pace.set(Pace.SLOW)  # the job is not to end before
        attack(supervisor)
        pace.set(0)

    played = play(job, folder, [Act(at(8), attack_and_go_on)])
    assert_same_bits(played.state, undisturbed.state)
    assert (played.result.failures, played.result.preemptions) == ({}, {})
    assert played.statuses[-1].generation == 0, "nobody had to go back"
    refusals: list[Any] = attack.answers.pop("no hello")
    faulty = attack.answers.pop("of the run, but faulty")
    assert not attack.answers, "without the words there is no answer at all"
    assert not attack.frames
    assert {(r.code, r.reason, r.generation, r.version) for r in refusals if isinstance(r, Refused)} == {
        (code, "", -1, -1) for code in ("denied", "malformed", "unknown-peer")
    }
    assert all(isinstance(r, Refused) for r in refusals)
    assert len(refusals) == 2 * (1 + 3 + 2)
    assert len(faulty) == 2 * (1 + len(NONSENSE) + 2)
    assert {getattr(a, "code", "") for a in faulty} == {"", "malformed"}
    assert max(attack.grown) < 64 << 20, "of the 800 MB that were sent"
    assert not [name for name, text in texts(folder).items() if attack.secret.encode() in text]
    assert attack.secret not in repr(played.statuses)
