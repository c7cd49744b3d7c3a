"""A trainer in async mode: which batches its chunks still lack, on which shard, and what it has of the parameters.

For each batch, the thread that computes:

    trainer.step(Took((pass_index, chunk), batches), now)       # asks every shard which batches it has applied
    batch = trainer.next_batch(key, last)                       # None: nothing can be done for it now
    trainer.step(BeginBatch(key, batch), now)
    recv of (shard, bucket):  wait until trainer.has(shard, bucket); frame = trainer.frame(shard, bucket);
                              unless it is None copy it into the tensors, and step(Loaded(shard, bucket))
    send of (shard, bucket):  if trainer.lacks(shard): step(Pushed(shard, bucket, samples, frame), now)
    send_barrier:             step(CloseBatch(...), now); wait until trainer.settled
    if trainer.whole(key):    complete the chunk, under the generations that `generations()` gives; step(Dropped(key))

What a chunk lacks on a shard follows from the shard's ledger and acknowledgements alone: a batch that was skipped,
refused as stale, or lost with a shard that went back is computed again for this shard only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from graphft.runtime.protocol.events import (
    BeginBatch,
    ChunkKey,
    CloseBatch,
    Count,
    Dropped,
    Fail,
    FromShard,
    Loaded,
    Pushed,
    Send,
    ShardDown,
    ShardUp,
    Tick,
    Took,
    TrainerOptions,
)
from graphft.runtime.protocol.machine import Effect
from graphft.runtime.protocol.messages import (
    BatchAck,
    BatchPush,
    Ledger,
    LedgerQuery,
    Message,
    Parameters,
    Pull,
    Refused,
    Welcome,
)
from graphft.runtime.protocol.trainer import Connection, Trainer

PROBE_SECONDS = 1.0
"""A shard that answers nothing for this time is greeted again, whatever question is open."""
Effects = list[Effect]


@dataclass(slots=True)
class _NewestBucket:
    """A bucket: the newest version that came (`have`), the one in the tensors (`loaded`), and the one that is waited
    for (`wanted`), in the shard's present generation; -1: none of it yet. `ever`: it came in any."""

    have: int = -1
    loaded: int = -1
    wanted: int = 0
    frame: Any = None
    ever: bool = False


@dataclass(slots=True)
class _ShardConnection(Connection):
    caches: dict[int, _NewestBucket] = field(default_factory=dict)
    generation: int = -1
    skipped: set[tuple[ChunkKey, int]] = field(default_factory=set)


@dataclass(slots=True)
class _Held:
    """A chunk of `batches`; `wanted`: those to be applied; `lacks`: by shard; `unknown`: shards without a ledger."""

    batches: int
    wanted: frozenset[int]
    lacks: list[set[int]]
    unknown: set[int]


@dataclass(slots=True)
class _Current:
    key: ChunkKey
    batch: int
    payloads: list[dict[int, tuple[int, Any]]]
    """By shard and bucket: samples and frame, which are sent again if the connection breaks."""
    passed: set[int] = field(default_factory=set)
    """Shards that are not waited for, though they lack the batch."""
    closed: CloseBatch | None = None
    closed_at: float = 0.0
    waits: bool = False


class AsyncTrainer(Trainer):
    """See the module's text."""

    KIND = "an async trainer"

    def __init__(self, options: TrainerOptions) -> None:
        super().__init__(options)
        self.connections: list[_ShardConnection] = [
            _ShardConnection(caches={b: _NewestBucket() for b in buckets}) for buckets in options.buckets
        ]
        self.held: dict[ChunkKey, _Held] = {}
        self.current: _Current | None = None

    # -- questions ----------------------------------------------------------------------------------------------------

    def has(self, shard: int, bucket: int) -> bool:
        """True if the newest known version of a bucket is here. A shard that is away is waited for only at first."""
        cache, connection = self.connections[shard].caches[bucket], self.connections[shard]
        return cache.ever and (not connection.introduced or cache.have >= cache.wanted)

    def frame(self, shard: int, bucket: int) -> Any:
        """Returns what to copy into the bucket's tensors; None: they hold the newest already."""
        return self.connections[shard].caches[bucket].frame

    def lacks(self, shard: int) -> bool:
        """True if a shard lacks the current batch."""
        current = self.current
        return current is not None and current.key in self.held and current.batch in self.held[current.key].lacks[shard]

    def answered(self) -> int:
        """Returns the number of shards of which all buckets are here."""
        return sum(all(self.has(s, b) for b in c.caches) for s, c in enumerate(self.connections))

    def settled(self) -> int:
        """Returns the number of shards that the end of the current batch need not wait for."""
        current = self.current
        return sum(current is None or s in current.passed or not self.lacks(s) for s in range(len(self.connections)))

    def known(self, key: ChunkKey) -> bool:
        """True if every shard has told its ledger of a chunk."""
        return not self.held[key].unknown

    def whole(self, key: ChunkKey) -> bool:
        """True if every shard has applied all batches of a chunk."""
        return not any(self.held[key].lacks)

    def progress(self, key: ChunkKey) -> int:
        """Returns the number of batches of a chunk that every shard has applied."""
        held = self.held[key]
        return len(held.wanted) - len(set().union(*held.lacks))

    def next_batch(self, key: ChunkKey, last: int) -> int | None:
        """Returns the next batch behind `last`, or from the start again, that a shard lacks which can be reached."""
        lacks = self.held[key].lacks
        wanted = sorted(set().union(*(lacks[s] for s, c in enumerate(self.connections) if c.introduced)))
        return next((b for b in wanted if b > last), wanted[0] if wanted else None)

    def generations(self) -> list[int]:
        """Returns the generation of each shard's acknowledgements."""
        return [connection.generation for connection in self.connections]

    def newest(self) -> int:
        """Returns the newest version, of any shard, in the tensors; 0 before there are any."""
        return max(0, *(cache.loaded for connection in self.connections for cache in connection.caches.values()))

    # -- shards -------------------------------------------------------------------------------------------------------

    def from_shard(self, event: FromShard) -> Effects:
        introduced = self.connections[event.shard].introduced
        if not introduced and isinstance(event.message, (Ledger, BatchAck, Parameters)):
            self.silence.heard(event.shard)
            return [Count("late", f"{type(event.message).__name__} of shard {event.shard} before its welcome")]
        return super().from_shard(event)

    def _welcome(self, shard: int, message: Welcome, payload: Any) -> Effects:
        connection = self.connections[shard]
        if message.incarnation != connection.incarnation or not connection.up:
            here = connection.incarnation if connection.up else "down"
            return [Count("late", f"a welcome of {message.incarnation}, shard {shard} is {here}")]
        connection.introduced = True
        if message.generation != connection.generation:
            self.tell(f"shard {shard} is in generation {message.generation}, at version {message.version}")
            connection.generation = message.generation
            connection.skipped.clear()
            for cache in connection.caches.values():
                cache.have = cache.loaded = -1
            for held in self.held.values():
                held.lacks[shard] = set(held.wanted)
                held.unknown.add(shard)
        for cache in connection.caches.values():
            cache.wanted = max(message.version, 0)
        return [*self._ask(shard), *self._push_again(shard)]

    def _ask(self, shard: int) -> Effects:
        """Returns the open questions to a shard."""
        connection = self.connections[shard]
        connection.asked = self._now
        pulls = [
            Pull(connection.generation, -1, b) for b, cache in connection.caches.items() if cache.have < cache.wanted
        ]
        queries = [LedgerQuery(*key) for key, held in self.held.items() if shard in held.unknown]
        if pulls or queries:
            self.silence.asked(shard)
        return [Send(shard, message) for message in (*pulls, *queries)]

    def _push_again(self, shard: int) -> Effects:
        if self.current is None or not self.lacks(shard):
            return []
        return [self._push(shard, b, *pushed) for b, pushed in self._ready(self.current, shard)]

    def _ready(self, current: _Current, shard: int) -> list[tuple[int, tuple[int, Any]]]:
        """Returns what may be sent to a shard now. Its last bucket says whether the batch is finite, and what it
        reports, which is known when the batch is closed."""
        pushed = list(current.payloads[shard].items())
        whole = len(pushed) == len(self.connections[shard].caches)
        return pushed[:-1] if whole and current.closed is None else pushed

    def _refused(self, shard: int, message: Refused, payload: Any) -> Effects:
        connection, reason = self.connections[shard], f"shard {shard}: {message.code}: {message.reason}"
        if message.code in ("denied", "malformed"):
            return [Fail(reason)]
        count = Count(f"refused-{message.code}", self.tell(reason))
        if message.code == "stale":
            self._stale(shard, message.version)
            return [count, *self._ask(shard)]
        if not connection.introduced:
            return [count]  # several pushes were refused: one hello is enough
        connection.introduced = False
        return [count, self.hello(shard)]

    def _stale(self, shard: int, version: int) -> None:
        """Has the batch computed again, from newer parameters."""
        if self.current is not None:
            self.current.passed.add(shard)
        for cache in self.connections[shard].caches.values():
            cache.wanted = max(cache.wanted, version)

    def _ledger(self, shard: int, message: Ledger, payload: Any) -> Effects:
        key = (message.pass_index, message.chunk)
        held = self.held.get(key)
        if held is None:
            return []
        applied = {b for start, end in message.ranges for b in range(start, min(end, held.batches))}
        held.lacks[shard] -= applied
        held.unknown.discard(shard)
        self.connections[shard].skipped -= {(key, b) for b in applied}
        self.tell(f"shard {shard} has {len(applied)} of {held.batches} batches of chunk {key}")
        return []

    def _ack(self, shard: int, message: BatchAck, payload: Any) -> Effects:
        key, connection = (message.pass_index, message.chunk), self.connections[shard]
        if key in self.held:
            self.held[key].lacks[shard].discard(message.batch)
        connection.skipped.discard((key, message.batch))
        for cache in connection.caches.values():
            cache.wanted = max(cache.wanted, message.version)
        self.tell(f"shard {shard} has batch {message.batch} of chunk {key}, at version {message.version}")
        return [] if message.fresh else [Count("repeated", f"shard {shard} had batch {message.batch} of {key}")]

    def _bucket(self, shard: int, message: Parameters, payload: Any) -> Effects:
        connection = self.connections[shard]
        if message.generation == connection.generation and message.version >= connection.caches[message.bucket].have:
            cache = connection.caches[message.bucket]
            cache.have, cache.frame, cache.ever = message.version, payload, True
        return []

    # -- batches ------------------------------------------------------------------------------------------------------

    def _took(self, event: Took) -> Effects:
        shards = range(len(self.connections))
        wanted = frozenset(range(event.batches)) - event.discarded
        self.held[event.key] = _Held(event.batches, wanted, [set(wanted) for _ in shards], set(shards))
        return [Send(s, LedgerQuery(*event.key)) for s in shards if self.connections[s].introduced]

    def _dropped(self, event: Dropped) -> Effects:
        self.held.pop(event.key, None)
        for connection in self.connections:
            connection.skipped = {item for item in connection.skipped if item[0] != event.key}
        return []

    def _begin(self, event: BeginBatch) -> Effects:
        if event.key not in self.held:
            self.illegal(f"chunk {event.key} was not taken")
        self.current = _Current(event.key, event.batch, [{} for _ in self.connections])
        return []

    def _loaded(self, event: Loaded) -> Effects:
        cache = self.connections[event.shard].caches[event.bucket]
        cache.loaded = cache.have
        if not event.keep:
            cache.frame = None
        return []

    def _pushed(self, event: Pushed) -> Effects:
        if self.current is None:
            self.illegal("nothing was begun")
        self.current.payloads[event.shard][event.bucket] = (event.samples, event.payload)
        ready = [bucket for bucket, _ in self._ready(self.current, event.shard)]
        if not self.connections[event.shard].introduced or event.bucket not in ready:
            return []
        return [self._push(event.shard, event.bucket, event.samples, event.payload)]

    def _push(self, shard: int, bucket: int, samples: int, payload: Any) -> Send:
        assert self.current is not None
        self.silence.asked(shard)
        connection, (pass_index, chunk), closed = self.connections[shard], self.current.key, self.current.closed
        version = min(cache.loaded for cache in connection.caches.values())
        message: Message = BatchPush(
            connection.generation,
            pass_index,
            chunk,
            self.current.batch,
            self.held[self.current.key].batches,
            bucket,
            samples,
            version,
            closed is None or closed.finite,
            closed.values if closed is not None and shard == 0 else (),
        )
        return Send(shard, message, payload)

    def _close(self, event: CloseBatch) -> Effects:
        if self.current is None:
            self.illegal("nothing was begun")
        current, sendable = self.current, [s for s, c in enumerate(self.connections) if c.introduced and self.lacks(s)]
        before = {s: len(self._ready(current, s)) for s in sendable}
        current.closed, current.closed_at = event, self._now
        return [self._push(s, b, *pushed) for s in sendable for b, pushed in self._ready(current, s)[before[s] :]]

    # -- time ---------------------------------------------------------------------------------------------------------

    def _tick(self, event: Tick) -> Effects:
        self.silence.look(self._now)
        effects: Effects = []
        for shard, connection in enumerate(self.connections):
            if connection.up and self._now - connection.asked >= self.options.retry_interval:
                asked = self._ask(shard) if connection.introduced else [self.hello(shard)]
                silent = shard in self.silence.over(PROBE_SECONDS)  # and nothing else is to be asked: is it there?
                effects += asked or ([self.hello(shard)] if silent else [])
        current = self.current
        if current is None or current.closed is None or self._now - current.closed_at < current.closed.push_timeout:
            return effects
        return [*effects, *self._skip(current, current.closed.max_skipped)]

    def _skip(self, current: _Current, limit: int) -> Effects:
        effects: Effects = []
        item = (current.key, current.batch)
        for shard, connection in enumerate(self.connections):
            if shard in current.passed or not self.lacks(shard):
                continue
            if limit < 0 or len(connection.skipped | {item}) <= limit:
                current.passed.add(shard)
                connection.skipped.add(item)
                what = f"batch {current.batch} of chunk {current.key}"
                effects.append(self.count("skipped", f"shard {shard} did not answer {what} in time: skipped"))
            elif not current.waits:
                current.waits = True
                lacks = f"shard {shard} lacks {len(connection.skipped)} batches"
                effects.append(self.count("waited", f"{lacks}: waiting for it"))
        return effects

    def invariants(self) -> dict[str, bool]:
        shards, caches = range(len(self.connections)), [b for c in self.connections for b in c.caches.values()]
        return {
            "introduced shards are up": all(c.up or not c.introduced for c in self.connections),
            "what the tensors hold has come": all(b.loaded <= b.have for b in caches),
            "a bucket that came stays": all(b.ever or (b.have, b.frame) == (-1, None) for b in caches),
            "chunks lack batches of their own": all(la <= h.wanted for h in self.held.values() for la in h.lacks),
            "only batches of held chunks are skipped": all(
                k in self.held for c in self.connections for k, _ in c.skipped
            ),
            "only shards are passed over": self.current is None or self.current.passed <= set(shards),
        }

    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]] = {
        ShardUp: Trainer.shard_up,
        ShardDown: Trainer.shard_down,
        FromShard: from_shard,
        Tick: _tick,
        Took: _took,
        Dropped: _dropped,
        BeginBatch: _begin,
        Loaded: _loaded,
        Pushed: _pushed,
        CloseBatch: _close,
    }
    MESSAGES: ClassVar[dict[type, Callable[[Any, int, Any, Any], list[Any]]]] = {
        Welcome: _welcome,
        Refused: _refused,
        Ledger: _ledger,
        BatchAck: _ack,
        Parameters: _bucket,
    }
