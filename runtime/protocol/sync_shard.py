"""A shard in sync mode: generation, version, the contributions of the current step, and who waits for the next version.

The driver steps `Started` first, and carries effects out in order, before the next event. Those that are not plain:

- `ComputePartials`: reduce the contributions into the gradients, run the reduce block, then step PartialsReady.
- `ApplyRound`: (reduce the contributions, if ComputePartials did not,) copy the parameters to the previous version's
  buffers, run the schedule and optimize blocks. The answers with the new version are effects behind it.
- `RoundSkipped` that names slots: run the schedule and skip blocks.
- `Finished`: serve on until the final checkpoint is committed.

When the watch shows a new generation: load the checkpoint's state first, then step(Rollback(generation, step)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from graphft.runtime.protocol.events import (
    ApplyRound,
    CheckpointAt,
    ComputePartials,
    Count,
    Finished,
    PartialsReady,
    PeerLeft,
    Received,
    Reply,
    RequestRollback,
    Rollback,
    RoundSkipped,
    SendShard,
    Source,
    Started,
    StepsWanted,
    SyncOptions,
    TakeCheckpoint,
    Tick,
)
from graphft.runtime.protocol.machine import Effect
from graphft.runtime.protocol.messages import (
    Empty,
    Hello,
    Message,
    Parameters,
    Partials,
    PartialsQuery,
    Pull,
    Push,
    Query,
    sync_problem,
)
from graphft.runtime.protocol.round import PartialSums, Round
from graphft.runtime.protocol.shard import Shard


class SyncShard(Shard):
    """See the module's text."""

    KIND = "a sync shard"
    options: SyncOptions

    def __init__(self, options: SyncOptions, *, incarnation: str, generation: int, version: int) -> None:
        super().__init__(options, incarnation=incarnation, generation=generation, version=version)
        self.phase: Literal["collecting", "summing", "exchanging"] = "collecting"
        self.recovering = options.recovery
        self.round = Round(version, options.slots, options.buckets)
        self.partial_sums = PartialSums(options.shard, options.shards)
        self.waiting: dict[tuple[str, int], None] = {}
        """(peer, bucket) that get the next version, in the order of asking."""
        self.previous: Source = ""
        """The source of version - 1: nothing; after a round without data, the current one."""
        self.checkpoints: set[int] = set()
        self.wanted = options.total_steps
        """Steps that are wanted so far; the next one may take any time."""
        self._deadline: float | None = None
        self._asked_partials = self._asked_rollback = float("-inf")

    @property
    def finished(self) -> bool:
        return self.version >= self.options.total_steps

    # -- events -------------------------------------------------------------------------------------------------------

    def _started(self, event: Started) -> list[Effect]:
        if self.recovering:
            self._deadline = self._now + self.options.recovery_timeout
        self.tell(f"started at version {self.version}" + (" in recovery mode" if self.recovering else ""))
        return [Finished(self.version)] if self.finished else []

    def problem(self, message: Message, payload: Any) -> str:
        return sync_problem(self.options, message, payload)

    def introduced(self, peer: str, replaced: list[str]) -> None:
        """Drops what the older connections wait for."""
        self.waiting = {k: None for k in self.waiting if k[0] not in replaced}

    def left(self, peer: str, name: str) -> None:
        self.introduced(peer, [peer])

    def _partials_ready(self, event: PartialsReady) -> list[Effect]:
        if (self.phase, self.version) != ("summing", event.step):
            self.illegal(f"partial sums of step {event.step} in phase {self.phase} of step {self.version}")
        self.phase, self._asked_partials = "exchanging", self._now
        self.partial_sums.offer(event.step, event.payload)
        self.tell(f"own partial sums of step {event.step} are ready")
        others = [s for s in range(self.options.shards) if s != self.options.shard]
        return [e for s in others for e in self._send_partials(s, event.step)] + self._apply_if_exchanged()

    def _rollback(self, event: Rollback) -> list[Effect]:
        if event.generation <= self.generation:
            return [self.count("old-rollback", f"generation {event.generation} is not newer than {self.generation}")]
        left = list(dict.fromkeys(peer for peer, _ in self.waiting))
        reason = self.tell(f"back from version {self.version} to {event.step}, generation {event.generation}")
        self.generation, self.version, self.phase, self.previous = event.generation, event.step, "collecting", ""
        self.round = Round(event.step, self.options.slots, self.options.buckets)
        self.partial_sums = PartialSums(self.options.shard, self.options.shards)
        self.waiting, self.checkpoints = {}, set()
        self.recovering, self._deadline = False, None
        self._asked_rollback = float("-inf")
        refused: list[Effect] = [e for peer in left for e in self.refuse(peer, "stale-generation", reason)]
        welcomed = [self.welcome(peer) for peer in sorted(self.peers)]  # unasked: no trainer has to poll for it
        return [*refused, *welcomed, *([Finished(self.version)] if self.finished else [])]

    def _checkpoint_at(self, event: CheckpointAt) -> list[Effect]:
        if event.step <= self.version:
            return [self.count("late-checkpoint", f"version {event.step} is over, at {self.version}")]
        self.checkpoints.add(event.step)
        return []

    def _steps_wanted(self, event: StepsWanted) -> list[Effect]:
        self.wanted = event.step
        return []

    @property
    def paused(self) -> bool:
        """True while the next step is not wanted."""
        return not self.finished and self.version >= self.wanted

    def _tick(self, event: Tick) -> list[Effect]:
        effects: list[Effect] = []
        if self.paused and self._deadline is not None:
            self._deadline = self._now + self.options.recovery_timeout
        interval = self.options.retry_interval
        if self.phase == "exchanging" and self._now >= self._asked_partials + interval:
            self._asked_partials = self._now
            query = PartialsQuery(self.generation, self.version, self.options.shard)
            for shard in self.partial_sums.missing():
                effects += [SendShard(shard, self._own_hello()), SendShard(shard, query)]
        if self._deadline is not None and self._now >= self._deadline and self.phase == "collecting":
            effects += self._barrier_timeout()
        return effects

    # -- messages -----------------------------------------------------------------------------------------------------

    def _contribution(self, peer: str, message: Push | Empty, payload: Any) -> list[Effect]:
        if refused := self.wrong_generation(peer, message.generation):
            return refused
        step, effects = message.step, list[Effect]()
        if step > self.version or (self.finished and step == self.version):
            return self._behind(peer, f"{peer} pushes step {step}")
        if message.step == self.version and self.phase == "collecting":
            outcome, reason = self.round.keep(message, payload, peer)
            if outcome == "conflict":
                return self.refuse(peer, "malformed", reason)
            self.tell(reason)
            if outcome == "duplicate":
                effects.append(Count("duplicate-push", reason))
        else:
            late = f"slot {message.slot} of step {message.step} from {peer}, but that step is closed"
            effects.append(self.count("late-push", late))
        wanted = (message.bucket,) if isinstance(message, Push) else self.options.buckets
        for bucket in wanted if message.want else ():
            if message.step == self.version:
                self.waiting[peer, bucket] = None
            else:
                effects.append(self._bucket(peer, bucket, "current", self.version))
        return effects + self._close_if_complete()

    def _pull(self, peer: str, message: Pull, payload: Any) -> list[Effect]:
        if refused := self.wrong_generation(peer, message.generation):
            return refused
        wanted = message.version
        if wanted == self.version + 1:
            self.waiting[peer, message.bucket] = None
            return []
        if wanted in (-1, self.version):
            return [self._bucket(peer, message.bucket, "current", self.version)]
        if wanted == self.version - 1 and self.previous:
            return [self._bucket(peer, message.bucket, self.previous, wanted)]
        if wanted > self.version:
            return self._behind(peer, f"{peer} asks for version {wanted}")
        reason = f"version {wanted} is not kept any more, this is {self.version}"
        effects = self.refuse(peer, "gone", reason)
        return effects + (self._request_rollback(f"{peer} needs it: {reason}") if wanted == self.version - 1 else [])

    def _partials(self, peer: str, message: Partials, payload: Any) -> list[Effect]:
        where = f"partial sums of step {message.step} from shard {message.shard}, generation {message.generation}"
        if (message.generation, message.step) != (self.generation, self.version):
            return [self.count("other-partials", f"{where}: this is step {self.version} of {self.generation}")]
        if not self.partial_sums.keep(message.shard, payload):
            return [self.count("duplicate-partials", where)]
        self.tell(where)
        return self._apply_if_exchanged()

    def _partials_query(self, peer: str, message: PartialsQuery, payload: Any) -> list[Effect]:
        if message.generation != self.generation or message.step not in self.partial_sums.own:
            asked = f"shard {message.shard} asks for step {message.step} of generation {message.generation}"
            return [self.count("partials-not-ready", asked)]
        return self._send_partials(message.shard, message.step)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _close_if_complete(self) -> list[Effect]:
        if self.phase != "collecting" or self.finished or not self.round.complete:
            return []
        return self._close(f"all {self.options.slots} slots of step {self.version} are in")

    def _close(self, why: str) -> list[Effect]:
        contributions = self.round.contributions()
        reason = self.tell(f"closing step {self.version}: {why}")
        nonfinite = self.round.nonfinite()
        if nonfinite or not contributions:
            why = f"not finite: slot {', '.join(map(str, nonfinite))}" if nonfinite else "all without data"
            skipped = RoundSkipped(self.version, f"{reason}, {why}", nonfinite, contributions)
            self.partial_sums.offer(self.version, None)
            return [skipped, *self._advance("previous" if nonfinite else "current", skipped.reason)]
        if self.options.reduce:
            self.phase = "summing"
            return [ComputePartials(self.version, contributions, reason)]
        return self._apply((), reason)

    def _apply_if_exchanged(self) -> list[Effect]:
        if self.phase != "exchanging" or self.partial_sums.missing():
            return []
        return self._apply(self.partial_sums.ordered(self.version), "partial sums are complete")

    def _apply(self, partials: tuple[Any, ...], reason: str) -> list[Effect]:
        apply = ApplyRound(self.generation, self.version, self.round.contributions(), partials, reason)
        return [apply, *self._advance("previous", f"applied step {self.version}")]

    def _advance(self, previous: Source, reason: str) -> list[Effect]:
        self.partial_sums.advance(self.version)
        self.version += 1
        self.phase, self.previous = "collecting", previous
        self.round = Round(self.version, self.options.slots, self.options.buckets)
        self.recovering, self._deadline = False, None
        self.tell(f"version {self.version}: {reason}")
        waiting, self.waiting = self.waiting, {}
        return [*[self._bucket(peer, b, "current", self.version) for peer, b in waiting], *self._milestones()]

    def _milestones(self) -> list[Effect]:
        every, version = self.options.checkpoint_every, self.version
        effects = list[Effect]()
        at_step = version in self.options.checkpoint_steps
        if self.finished or at_step or version in self.checkpoints or (every and version % every == 0):
            effects.append(TakeCheckpoint(version, "the last version" if self.finished else "it is due"))
        self.checkpoints = {c for c in self.checkpoints if c > version}
        return effects + ([Finished(version)] if self.finished else [])

    # -- recovery -----------------------------------------------------------------------------------------------------

    def _barrier_timeout(self) -> list[Effect]:
        missing = self.round.missing()
        self._deadline = self._now + self.options.recovery_timeout
        names = ", ".join(f"slot {s} (buckets {', '.join(map(str, b))})" for s, b in missing.items())
        reason = f"the first barrier after the restart, step {self.version}, timed out without {names}"
        if self.options.on_barrier_timeout == "rollback":
            return self._request_rollback(reason)
        if len(missing) == self.options.slots:
            return [self.count("barrier-timeout", f"{reason}: nothing is there, waiting on")]
        discarded = [self.count("missing-contribution", f"slot {s} of step {self.version}: {reason}") for s in missing]
        return [*discarded, *self._close(f"{reason}; proceeding with what is there")]

    def _behind(self, peer: str, what: str) -> list[Effect]:
        if self.finished:
            return self.refuse(peer, "complete", f"{what}, but the job ends with version {self.version}")
        reason = f"{what}, but this shard is at {self.version}: it has to catch up"
        return [*self.refuse(peer, "future-step", reason), *self._request_rollback(reason)]

    def _request_rollback(self, reason: str) -> list[Effect]:
        if self._now < self._asked_rollback + self.options.retry_interval:
            return []
        self._asked_rollback = self._now
        return [RequestRollback(self.generation, self.tell(reason))]

    # -- answers ------------------------------------------------------------------------------------------------------

    def _bucket(self, peer: str, bucket: int, source: Source, version: int) -> Reply:
        return Reply(peer, Parameters(self.generation, version, bucket), source)

    def _own_hello(self) -> Hello:
        return Hello(self.options.run, f"shard-{self.options.shard}")

    def _send_partials(self, shard: int, step: int) -> list[Effect]:
        message = Partials(self.generation, step, self.options.shard)
        return [SendShard(shard, self._own_hello()), SendShard(shard, message, self.partial_sums.own[step])]

    def invariants(self) -> dict[str, bool]:
        return {
            "the round is that of the version": self.round.step == self.version,
            "version within the job": 0 <= self.version <= self.options.total_steps,
            "a round closes only when it may": not (self.finished and self.phase != "collecting"),
            "a complete round does not stay open": self.finished
            or self.phase != "collecting"
            or not self.round.complete,
            "only introduced peers wait": all(peer in self.peers for peer, _ in self.waiting),
            "exchanging needs the own sums": self.phase != "exchanging" or self.version in self.partial_sums.own,
            "partial sums only when reduced": self.options.reduce or self.phase == "collecting",
            "at most two steps' partial sums are kept": len(self.partial_sums.own) <= 2,
            "recovery mode has a deadline only while it lasts": self.recovering or self._deadline is None,
            "checkpoints asked for lie ahead": all(c > self.version for c in self.checkpoints),
        }

    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]] = {
        Started: _started,
        Received: Shard.received,
        PeerLeft: Shard.peer_left,
        PartialsReady: _partials_ready,
        Rollback: _rollback,
        CheckpointAt: _checkpoint_at,
        StepsWanted: _steps_wanted,
        Tick: _tick,
    }
    MESSAGES: ClassVar[dict[type, Callable[[Any, str, Any, Any], list[Any]]]] = {
        Query: Shard.query,
        Push: _contribution,
        Empty: _contribution,
        Pull: _pull,
        Partials: _partials,
        PartialsQuery: _partials_query,
    }
