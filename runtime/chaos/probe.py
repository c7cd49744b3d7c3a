"""How far a running job is, asked of the shards themselves many times a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import read_secret
from graphft.runtime.etcd import Etcd, Watch
from graphft.runtime.protocol.messages import Hello, Query, Refused, Welcome
from graphft.runtime.transport import Login, ZmqClient
from graphft.transpiler import Job

ASK_SECONDS = 0.02
"""The resolution of what is measured: two messages of some bytes per shard."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a shard said of itself; `at`: when it arrived, on the monotonic clock."""

    incarnation: str
    generation: int
    version: int
    at: float


class Probe:
    """A peer of all shards that contributes nothing and only asks where they are. For one thread."""

    def __init__(self, job: Job, etcd: Etcd) -> None:
        self.keys = Keys(job.config.name)
        login = Login(job.run_id, read_secret(etcd, self.keys))
        self._hello = Hello(login.run, login.secret, "probe")
        self._watch = Watch(etcd, self.keys.control)
        self._client = ZmqClient("probe", login=login)
        self._connected: dict[int, str] = {}
        self._revision = -1
        self._asked = 0.0
        self.view = JobView()
        self.answers: dict[int, Answer] = {}

    def look(self, seconds: float) -> None:
        """Asks, and takes in what is answered within `seconds`."""
        end = time.monotonic() + seconds
        self._follow()
        if time.monotonic() >= self._asked + ASK_SECONDS:
            self._asked = time.monotonic()
            for shard in self._connected:
                self._client.send(shard, Query())
        while (reply := self._client.receive(max(0.0, end - time.monotonic()))) is not None:
            self._take(reply.shard, reply.message)

    def close(self) -> None:
        self._client.close()
        self._watch.close()

    def _follow(self) -> None:
        if self._watch.revision == self._revision:
            return
        self._revision = self._watch.revision
        self.view = read_view(self.keys, self._watch.snapshot().values())
        for shard in [s for s in self._connected if s not in self.view.pservers]:
            self._client.disconnect(shard)
            del self._connected[shard]
        for shard, record in self.view.pservers.items():
            if self._connected.get(shard) != record.id:
                self._connected[shard] = record.id
                self._client.connect(shard, record.address)
                self._client.send(shard, self._hello)

    def _take(self, shard: int, message: object) -> None:
        if isinstance(message, Refused) and message.code == "unknown-peer":
            self._client.send(shard, self._hello)
        elif isinstance(message, Welcome) and message.incarnation == self._connected.get(shard):
            self.answers[shard] = Answer(message.incarnation, message.generation, message.version, time.monotonic())
