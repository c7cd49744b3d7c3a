"""Event stories of an async shard, and its ledger."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.protocol.async_shard import AsyncShard
from graphft.runtime.protocol.events import ApplyBatch, AsyncOptions, PeerLeft, Received, Reply, TakeCheckpoint, Tick
from graphft.runtime.protocol.ledger import ALL, Ledger, Ranges
from graphft.runtime.protocol.machine import IllegalTransition
from graphft.runtime.protocol.messages import BatchAck, BatchPush, Hello, LedgerQuery, Parameters, Pull, Push, Query
from graphft.runtime.protocol.messages import Ledger as LedgerAnswer
from tests.protocol.rigs import Rig, codes, counted, of


class AsyncRig(Rig):
    """An async shard of two buckets, with peers "a" and "b" introduced."""

    def __init__(self, *, version: int = 0, ledger: Ledger | None = None, **options: Any) -> None:
        defaults: dict[str, Any] = dict(shard=0, buckets=(0, 1), batches=(4,) * 4, passes=2, run="j")
        super().__init__(
            AsyncShard(
                AsyncOptions(**(defaults | options)), incarnation="i0", generation=0, version=version, ledger=ledger
            )
        )
        for peer in "ab":
            self.hello(peer)

    def hello(self, peer: str) -> list[Any]:
        return self.feed(Received(peer, Hello("j", peer)))

    def push(
        self,
        peer: str,
        batch: int,
        bucket: int,
        *,
        version: int = 0,
        chunk: int = 0,
        batches: int = 4,
        samples: int = 2,
        generation: int = 0,
        payload: Any = "",
    ) -> list[Any]:
        message = BatchPush(generation, 0, chunk, batch, batches, bucket, samples, version)
        return self.feed(Received(peer, message, f"{peer}{batch}.{bucket}" if payload == "" else payload))

    def batch(self, peer: str, batch: int, **kwargs: Any) -> list[Any]:
        return [*self.push(peer, batch, 0, **kwargs), *self.push(peer, batch, 1, **kwargs)]


def acks(effects: list[Any]) -> list[tuple[str, int, bool]]:
    return [(e.peer, e.message.batch, e.message.fresh) for e in of(BatchAck, effects)]


def test_a_batch_is_applied_when_all_of_its_buckets_are_in_and_acknowledged_behind_it() -> None:
    rig = AsyncRig()
    assert rig.push("a", 2, 1) == []
    effects = rig.push("a", 2, 0)
    assert [type(e).__name__ for e in effects] == ["ApplyBatch", "Reply", "Reply", "Reply"]
    (apply,) = of(ApplyBatch, effects)
    assert (apply.chunk, apply.batch, apply.samples, dict(apply.payloads)) == (0, 2, 2, {0: "a2.0", 1: "a2.1"})
    assert acks(effects) == [("a", 2, True)]
    assert [(e.message.bucket, e.message.version, e.source) for e in of(Parameters, effects)] == [
        (0, 1, "current"),
        (1, 1, "current"),
    ]


def test_a_repeated_batch_is_acknowledged_not_applied() -> None:
    rig = AsyncRig()
    rig.batch("a", 1)
    effects = rig.batch("b", 1)
    assert not of(ApplyBatch, effects)
    assert acks(effects) == [("b", 1, False)] * 2
    assert counted(effects) == ["duplicate-batch"] * 2
    assert [e.message.version for e in of(Parameters, effects)] == [1, 1]
    assert rig.machine.version == 1


def test_the_ledger_survives_with_the_checkpoint() -> None:
    rig = AsyncRig(checkpoint_every=2)
    rig.batch("a", 1)
    (checkpoint,) = of(TakeCheckpoint, rig.batch("a", 3))
    assert checkpoint.step == 2
    saved = json.loads(json.dumps(rig.machine.ledger.export()))
    rig.batch("a", 0)
    again = AsyncRig(version=2, ledger=Ledger.load(saved))
    assert not of(ApplyBatch, again.batch("a", 3))
    assert of(ApplyBatch, again.batch("a", 0))
    assert again.machine.version == 3


def test_a_dead_trainers_half_batch_is_replaced_by_its_successors() -> None:
    rig = AsyncRig()
    rig.push("a", 0, 0)
    rig.feed(PeerLeft("a"))
    (apply,) = of(ApplyBatch, rig.batch("b", 0))
    assert dict(apply.payloads) == {0: "b0.0", 1: "b0.1"}


def test_two_trainers_with_one_batch_do_not_mix() -> None:
    rig = AsyncRig()
    rig.push("a", 0, 0)
    rig.push("b", 0, 1)
    effects = rig.push("b", 0, 0)
    assert dict(of(ApplyBatch, effects)[0].payloads) == {0: "b0.0", 1: "b0.1"}
    assert counted(effects) == ["duplicate-push"]
    assert acks(rig.push("a", 0, 1)) == [("a", 0, False)]


def test_a_trainer_that_computes_a_batch_anew_replaces_its_own_half() -> None:
    rig = AsyncRig()
    rig.push("a", 0, 0)
    rig.batch("b", 1)
    assert counted(rig.push("a", 0, 1, version=1, payload="new")) == ["replaced-batch"]
    (apply,) = of(ApplyBatch, rig.push("a", 0, 0, version=1, payload="newer"))
    assert dict(apply.payloads) == {0: "newer", 1: "new"}


def test_a_new_connection_begins_anew() -> None:
    rig = AsyncRig()
    rig.push("a", 0, 0, payload="old")
    rig.hello("a")
    assert not of(ApplyBatch, rig.push("a", 0, 1))
    assert counted(rig.push("a", 0, 1)) == ["duplicate-push"]
    assert of(ApplyBatch, rig.push("a", 0, 0))[0].payloads[0] == "a0.0"


def test_staleness_is_bounded_and_told() -> None:
    rig = AsyncRig(max_staleness=1)
    rig.push("b", 3, 0)
    rig.batch("a", 0)
    (apply,) = of(ApplyBatch, rig.batch("a", 1))
    assert apply.staleness == 1
    effects = rig.push("b", 3, 1)
    assert codes(effects) == ["stale"]
    assert [type(e.message).__name__ for e in of(Reply, effects)] == ["Refused", "Parameters"]
    (apply,) = of(ApplyBatch, rig.batch("b", 3, version=2))
    assert (apply.staleness, dict(apply.payloads)) == (0, {0: "b3.0", 1: "b3.1"})
    assert not of(ApplyBatch, rig.push("b", 3, 1)), "a batch that is in is acknowledged, however old"


def pull(rig: AsyncRig, peer: str) -> None:
    rig.feed(*(Received(peer, Pull(0, -1, bucket)) for bucket in (0, 1)))


def test_a_gradient_is_compensated_with_the_version_it_was_computed_from() -> None:
    rig = AsyncRig(compensate=True)
    pull(rig, "a")
    pull(rig, "b")
    (first,) = of(ApplyBatch, rig.batch("a", 0))
    assert (first.base, first.kept) == (0, {0})
    (second,) = of(ApplyBatch, rig.batch("a", 1, version=1))
    assert (second.base, second.kept) == (1, {0, 1}), "b still computes from 0"
    (slow,) = of(ApplyBatch, rig.batch("b", 2))
    assert (slow.base, slow.staleness, slow.kept) == (0, 2, {0, 1, 2})
    (third,) = of(ApplyBatch, rig.batch("b", 3, version=3))
    assert (third.base, third.kept) == (3, {1, 2, 3}), "b has gone on, a may still be at 1"


def test_who_leaves_frees_what_was_kept_for_it() -> None:
    rig = AsyncRig(compensate=True)
    pull(rig, "a")
    pull(rig, "b")
    rig.feed(PeerLeft("a"))
    rig.hello("c")
    pull(rig, "c")
    for batch in (0, 1):
        (apply,) = of(ApplyBatch, rig.batch("b", batch, version=batch))
    assert apply.kept == {0, 1}, "for c and b"
    rig.feed(PeerLeft("c"))
    (apply,) = of(ApplyBatch, rig.batch("b", 2, version=2))
    assert apply.kept == {2}


def test_a_trainer_on_a_new_connection_still_computes_from_what_it_had() -> None:
    rig = AsyncRig(compensate=True)
    pull(rig, "a")
    rig.batch("b", 0)
    rig.feed(Received("a again", Hello("j", "a")))
    (apply,) = of(ApplyBatch, rig.batch("a again", 1, version=0))
    assert (apply.base, apply.staleness) == (0, 1)


@pytest.mark.parametrize("version", [-1, 0])
def test_without_a_copy_a_gradient_is_applied_as_it_is_and_that_is_counted(version: int) -> None:
    rig = AsyncRig(compensate=True, version=3, max_staleness=3)
    effects = rig.batch("a", 0, version=version)
    assert [(a.base, a.staleness) for a in of(ApplyBatch, effects)] == [(-1, 3)]
    assert counted(effects) == ["uncompensated"]
    (apply,) = of(ApplyBatch, rig.batch("a", 1, version=4))
    assert apply.base == 4


def test_copies_are_bounded_whoever_asks_for_how_many() -> None:
    rig = AsyncRig(compensate=True, batches=(30,))
    for batch in range(20):
        pull(rig, "b")
        (apply,) = of(ApplyBatch, rig.batch("a", batch, version=batch, batches=30))
    assert apply.kept == {0, 15, 16, 17, 18, 19}
    assert of(ApplyBatch, rig.batch("b", 20, batches=30))[0].base == 0


def test_the_ledger_is_told() -> None:
    rig = AsyncRig()

    def ask(chunk: int) -> list[tuple[int, int]]:
        (reply,) = rig.feed(Received("a", LedgerQuery(0, chunk)))
        assert isinstance(reply.message, LedgerAnswer)
        return reply.message.ranges

    for batch in (0, 1, 3):
        rig.batch("a", batch)
    assert ask(0) == [(0, 2), (3, 4)]
    assert ask(1) == []
    rig.batch("a", 2)
    assert ask(0) == [(0, ALL)]


def test_what_does_not_belong_here_is_refused_and_changes_nothing() -> None:
    rig = AsyncRig()
    assert codes(rig.push("x", 0, 0)) == ["unknown-peer"]
    assert codes(rig.feed(Received("x", Hello("other", "x")))) == ["denied"]
    assert codes(rig.push("a", 0, 0, generation=1)) == ["not-ready"]
    assert codes(rig.push("a", 0, 0, generation=-1)) == ["stale-generation"]
    for bad in (dict(batch=4), dict(batch=-1), dict(bucket=2), dict(chunk=-1), dict(payload=None)):
        assert codes(rig.push("a", **{"batch": 0, "bucket": 0, **bad})) == ["malformed"]  # type: ignore[arg-type]
    assert codes(rig.feed(Received("a", Push(0, 0, 0, 0, 1, True), "x"))) == ["malformed"]
    assert codes(rig.feed(Received("a", Pull(0, -1, 2)))) == ["malformed"]
    assert codes(rig.feed(Received("a", Query(), None, "too long"))) == ["malformed"]
    assert rig.feed(Tick()) == []
    assert not rig.machine.copies
    with pytest.raises(IllegalTransition, match="knows no event"):
        rig.feed("what")


@given(st.lists(st.integers(0, 30), max_size=60))
def test_ranges_are_sets(values: list[int]) -> None:
    ranges, model = Ranges(), set()
    for value in values:
        assert ranges.add(value) == (value not in model)
        model.add(value)
    assert {v for v in range(32) if v in ranges} == model
    assert len(ranges) == len(model)
    pairs = ranges.pairs()
    assert all(a < b for a, b in pairs)
    assert all(e < s for (_, e), (s, _) in itertools.pairwise(pairs))
    assert Ranges(pairs).pairs() == pairs


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_ledgers_are_sets_and_pass_through_json(batches: list[tuple[int, int, int]]) -> None:
    ledger, model = Ledger(), set()
    for batch in batches:
        assert ledger.add(*batch, 3) == (batch not in model)
        model.add(batch)
        ledger = Ledger.load(json.loads(json.dumps(ledger.export())))
    for p, c, b in [(p, c, b) for p in range(3) for c in range(4) for b in range(3)]:
        assert ledger.has(p, c, b) == ((p, c, b) in model)
        assert any(s <= b < e for s, e in ledger.ranges(p, c)) == ((p, c, b) in model)


@pytest.mark.parametrize("ranges", [[[3, 3]], [[0, 2], [1, 4]], [[0, 2], [2, 4]]])
def test_damaged_ledgers_are_refused(ranges: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="is empty, or not behind the one before"):
        Ledger.load({"0": {"whole": [], "partly": {"0": ranges}}})
