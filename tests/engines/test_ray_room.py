"""What no node could take is told in words."""

from __future__ import annotations

from graphft.runtime.engines.ray_room import is_among, what_lacks

SMALL, GPU = {"CPU": 2.0, "memory": 4.0}, {"CPU": 1.0, "GPU": 1.0, "node:10.0.0.1": 1.0}


def test_a_node_that_could_take_it_lacks_nothing() -> None:
    assert what_lacks({"CPU": 2}, [GPU, SMALL]) == ""
    assert what_lacks({"CPU": 1, "GPU": 0.5}, [SMALL, GPU]) == ""
    assert what_lacks({"CPU": 0, "fast_disk": 0}, [SMALL]) == ""
    assert what_lacks({}, [{}]) == ""


def test_what_none_has_is_named_and_the_most_that_one_has() -> None:
    assert what_lacks({"CPU": 4, "GPU": 1}, [SMALL, GPU]) == "no node of this Ray has CPU: 4, the largest has CPU: 2"
    told = "no node of this Ray has CPU: 4, GPU: 1, the largest has CPU: 2, GPU: 0"
    assert what_lacks({"CPU": 4, "GPU": 1, "memory": 1}, [SMALL]) == told


def test_what_different_nodes_have() -> None:
    assert what_lacks({"CPU": 2, "GPU": 1}, [SMALL, GPU]) == "no node of this Ray has CPU: 2, GPU: 1 together"


def test_without_nodes() -> None:
    assert what_lacks({"CPU": 1}, []) == "there is no node"


def test_a_demand_is_known_by_what_it_takes() -> None:
    assert is_among({"CPU": 1, "GPU": 1 / 3, "disk": 0}, [{"CPU": 1.0}, {"CPU": 1.0, "GPU": 0.3333}])
    assert not is_among({"CPU": 1}, [{"CPU": 0.5}, {"CPU": 1.0, "GPU": 0.3333}])
    assert not is_among({"CPU": 1}, [])
