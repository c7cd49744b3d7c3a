"""The pass plan: every batch of every chunk exactly once per pass, the same on every machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.errors import GraphftError
from graphft.plan import Plan, batch_seed, chunk_batch_seed, mix, permutation, record_order

plans = st.builds(
    Plan,
    st.lists(st.integers(0, 30), min_size=1, max_size=12).map(lambda r: [*r, 7]),
    slots=st.integers(1, 5),
    batch_size=st.integers(1, 7),
    seed=st.integers(-5, 2**70),
    passes=st.integers(1, 3),
    drop_last=st.booleans(),
)


@given(plans)
def test_every_batch_is_computed_exactly_once_per_pass(plan: Plan) -> None:
    seen = []
    for step in range(plan.total_steps):
        for slot in range(plan.slots):
            found = plan.locate(step, slot)
            if found is not None:
                assert found.batch == step - found.chunk_start_step
                seen.append((found.pass_index, found.chunk, found.batch, found.samples))
    size = plan.batch_size
    expected = [
        (p, c, b, min(size, n - b * size))
        for p in range(plan.passes)
        for c, n in enumerate(plan.records)
        for b in range(n // size if plan.drop_last else -(-n // size))
    ]
    assert sorted(seen) == sorted(expected)


@given(plans)
def test_a_plan_of_more_passes_begins_alike(plan: Plan) -> None:
    longer = Plan(
        plan.records,
        slots=plan.slots,
        batch_size=plan.batch_size,
        seed=plan.seed,
        passes=plan.passes + 2,
        drop_last=plan.drop_last,
    )
    assert longer.start_steps[: plan.passes + 1] == plan.start_steps
    for index in range(plan.passes):
        assert longer.chunks_of(index) == plan.chunks_of(index)
        for chunk in range(len(plan.records)):
            assert (longer.order(index, chunk) == plan.order(index, chunk)).all()


@given(plans)
def test_chunks_and_steps_agree(plan: Plan) -> None:
    assert plan.start_steps[0] == 0
    for index in range(plan.passes):
        chunks = plan.chunks_of(index)
        assert max(c.last_step for c in chunks) == plan.start_steps[index + 1] - 1  # no step without data
        for c in chunks:
            first, last = plan.locate(c.first_step, c.slot), plan.locate(c.last_step, c.slot)
            assert first is not None
            assert last is not None
            assert (first.pass_index, first.chunk, first.batch, last.batch) == (index, c.chunk, 0, c.batches - 1)
            assert plan.pass_of(c.first_step) == plan.pass_of(c.last_step) == index
    assert plan.pass_of(plan.total_steps) == plan.passes
    assert plan.passes * plan.samples == sum(
        work.samples for s in range(plan.total_steps) for v in range(plan.slots) if (work := plan.locate(s, v))
    )
    assert plan.locate(plan.total_steps, 0) is None


def test_passes_differ_and_slots_share_the_order() -> None:
    plan = Plan([8] * 20, slots=3, batch_size=4, seed=1, passes=2)
    orders = [[c.chunk for c in sorted(plan.chunks_of(p), key=lambda c: (c.first_step, c.slot))] for p in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert Plan([8] * 20, slots=3, batch_size=4, seed=2).chunks_of(0) != plan.chunks_of(0)


def test_order_and_seeds_are_the_same_everywhere() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0
    assert mix(1, 2, 3) == 7702586659592502839
    assert permutation(10, 1, 2, 3).tolist() == [7, 0, 4, 1, 8, 2, 5, 6, 3, 9]
    assert batch_seed(0, 1, 2) == 8585083842537145641
    assert chunk_batch_seed(0, 1, 2, 3) == 3339676507993276414
    assert record_order(0, 1, 2, 6).tolist() == [0, 5, 3, 2, 1, 4]


def test_nonsense_is_refused() -> None:
    for records, slots, rule in (
        ([3, 3, 3], 1, "no-batch"),
        ([], 1, "no-batch"),
        ([3], 0, "plan"),
        ([3, -1], 1, "plan"),
    ):
        with pytest.raises(GraphftError) as caught:
            Plan(records, slots=slots, batch_size=4, drop_last=True)
        assert caught.value.rule == rule
    with pytest.raises(GraphftError, match="there is no pass 1"):
        Plan([3], slots=1, batch_size=4).pass_plan(1)
