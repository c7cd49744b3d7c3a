"""Tasks in etcd: what is read is what was written."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from graphft.runtime.protocol.chunk_queue import Todo
from graphft.runtime.protocol.task_pass import GROUP, PassTasks, Task, TaskGroup, decode_group, encode_group, group_of

COUNTS = st.integers(0, 2**40)
TODOS = st.builds(Todo, COUNTS, COUNTS, COUNTS, st.booleans(), st.lists(COUNTS, max_size=3).map(tuple))
TASKS = st.builds(Task, TODOS, st.sampled_from(["", "0-3f2a", "1-77b1"]), st.integers(-1, 63), COUNTS, COUNTS)


@given(st.data())
def test_a_group_that_is_cut_is_no_group(data: st.DataObject) -> None:
    value = encode_group(TaskGroup(b"\1\0\1", {5: Task(Todo(1, 2, 3, True, (4,)), "a", 0, 7, 8)}))
    with pytest.raises(ValueError):  # noqa: PT011
        decode_group(value[: data.draw(st.integers(0, len(value) - 1))])


@pytest.mark.parametrize("chunks", [1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP])
def test_a_pass_is_read_as_it_was_written(chunks: int) -> None:
    exists = bytes(n % 7 != 3 for n in range(chunks))
    one, other = PassTasks(2, exists, 5), PassTasks(2, exists, 5)
    order = []
    while (chunk := one.next_free()) is not None:
        order.append(chunk)
        one.give(chunk, "a", -1, len(order), 1, 0.0, vanished=True)
    assert sorted(order) == [n for n in range(chunks) if exists[n]]
    for chunk in order[::3]:
        one.finish(chunk)
    for chunk in order[1::3]:
        one.put_back(chunk, Todo(1, 0, 2))
    other.load({group: one.saved(group) for group in one.touched}, 0.0)
    assert (other.done, other.open) == (one.done, one.open)
    assert (other.todo, other.pending, other.finished) == (one.todo, one.pending, one.finished)
    assert all([*one.invariants().values(), *other.invariants().values()])
    rest = []
    while (free := other.next_free()) is not None:
        other.give(free, "b", -1, 99, 1, 0.0, vanished=True)
        rest.append(free)
    assert sorted(rest) == sorted(order[1::3])


def test_tasks_are_given_out_group_by_group() -> None:
    orders = []
    for index in range(2):
        tasks = PassTasks(index, b"\1" * (3 * GROUP), 5)
        order = []
        while (chunk := tasks.next_free()) is not None:
            tasks.give(chunk, "a", -1, 1, 1, 0.0, vanished=True)
            order.append(chunk)
        assert [len({group_of(c) for c in order[i : i + GROUP]}) for i in (0, GROUP, 2 * GROUP)] == [1, 1, 1]
        orders.append(order)
    assert orders[0] != orders[1]
