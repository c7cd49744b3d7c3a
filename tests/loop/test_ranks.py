"""Each rank has for itself the generators that dropout draws from, its place in the data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import TrainStatus
from graphft.errors import GraphftError
from graphft.runtime.loop import snapshot as ranks
from graphft.runtime.loop.snapshot import PerRank

pytestmark = pytest.mark.timeout(600)


class Stream:
    """Batches that are drawn: what a StatefulDataLoader is to its user."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


RANK = """
import sys, torch, torch.distributed as dist, graphft
from tests.loop.test_ranks import Stream, state_of
rank, rendezvous, path = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
torch.manual_seed(100 + rank)
stream = Stream(rank)
state = state_of(stream)
graphft.save_check_point(state, graphft.TrainStatus(0), path, trainer_id=rank)
dist.barrier()
drawn = stream.next(), torch.rand(3)
assert graphft.load_check_point(state, path, trainer_id=rank) == graphft.TrainStatus(0)
assert torch.equal(stream.next(), drawn[0]) and torch.equal(torch.rand(3), drawn[1])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_of_two_ranks_goes_on_to_the_bit(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous"), str(tmp_path / "saved")], env=environment)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def state_of(stream: Stream) -> dict[str, Any]:
    return {"model": nn.Linear(2, 1), "ranks": PerRank(stream=stream)}


def test_one_process_is_one_rank(tmp_path: Path) -> None:
    stream = Stream(3)
    graphft.save_check_point(state_of(stream), TrainStatus(0), tmp_path)
    drawn, random = stream.next(), torch.rand(3)
    assert graphft.load_check_point(state_of(stream), tmp_path) == TrainStatus(0)
    assert torch.equal(stream.next(), drawn)
    assert torch.equal(torch.rand(3), random)


def test_what_does_not_fit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphft.save_check_point(state_of(Stream(0)), TrainStatus(0), tmp_path)
    other = {"model": nn.Linear(2, 1), "ranks": PerRank()}
    before, random = other["model"].weight.clone(), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(GraphftError, match=r"^error\[checkpoint-fit\]"):
            graphft.load_check_point(other, tmp_path)
        assert torch.equal(other["model"].weight, before)
        assert torch.equal(torch.get_rng_state(), random)
        other["ranks"] = PerRank(stream=Stream(0))
        monkeypatch.setattr(ranks, "_rank_and_count", lambda: (1, 2))


def test_a_rank_whose_state_cannot_be_saved_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_all_gather", lambda data: [data, b""])
    with pytest.raises(GraphftError, match="rank 1"):
        PerRank().state_dict()

    class Odd(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": object()}

    sent: list[bytes] = []
    monkeypatch.setattr(ranks, "_all_gather", lambda data: sent.append(data) or [data])
    with pytest.raises(GraphftError, match=r"stream\.generator"):
        PerRank(stream=Odd(0)).state_dict()
    assert sent == [b""]


def test_other_ranks_take_part_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(ranks, "_all_gather", lambda data: sent.append(data) or [data])
    assert graphft.save_check_point(state_of(Stream(1)), TrainStatus(0), tmp_path, trainer_id=1) is None
    assert len(sent) == 1
    assert not list(tmp_path.iterdir())
