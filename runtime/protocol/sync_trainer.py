"""A trainer in sync mode: which (step, slot) to work on, which buckets it has, what it asks the shards for.

Events may come from any thread, under the driver's one lock; effects are carried out in order. The thread that
computes, for one (step, slot) after the other:

    effects = trainer.step(Begin(), now)              # asks for the buckets that are missing
    work = trainer.current                            # Work(step, slot), or None: wait for an event, begin again
    recv of (shard, bucket):
        wait until trainer.has(shard, bucket), or trainer.work_changed (then abandon: raise WorkChanged, begin again)
        frame = trainer.frame(shard, bucket)          # None: the tensors hold this version already
        copy it into the tensors; trainer.step(Copied(shard, bucket, work.step, keep), now)
    send of (shard, bucket):  trainer.step(Pushed(shard, bucket, samples, frame), now)
    send_barrier:             trainer.step(Closed(shards), now)
    without data:             wait until trainer.reached() is `shards`, or trainer.work_changed; then Closed(shards)

Abandoning work, and doing it twice, is always safe: what is pushed after the end of a generation goes nowhere, and does
not count as done. What arrived on an earlier connection is fed before the ShardUp of the present one, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from graphft.runtime.protocol.events import (
    Begin,
    Closed,
    Copied,
    Fail,
    FromShard,
    Pushed,
    Rollback,
    Send,
    ShardDown,
    ShardUp,
    SlotGained,
    SlotLost,
    Tick,
    TrainerOptions,
    Work,
)
from graphft.runtime.protocol.machine import Effect
from graphft.runtime.protocol.messages import Empty, Parameters, Pull, Push, Query, Refused, Welcome
from graphft.runtime.protocol.trainer import BucketCache, Connection, Current, SlotState, Trainer

NEVER = float("-inf")


class SyncTrainer(Trainer):
    """See the module's text."""

    KIND = "a sync trainer"

    def __init__(self, options: TrainerOptions, *, generation: int) -> None:
        super().__init__(options)
        self.generation = generation
        self.connections: list[Connection] = [Connection() for _ in options.buckets]
        self.slots: dict[int, SlotState] = {}
        self.caches = {(s, b): BucketCache() for s, bs in enumerate(options.buckets) for b in bs}
        self.pending: dict[tuple[int, int, int], float] = {}
        """By (shard, bucket, version) that is asked for: when."""
        self.behind = False
        """A shard is in a newer generation: nothing is done until Rollback."""
        self._current: Current | None = None
        self._probed = NEVER
        self._pruned = -1

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Work | None:
        """The work that was begun, unless it is closed or void by a new generation."""
        return self._current.work if self._current else None

    @property
    def work_changed(self) -> bool:
        """True if the work that was begun is not what should be worked on now."""
        return self._current is None or self.next_work() != self._current.work

    def reached(self) -> int:
        """Returns the number of shards that have reached the current step; 0 without one, or while a shard is away."""
        if self._current is None or self.lowest() is None:
            return 0
        return sum(connection.version >= self._current.work.step for connection in self.connections)

    @property
    def finished(self) -> bool:
        """True if every shard has the job's last version."""
        lowest = self.lowest()
        return lowest is not None and lowest >= self.options.total_steps

    def lowest(self) -> int | None:
        """Returns the lowest version among the shards, as far as known; None while a shard is away."""
        if self.behind or not all(connection.introduced for connection in self.connections):
            return None
        return min(connection.version for connection in self.connections)

    def next_work(self) -> Work | None:
        """Returns the lowest (step, slot) to do, the begun one first; None: nothing can be done now."""
        lowest = self.lowest()
        if lowest is None or max(connection.version for connection in self.connections) > lowest + 1:
            return None
        begun = self._current.work.slot if self._current else None
        steps = [
            (max(state.next, lowest), slot != begun, slot) for slot, state in self.slots.items() if not state.confirm
        ]
        steps = [s for s in steps if s[0] < self.options.total_steps]
        return Work(min(steps)[0], min(steps)[2]) if steps else None

    def has(self, shard: int, bucket: int) -> bool:
        """True if the bucket is here, or in the tensors, at the current step's version, which its shard has reached."""
        return (
            self._current is not None
            and self.connections[shard].version >= self._current.work.step
            and not self.caches[shard, bucket].lacks(self._current.work.step)
        )

    def frame(self, shard: int, bucket: int) -> Any:
        """Returns the bucket's frame for the current step; None if the tensors hold it already."""
        return self.caches[shard, bucket].frames.get(self._current.work.step) if self._current else None

    def should_want(self, step: int, slot: int) -> bool:
        """True if (step, slot) is this trainer's last contribution of the step, which asks for the new buckets."""
        return not any(state.next <= step and not state.confirm for v, state in self.slots.items() if v != slot)

    # -- events: shards -----------------------------------------------------------------------------------------------

    def _welcome(self, shard: int, message: Welcome, payload: Any) -> list[Effect]:
        connection = self.connections[shard]
        where = f"shard {shard} ({message.incarnation}) at version {message.version} of {message.generation}"
        if message.incarnation != connection.incarnation or not connection.up:
            return [self.count("other-welcome", f"not the present connection to shard {shard}: {where}")]
        if message.generation > self.generation:
            return self._fall_behind(where)
        if message.generation < self.generation:
            connection.introduced = False
            return [self.count("early-shard", f"{where}, this trainer is in {self.generation}")]
        if connection.introduced:
            connection.version = max(connection.version, message.version)
            effects: list[Effect] = []
        else:
            effects = self._meet(shard, message)
        for state in self.slots.values():
            state.confirm.discard(shard)
        self.tell(where)
        return [*effects, *self._versions_changed(), *self._ask_missing()]

    def _meet(self, shard: int, message: Welcome) -> list[Effect]:
        """Begins a connection: what was sent on the one before may be lost. The shard has all steps below its version;
        other contributions to it are made again, and what was asked for is asked for again."""
        connection = self.connections[shard]
        connection.introduced, connection.version, self._pruned = True, message.version, -1
        for state in self.slots.values():
            state.next = min(state.next, message.version)
        current = self._current
        if current and message.version < current.work.step + bool(current.pushed):
            current.redo = True
        again = [key for key in self.pending if key[0] == shard]
        for key in again:
            del self.pending[key]
        wanted = [(bucket, version) for _, bucket, version in again if version <= message.version + 1]
        return [e for bucket, version in wanted for e in self._ask(shard, bucket, version)]

    def _refused(self, shard: int, message: Refused, payload: Any) -> list[Effect]:
        connection = self.connections[shard]
        reason = f"shard {shard} refused ({message.code}): {message.reason}"
        if message.code in ("denied", "malformed"):
            return [Fail(self.tell(reason))]
        if message.generation > self.generation:
            return self._fall_behind(reason)
        effects: list[Effect] = [self.count(f"refused-{message.code}", reason)]
        if message.code in ("unknown-peer", "not-ready", "future-step") and connection.introduced:
            connection.introduced = False  # what was sent since is lost: meet again
            effects += [self.hello(shard)] if message.code == "unknown-peer" else []
        elif message.generation == self.generation and connection.introduced:
            connection.version = max(connection.version, message.version)
            for key in [k for k in self.pending if k[0] == shard and k[2] < message.version - 1]:
                del self.pending[key]
            effects += self._versions_changed()
        return effects

    def _bucket(self, shard: int, message: Parameters, payload: Any) -> list[Effect]:
        connection, key = self.connections[shard], (shard, message.bucket)
        where = f"bucket {message.bucket} of shard {shard} at version {message.version} of {message.generation}"
        if not connection.introduced or message.generation != self.generation:
            return [self.count("other-bucket", f"{where}, this trainer is in {self.generation}")]
        connection.version = max(connection.version, message.version)
        self.pending.pop((*key, message.version), None)
        lowest = self.lowest()
        if lowest is None or message.version >= lowest:
            self.caches[key].put(message.version, payload)
        return self._versions_changed()

    # -- events: membership -------------------------------------------------------------------------------------------

    def _slot_gained(self, event: SlotGained) -> list[Effect]:
        held = self.slots.get(event.slot)
        if held is not None and held.claim >= event.claim:
            return []
        self.slots[event.slot] = SlotState(claim=event.claim, confirm=set(range(len(self.connections))))
        self.tell(f"gained slot {event.slot}, asking where the shards are")
        return [self._query(s) for s, connection in enumerate(self.connections) if connection.introduced]

    def _slot_lost(self, event: SlotLost) -> list[Effect]:
        held = self.slots.get(event.slot)
        if held is None or held.claim > event.claim:
            return []  # it was claimed again since
        del self.slots[event.slot]
        self.tell(f"lost slot {event.slot}")
        return []

    def _rollback(self, event: Rollback) -> list[Effect]:
        if event.generation <= self.generation:
            return [self.count("old-rollback", f"generation {event.generation} is not newer than {self.generation}")]
        self.tell(f"generation {event.generation} begins at step {event.step}")
        self.generation, self.behind, self._current = event.generation, False, None
        self.pending.clear()
        for cache in self.caches.values():
            cache.clear()
        for state in self.slots.values():
            state.next = 0
        for connection in self.connections:
            connection.introduced = False
        return [self.hello(s) for s, connection in enumerate(self.connections) if connection.up]

    def _tick(self, event: Tick) -> list[Effect]:
        self.silence.look(self._now)
        due, due_hello = self._now - self.options.retry_interval, self._now - self.options.hello_interval
        effects: list[Effect] = []
        unsure = {s for state in self.slots.values() for s in state.confirm}
        idle = bool(self.slots) and self.lowest() is not None and not self.finished and self.next_work() is None
        for shard, connection in enumerate(self.connections):
            unknown = not connection.introduced or shard in unsure or idle
            if connection.up and connection.asked <= due_hello and unknown:
                effects.append(self._query(shard) if connection.introduced else self.hello(shard))
        for (shard, bucket, version), asked in list(self.pending.items()):
            if asked <= due and self.connections[shard].introduced and version <= self.connections[shard].version + 1:
                del self.pending[shard, bucket, version]
                effects += self._ask(shard, bucket, version)
        return effects + self._ask_missing() + self._probe()

    # -- events: the work ---------------------------------------------------------------------------------------------

    def _begin(self, event: Begin) -> list[Effect]:
        work = self.next_work()
        if work is None:
            self._current = None
            return []
        self._current = Current(work, self.slots[work.slot], self.should_want(work.step, work.slot))
        self.tell(f"began step {work.step} for slot {work.slot}")
        return self._ask_missing()

    def _copied(self, event: Copied) -> list[Effect]:
        if self._current is not None and self._current.work.step == event.version:
            self.caches[event.shard, event.bucket].copied(event.version, event.keep)
        return []

    def _pushed(self, event: Pushed) -> list[Effect]:
        current, key = self._current, (event.shard, event.bucket)
        if current is None:
            return [self.count("void-push", f"bucket {event.bucket} for shard {event.shard}: its generation is over")]
        if key not in self.caches or key in current.pushed:
            self.illegal(f"bucket {key} is pushed twice, or is none of the program's, in {current.work}")
        current.pushed.add(key)
        if all((event.shard, b) in current.pushed for b in self.options.buckets[event.shard]):
            current.held.append(event)
            return []
        return self._push(current, event, finite=True)

    def _push(self, current: Current, event: Pushed, finite: bool, values: tuple[float, ...] = ()) -> list[Effect]:
        step, slot = current.work.step, current.work.slot
        push = Push(self.generation, step, slot, event.bucket, event.samples, current.want, finite, values)
        return self._contribute(current, event.shard, push, event.payload, (event.bucket,))

    def _closed(self, event: Closed) -> list[Effect]:
        current = self._current
        if current is None:
            return [self.count("void-push", "a contribution was closed whose generation is over")]
        left = sorted(key for key in self.caches.keys() - current.pushed if key[0] < event.shards)
        if current.pushed and left:
            self.illegal(f"{current.work} is closed, but (shard, bucket) {left} were not pushed")
        effects = []
        for held in current.held:
            effects += self._push(current, held, event.finite, event.values if held.shard == 0 else ())
        if not current.pushed:
            empty = Empty(self.generation, current.work.step, current.work.slot, current.want)
            for shard, buckets in enumerate(self.options.buckets[: event.shards]):
                effects += self._contribute(current, shard, empty, None, buckets)
        self._current = None
        if not current.redo:
            current.state.next = max(current.state.next, current.work.step + 1)
        self.tell(f"closed step {current.work.step} for slot {current.work.slot}" + (", to be redone" * current.redo))
        return effects

    def _contribute(
        self, current: Current, shard: int, message: Push | Empty, payload: Any, buckets: tuple[int, ...]
    ) -> list[Effect]:
        """Sends a part of a contribution; if the shard is away or behind, it is made again later."""
        connection = self.connections[shard]
        if self.behind or not connection.introduced or connection.version < message.step:
            current.redo = True
            return [self.count("void-push", f"step {message.step}, slot {message.slot}: shard {shard} is not there")]
        if message.want:
            for bucket in buckets:
                self.pending[shard, bucket, message.step + 1] = self._now
        return [Send(shard, message, payload)]

    # -- asking -------------------------------------------------------------------------------------------------------

    def _query(self, shard: int) -> Send:
        self.connections[shard].asked = self._now
        self.silence.asked(shard)
        return Send(shard, Query())

    def _ask(self, shard: int, bucket: int, version: int) -> list[Effect]:
        if (shard, bucket, version) in self.pending:
            return []
        self.pending[shard, bucket, version] = self._now
        return [Send(shard, Pull(self.generation, version, bucket))]

    def _ask_missing(self) -> list[Effect]:
        """Asks for the buckets that the current step lacks, whose version is at most one above any shard's.

        Of a shard that came back one version older, all buckets may be here: then the answer to the first one tells
        when the shard has reached the step."""
        if self._current is None or self.lowest() is None:
            return []
        step = self._current.work.step
        effects: list[Effect] = []
        for shard, (connection, buckets) in enumerate(zip(self.connections, self.options.buckets, strict=True)):
            lacking = [b for b in buckets if self.caches[shard, b].lacks(step)]
            if step <= connection.version + 1:
                for bucket in lacking or buckets[: step > connection.version]:
                    effects += self._ask(shard, bucket, step)
        return effects

    def _versions_changed(self) -> list[Effect]:
        lowest = self.lowest()
        if lowest is not None and lowest != self._pruned:
            self._pruned = lowest
            for cache in self.caches.values():
                cache.prune(lowest)
            for key in [k for k in self.pending if k[2] < lowest]:
                del self.pending[key]
        return self._probe()

    def _probe(self) -> list[Effect]:
        """Asks a shard that is two versions behind another, and so has lost steps, for what it cannot have: it asks for
        a rollback then. Does nothing if only this trainer's knowledge is old."""
        if self.lowest() is None or self._now < self._probed + self.options.retry_interval:
            return []
        versions = [connection.version for connection in self.connections]
        low, high = min(versions), max(versions)
        if high <= low + 1:
            return []
        self._probed, shard = self._now, versions.index(low)
        self.tell(f"shard {shard} is at version {low}, another at {high}")
        return [Send(shard, Pull(self.generation, high, self.options.buckets[shard][0]))]

    def _fall_behind(self, reason: str) -> list[Effect]:
        self.behind = True
        return [self.count("behind", f"{reason}; this trainer is in {self.generation}")]

    def invariants(self) -> dict[str, bool]:
        lowest, current = self.lowest(), self._current
        return {
            "introduced shards are up": all(c.up or not c.introduced for c in self.connections),
            "no slot is ahead of a shard by more than one step": lowest is None
            or all(s.next <= lowest + 1 for s in self.slots.values()),
            "kept frames are not of old versions": lowest is None
            or all(v >= lowest for t in self.caches.values() for v in t.frames),
            "only the program's buckets are asked for": all(k[:2] in self.caches for k in self.pending),
            "begun work is of this job": current is None or current.work.step < self.options.total_steps,
        }

    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]] = {
        ShardUp: Trainer.shard_up,
        ShardDown: Trainer.shard_down,
        FromShard: Trainer.from_shard,
        SlotGained: _slot_gained,
        SlotLost: _slot_lost,
        Rollback: _rollback,
        Tick: _tick,
        Begin: _begin,
        Copied: _copied,
        Pushed: _pushed,
        Closed: _closed,
    }
    MESSAGES: ClassVar[dict[type, Callable[[Any, int, Any, Any], list[Any]]]] = {
        Welcome: _welcome,
        Refused: _refused,
        Parameters: _bucket,
    }
