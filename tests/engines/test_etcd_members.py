"""Which members an etcd is to have, while nodes come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.engines.etcd_members import Change, next_change

ABC = ["a", "b", "c"]


def of(nodes: str) -> dict[str, str]:
    """A member on each node, named after it."""
    return {f"on-{node}": node for node in nodes}


def test_it_begins_on_the_best_node_and_grows_one_by_one() -> None:
    assert next_change({}, [], ABC, 3) == Change("begin", "a", "there is none")
    assert next_change(of("a"), [], ABC, 3) == Change("add", "b", "1 of 3 members are there")
    assert next_change(of("ab"), [], ABC, 3) == Change("add", "c", "2 of 3 members are there")
    assert next_change(of("abc"), [], [*ABC, "d"], 3) is None


def test_without_a_node_it_waits() -> None:
    assert next_change({}, [], [], 3) is None
    assert next_change(of("a"), ["on-a"], [], 3) is None


def test_a_lost_member_is_removed_before_one_is_added() -> None:
    nodes = ["a", "c", "d"]
    assert next_change(of("abc"), ["on-b"], nodes, 3) == Change("remove", "on-b", "its node b is lost")
    assert next_change(of("ac"), [], nodes, 3) == Change("add", "d", "2 of 3 members are there")


def test_on_two_nodes_there_is_one_member_on_the_better_one() -> None:
    assert next_change(of("a"), [], ["a", "b"], 3) is None
    change = next_change(of("ab"), [], ["b", "a"], 3)
    assert change is not None
    assert (change.kind, change.subject) == ("remove", "on-a")


def test_without_a_majority_another_etcd_begins() -> None:
    change = next_change(of("abc"), ["on-a", "on-c"], ["b", "d"], 3)
    assert change == Change("begin", "b", "2 of 3 members are lost")
    assert next_change(of("ab"), ["on-a"], ["b"], 3) == Change("begin", "b", "1 of 2 members are lost")


def test_a_learner_counts_in_no_majority_and_one_that_was_not_promoted_goes() -> None:
    assert next_change(of("abc"), [], ABC, 3, ["on-c"]) == Change("remove", "on-c", "it was not promoted")
    change = next_change(of("abc"), ["on-b"], ABC, 3, ["on-c"])
    assert change == Change("begin", "a", "1 of 2 members are lost"), "of two with a vote each must live"
    assert next_change(of("ab"), ["on-a"], ["b"], 3, ["on-b"]) == Change("begin", "b", "1 of 1 members are lost")
    change = next_change(of("ab"), ["on-b"], ["a"], 3, ["on-b"])
    assert change is not None
    assert (change.kind, change.subject) == ("remove", "on-b")


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1), st.sampled_from([1, 3, 5]))
def test_it_settles_on_living_nodes_and_keeps_a_majority(worlds: list[set[str]], wanted: int) -> None:
    """`worlds`: the nodes that live, one set after the other; changes are carried out in each until none is left."""
    members: dict[str, str] = {}
    made = 0
    for world in worlds:
        nodes = sorted(world)
        for _ in range(20):
            lost = [name for name, node in members.items() if node not in world]
            change = next_change(members, lost, nodes, wanted)
            if change is None:
                break
            alive = len(members) - len(lost)
            if change.kind == "begin":
                assert 2 * alive <= len(members)
                members = {}
            if change.kind == "remove":
                del members[change.subject]
                left = alive - (change.subject not in lost)
                assert 2 * left > len(members)
            else:
                assert not lost or change.kind == "begin"
                made += 1
                members[f"m{made}"] = change.subject
        else:
            raise AssertionError("it does not settle")
        assert set(members.values()) <= world
        assert len(set(members.values())) == len(members) == (wanted if len(nodes) >= wanted else 1)
