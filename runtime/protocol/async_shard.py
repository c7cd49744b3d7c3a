"""A shard in async mode: applies every batch once, in order of arrival, and answers with its newest parameters.

A batch is applied when all of its buckets on this shard are in, from one trainer and one version of the parameters.
The acknowledgement and the new buckets are effects behind `ApplyBatch`, so nothing is acknowledged that was not
applied. `TakeCheckpoint`: save the state with `shard.ledger.export()` and `shard.version`; a restart that loads all of
them repeats and loses nothing.

A gradient that is too stale is refused, with the newest bucket behind the refusal, so that the batch can be computed
again. With `compensate`, copies are kept of the versions that trainers were sent, and may still push gradients of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphft.runtime.protocol.events import (
    ApplyBatch,
    AsyncOptions,
    Count,
    PeerLeft,
    Received,
    Reply,
    TakeCheckpoint,
    Tick,
)
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.machine import Effect
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
"""Batches of one trainer that may be half here."""


@dataclass(slots=True)
class _Copy:
    """One trainer's copy of a batch, while its buckets come in."""

    version: int
    samples: int
    payloads: dict[int, Any] = field(default_factory=dict)
    finite: bool = True
    values: tuple[float, ...] = ()


class AsyncShard(Shard):
    """See the module's text. `version` counts the batches applied."""

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

    def problem(self, message: Message, payload: Any) -> str:
        return async_problem(self.options, message, payload)

    def introduced(self, peer: str, replaced: list[str]) -> None:
        """Drops what it pushed before: it comes again, perhaps from other parameters."""
        for one in (peer, *replaced):
            self._drop_copies(one)

    def left(self, peer: str, name: str) -> None:
        self._drop_copies(peer)
        self.retained.left(name)

    def _tick(self, event: Tick) -> list[Effect]:
        return []

    def _drop_copies(self, peer: str) -> None:
        self.copies = {key: copy for key, copy in self.copies.items() if key[1] != peer}

    def _pull(self, peer: str, message: Pull, payload: Any) -> list[Effect]:
        return [self._bucket(peer, message.bucket)]

    def _ledger_query(self, peer: str, message: LedgerQuery, payload: Any) -> list[Effect]:
        ranges = self.ledger.ranges(message.pass_index, message.chunk)
        return [Reply(peer, LedgerAnswer(message.pass_index, message.chunk, ranges))]

    def _push(self, peer: str, message: BatchPush, payload: Any) -> list[Effect]:
        if refused := self.wrong_generation(peer, message.generation):
            return refused
        if not -1 <= message.version <= self.version:
            return self.refuse(peer, "malformed", f"a gradient of version {message.version}, this is {self.version}")
        key = (message.pass_index, message.chunk, message.batch)
        if self.ledger.has(*key):
            reason = self.tell(f"{_name(key)} from {peer} is applied already")
            answers = [self._ack(peer, key, fresh=False), self._bucket(peer, message.bucket)]
            return [Count("duplicate-batch", reason), *answers]
        self.retained.pushed(self.peers[peer], message.version)
        staleness = self.version - max(0, message.version)
        if 0 <= self.options.max_staleness < staleness:
            self.copies.pop((key, peer), None)
            reason = self.tell(f"{_name(key)} from {peer} is {staleness} versions behind")
            return [*self.refuse(peer, "stale", reason), self._bucket(peer, message.bucket)]
        return self._keep(peer, key, message, payload)

    def _keep(self, peer: str, key: BatchKey, message: BatchPush, payload: Any) -> list[Effect]:
        copy = self.copies.get((key, peer))
        effects: list[Effect] = []
        if copy is not None and (copy.version, copy.samples) != (message.version, message.samples):
            effects.append(self.count("replaced-batch", f"{_name(key)} from {peer} comes anew"))
            copy = None
        if copy is None:
            copy = self.copies[key, peer] = _Copy(message.version, message.samples)
            for old, _ in [item for item in self.copies if item[1] == peer][:-HALVES]:
                del self.copies[old, peer]
        if message.bucket in copy.payloads:
            reason = self.tell(f"bucket {message.bucket} of {_name(key)} from {peer} is here already")
            return [*effects, Count("duplicate-push", reason)]
        copy.payloads[message.bucket], copy.finite = payload, copy.finite and message.finite
        copy.values = message.values or copy.values
        self.tell(f"kept bucket {message.bucket} of {_name(key)} from {peer}")
        if len(copy.payloads) < len(self.options.buckets):
            return effects
        return [*effects, *self._apply(peer, key, copy, message.batches)]

    def _apply(self, peer: str, key: BatchKey, copy: _Copy, batches: int) -> list[Effect]:
        if not self.ledger.add(*key, batches):
            self.illegal(f"{_name(key)} is applied twice")
        staleness = max(0, self.version - max(0, copy.version))
        self.staleness.add(staleness)
        self.version += 1
        left = sorted(other for batch, other in self.copies if batch == key and other != peer)
        self.copies = {k: c for k, c in self.copies.items() if k[0] != key}
        reason = self.tell(f"{_name(key)} from {peer} is complete: version {self.version}")
        base = copy.version if self.retained.has(self.peers[peer], copy.version) else -1
        payloads, kept = {b: copy.payloads[b] for b in self.options.buckets}, self.retained.all()
        effects: list[Effect] = [
            ApplyBatch(*key, copy.samples, payloads, staleness, reason, base, kept, copy.finite, copy.values)
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
            self.retained.sent(self.peers[peer], self.version)
        return Reply(peer, Parameters(self.generation, self.version, bucket), "current")

    def invariants(self) -> dict[str, bool]:
        peers = [peer for _, peer in self.copies]
        return {
            "no copy is kept of what is applied": not any(self.ledger.has(*key) for key, _ in self.copies),
            "a copy is partial": all(0 < len(c.payloads) < len(self.options.buckets) for c in self.copies.values()),
            "copies are of introduced peers": all(peer in self.peers for peer in peers),
            "a few half batches of each peer are kept": all(peers.count(peer) <= HALVES for peer in peers),
            "versions are kept for known trainers": set(self.retained.trainers()) <= set(self.peers.values()),
            "nobody was sent a version that is not there": max(self.retained.all(), default=0) <= self.version,
        }

    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]] = {
        Received: Shard.received,
        PeerLeft: Shard.peer_left,
        Tick: _tick,
    }
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
    """Counts applied batches by their staleness."""

    def __init__(self) -> None:
        self.counts = [0] * (SHOWN + 1)
        """By staleness from 0 to 15; the last one: of all above."""
        self.max = self._sum = 0

    def add(self, staleness: int) -> None:
        self.counts[min(staleness, SHOWN)] += 1
        self.max = max(self.max, staleness)
        self._sum += staleness

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self.counts))


LIMIT = 6
"""Versions per trainer, which needs two: what it computes from, and what it was sent meanwhile."""


class RetainedVersions:
    """By trainer, the versions that it was sent and has not gone beyond: the lowest one, from which it most likely
    computes, and the newest ones, `LIMIT` in all."""

    def __init__(self) -> None:
        self._sent: dict[str, list[int]] = {}

    def sent(self, trainer: str, version: int) -> None:
        versions = self._sent.setdefault(trainer, [])
        if version not in versions:
            versions.append(version)
            del versions[1 : 1 - LIMIT]

    def pushed(self, trainer: str, version: int) -> None:
        """A gradient of this version came: the trainer computes from no older one any more."""
        self._sent[trainer] = [v for v in self._sent.get(trainer, ()) if v >= version]

    def left(self, trainer: str) -> None:
        self._sent.pop(trainer, None)

    def has(self, trainer: str, version: int) -> bool:
        return version in self._sent.get(trainer, ())

    def trainers(self) -> frozenset[str]:
        return frozenset(self._sent)

    def all(self) -> frozenset[int]:
        """Returns the versions whose copies are needed."""
        return frozenset(v for versions in self._sent.values() for v in versions)
