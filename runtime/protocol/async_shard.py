"""A shard in async mode: applies every batch once, in order of arrival, and answers with its newest parameters.

    shard = AsyncShard(AsyncOptions(shard=0, buckets=(0, 1), run=..., secret=...), incarnation=process_id,
                       generation=generation.number, version=saved_version, ledger=Ledger.load(saved_ledger))
    for effect in shard.step(Received(peer, decode(header), frame), now): carry it out, in order, before the next step()

A batch is applied when all of its buckets on this shard are in, from one trainer and one version of the parameters.
`ApplyBatch`: reduce the payloads into the gradients and run the optimize blocks; the acknowledgement and the new
buckets are effects behind it, so nothing is acknowledged that was not applied. `TakeCheckpoint`: save the state with
`shard.ledger.export()` and `shard.version`; a restart that loads all of them repeats nothing and leaves nothing out.

`max_staleness` bounds how many versions of this shard a gradient may be behind; -1: no bound. One that is too old is
refused (`stale`) with the newest bucket behind the refusal, so that the batch can be computed again.

With `compensate`, `ApplyBatch` says which version the gradient was computed from (`base`), and of which versions copies
are needed from then on (`kept`): those that trainers were sent, and may still push gradients of. A base that is not
kept, or of another generation, is -1, and counted ("uncompensated").

A trainer pushes each bucket of a batch with the version that it computed from (the lowest of this shard's buckets),
waits for BatchAck (`fresh` or not: it is in), and asks `LedgerQuery` which batches of a chunk that it takes over are
in; a range that ends at `ledger.ALL` is the whole chunk. After a new connection: Hello, and push again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphft.runtime.protocol.events import Count, PeerLeft, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import (
    BatchAck,
    BatchPush,
    LedgerQuery,
    Message,
    Parameters,
    Pull,
    Query,
    async_problem,
)
from graphft.runtime.protocol.messages import Ledger as LedgerAnswer
from graphft.runtime.protocol.shard import Shard

BatchKey = tuple[int, int, int]
"""(pass, chunk, batch)"""
HALVES = 4
"""Batches of one trainer that may be half here. Messages overtake each other at most where a test has them do so."""


@dataclass(frozen=True, slots=True)
class AsyncOptions:
    """`batches`: of each chunk, in each of `passes`. `checkpoint_every` counts versions (applied batches); 0: the
    driver decides. `max_peers`: names of trainers that are known at once; above it the first one gives way."""

    shard: int
    buckets: tuple[int, ...]
    batches: Sequence[int]
    passes: int
    run: str = ""
    secret: str = field(default="", repr=False)
    checkpoint_every: int = 0
    max_staleness: int = -1
    compensate: bool = False
    max_peers: int = 256
    skips: bool = False
    """A batch that is not finite is discarded, and counts as applied; else no trainer sends one."""
    values: int = 0
    """How many values each batch reports."""


@dataclass(frozen=True, slots=True)
class ApplyBatch:
    """Apply this gradient now; or, if it is not `finite`, count it without doing so. `staleness`: versions applied
    since the parameters that it was computed from.

    `base`: the version of these parameters, whose copy is kept; -1: it is not, or nothing is compensated. `kept`: the
    versions, besides the newest, whose copies are needed when this is applied.
    """

    pass_index: int
    chunk: int
    batch: int
    samples: int
    payloads: Mapping[int, Any]
    staleness: int
    reason: str
    base: int = -1
    kept: frozenset[int] = frozenset()
    finite: bool = True
    values: tuple[float, ...] = ()


AsyncEffect = Reply | Count | TakeCheckpoint | ApplyBatch
AsyncShardEvent = Received | PeerLeft | Tick


@dataclass(slots=True)
class _Copy:
    """One trainer's copy of a batch, while its buckets come in."""

    version: int
    samples: int
    payloads: dict[int, Any] = field(default_factory=dict)
    finite: bool = True
    values: tuple[float, ...] = ()


class AsyncShard(Shard):
    """See the module's text. `step` is the only method that changes it. `version` counts the batches applied."""

    KIND = "an async shard"
    options: AsyncOptions

    def __init__(
        self,
        options: AsyncOptions,
        *,
        incarnation: str,
        generation: int,
        version: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(options, incarnation=incarnation, generation=generation, version=version)
        self.ledger = ledger if ledger is not None else Ledger()
        self.copies: dict[tuple[BatchKey, str], _Copy] = {}
        """Half-arrived batches, by batch and peer: gradients of two trainers are never mixed."""
        self.retained = RetainedVersions()
        self.staleness = Staleness()

    def step(self, event: AsyncShardEvent, now: float) -> list[AsyncEffect]:
        """Takes in one event; returns what is to be done, in order. Raises IllegalTransition."""
        self.story.now = now
        if isinstance(event, Received):
            return self.received(event)
        if isinstance(event, PeerLeft):
            self._leave(event.peer)
            self.story.tell(f"{event.peer} has left", f"peer {event.peer}")
        elif not isinstance(event, Tick):
            self.story.illegal(f"an async shard knows no event {event!r}")
        return []

    def problem(self, message: Message, payload: Any) -> str:
        return async_problem(self.options, message, payload)

    def introduced(self, peer: str, forgotten: list[str], gone: set[str]) -> None:
        """It begins anew: what it pushed before comes again, perhaps from other parameters."""
        for one in (peer, *forgotten):
            self._drop_copies(one)
        for name in gone:
            self.retained.left(name)

    def _leave(self, peer: str) -> None:
        self._drop_copies(peer)
        if peer in self.peers:
            self.retained.left(self.peers.name(peer))
            self.peers.leave(peer)

    def _drop_copies(self, peer: str) -> None:
        self.copies = {key: copy for key, copy in self.copies.items() if key[1] != peer}

    def _pull(self, peer: str, message: Pull, payload: Any) -> list[AsyncEffect]:
        return [self._bucket(peer, message.bucket)]

    def _ledger_query(self, peer: str, message: LedgerQuery, payload: Any) -> list[AsyncEffect]:
        ranges = self.ledger.ranges(message.pass_index, message.chunk)
        return [Reply(peer, LedgerAnswer(message.pass_index, message.chunk, ranges))]

    def _push(self, peer: str, message: BatchPush, payload: Any) -> list[AsyncEffect]:
        if message.generation != self.generation:
            code = "stale-generation" if message.generation < self.generation else "not-ready"
            return self.refuse(peer, code, f"this is generation {self.generation}, not {message.generation}")
        if not -1 <= message.version <= self.version:
            return self.refuse(peer, "malformed", f"a gradient of version {message.version}, this is {self.version}")
        key = (message.pass_index, message.chunk, message.batch)
        if self.ledger.has(*key):
            reason = self._tell(f"{_name(key)} from {peer} is applied already", key, peer)
            return [
                Count("duplicate-batch", reason),
                self._ack(peer, key, fresh=False),
                self._bucket(peer, message.bucket),
            ]
        self.retained.pushed(self.peers.name(peer), message.version)
        staleness = self.version - max(0, message.version)
        if 0 <= self.options.max_staleness < staleness:
            self.copies.pop((key, peer), None)
            reason = self._tell(f"{_name(key)} from {peer} is {staleness} versions behind", key, peer)
            return [*self.refuse(peer, "stale", reason), self._bucket(peer, message.bucket)]
        return self._keep(peer, key, message, payload)

    def _keep(self, peer: str, key: BatchKey, message: BatchPush, payload: Any) -> list[AsyncEffect]:
        copy = self.copies.get((key, peer))
        effects: list[AsyncEffect] = []
        if copy is not None and (copy.version, copy.samples) != (message.version, message.samples):
            effects.append(Count("replaced-batch", self._tell(f"{_name(key)} from {peer} comes anew", key, peer)))
            copy = None
        if copy is None:
            copy = self.copies[key, peer] = _Copy(message.version, message.samples)
            effects += self._drop_oldest(peer)
        if message.bucket in copy.payloads:
            reason = self._tell(f"bucket {message.bucket} of {_name(key)} from {peer} is here already", key, peer)
            return [*effects, Count("duplicate-push", reason)]
        copy.payloads[message.bucket], copy.finite = payload, copy.finite and message.finite
        copy.values = message.values or copy.values
        self._tell(f"kept bucket {message.bucket} of {_name(key)} from {peer}", key, peer)
        if len(copy.payloads) < len(self.options.buckets):
            return effects
        return [*effects, *self._apply(peer, key, copy, message.batches)]

    def _drop_oldest(self, peer: str) -> list[AsyncEffect]:
        """A trainer works on one batch after the other: of what it left half-sent, a few batches are kept."""
        begun = [item for item in self.copies if item[1] == peer]
        effects: list[AsyncEffect] = []
        for item in begun[:-HALVES]:
            del self.copies[item]
            effects.append(
                Count(
                    "dropped-batch",
                    self._tell(
                        f"half of {_name(item[0])} from {peer} is dropped: it has begun {HALVES} others", item[0], peer
                    ),
                )
            )
        return effects

    def _apply(self, peer: str, key: BatchKey, copy: _Copy, batches: int) -> list[AsyncEffect]:
        if not self.ledger.add(*key, batches):
            self.story.illegal(f"{_name(key)} is applied twice", _name(key))
        staleness = max(0, self.version - max(0, copy.version))
        self.staleness.add(staleness)
        self.version += 1
        left = sorted(other for batch, other in self.copies if batch == key and other != peer)
        self.copies = {k: c for k, c in self.copies.items() if k[0] != key}
        reason = self._tell(f"{_name(key)} from {peer} is complete: version {self.version}", key, peer)
        base = copy.version if self.retained.has(self.peers.name(peer), copy.version) else -1
        effects: list[AsyncEffect] = [
            ApplyBatch(
                *key,
                copy.samples,
                {b: copy.payloads[b] for b in self.options.buckets},
                staleness,
                reason,
                base,
                self.retained.all(),
                copy.finite,
                copy.values,
            )
        ]
        if self.options.compensate and base < 0:
            effects.append(Count("uncompensated", f"{_name(key)} from {peer}: no copy of version {copy.version}"))
        effects += [Count("duplicate-push", f"half of {_name(key)} from {other} is dropped") for other in left]
        effects.append(self._ack(peer, key, fresh=True))
        effects += [self._bucket(peer, b) for b in self.options.buckets]
        every = self.options.checkpoint_every
        if every and self.version % every == 0:
            effects.append(TakeCheckpoint(self.version, f"every {every} versions"))
        return effects

    def _ack(self, peer: str, key: BatchKey, fresh: bool) -> Reply:
        return Reply(peer, BatchAck(*key, self.version, fresh))

    def _bucket(self, peer: str, bucket: int) -> Reply:
        if self.options.compensate:
            self.retained.sent(self.peers.name(peer), self.version)
        return Reply(peer, Parameters(self.generation, self.version, bucket), "current")

    def _tell(self, text: str, key: BatchKey, peer: str) -> str:
        return self.story.tell(text, _name(key), f"peer {peer}")

    def check_invariants(self) -> None:
        """Raises IllegalTransition when the state contradicts itself. For tests, after each event."""
        for (key, peer), copy in self.copies.items():
            if self.ledger.has(*key):
                self.story.illegal(f"{_name(key)} is applied, and a copy from {peer} is kept", _name(key))
            if not 0 < len(copy.payloads) < len(self.options.buckets) or peer not in self.peers:
                self.story.illegal(
                    f"the copy of {_name(key)} from {peer} is no partial copy of a known peer", _name(key)
                )
            if sum(1 for _, other in self.copies if other == peer) > HALVES:
                self.story.illegal(f"more than {HALVES} half batches of {peer} are kept")
        if not set(self.retained.trainers()) <= set(self.peers.names()):
            self.story.illegal("versions are kept for a trainer that is not here")
        if max(self.retained.all(), default=0) > self.version:
            self.story.illegal("somebody was sent a version that is not there yet")

    MESSAGES: ClassVar[dict[type, Callable[[Any, str, Any, Any], list[Any]]]] = {
        Query: Shard.query,
        Pull: _pull,
        LedgerQuery: _ledger_query,
        BatchPush: _push,
    }


def _name(key: BatchKey) -> str:
    return f"batch {key[2]} of chunk {key[1]} in pass {key[0]}"


SHOWN = 16


class Staleness:
    """Counts applied batches by staleness: by how many versions the parameters had moved on since the gradient's."""

    def __init__(self) -> None:
        self.counts = [0] * (SHOWN + 1)
        """Of staleness 0 to 15, and of all above."""
        self.max = self._sum = 0

    def add(self, staleness: int) -> None:
        self.counts[min(staleness, SHOWN)] += 1
        self.max = max(self.max, staleness)
        self._sum += staleness

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self.counts))


LIMIT = 6
"""Versions per trainer. One that computes has two: what it computes from, and what it was sent meanwhile."""


class RetainedVersions:
    """By trainer, the versions that it was sent and has not gone beyond, lowest first: the lowest, which it most likely
    computes from, and the newest, which it will go on to; `LIMIT` of them at most."""

    def __init__(self) -> None:
        self._sent: dict[str, list[int]] = {}

    def sent(self, trainer: str, version: int) -> None:
        """The trainer may compute from this version from now on."""
        versions = self._sent.setdefault(trainer, [])
        if version not in versions:
            versions.append(version)
            del versions[1 : 1 - LIMIT]

    def pushed(self, trainer: str, version: int) -> None:
        """A gradient of this version came: parameters only get newer, so it computes from no older one any more."""
        self._sent[trainer] = [v for v in self._sent.get(trainer, ()) if v >= version]

    def left(self, trainer: str) -> None:
        self._sent.pop(trainer, None)

    def has(self, trainer: str, version: int) -> bool:
        return version in self._sent.get(trainer, ())

    def trainers(self) -> frozenset[str]:
        return frozenset(self._sent)

    def all(self) -> frozenset[int]:
        """The versions whose copies are needed."""
        return frozenset(v for versions in self._sent.values() for v in versions)
