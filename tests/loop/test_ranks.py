"""What each rank has for itself: the generators that dropout draws from, its place in the data."""

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
from graphft.runtime.loop import ranks
from graphft.runtime.loop.ranks import PerRank
from tests.loop.ranks_loop import Stream

pytestmark = pytest.mark.timeout(600)


def run(folder: Path, rendezvous: Path, kill_at: int = -1) -> list[str]:
    """What the two ranks print. When one is killed, the other fails, or is killed too."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.loop.ranks_loop", str(folder), str(rendezvous), str(kill_at)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if kill_at < 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [started[0].communicate()[0]]
        if kill_at >= 0:
            started[1].kill()
        return [*printed, started[1].communicate()[0]]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_all_ranks_go_on_to_the_bit(tmp_path: Path) -> None:
    wanted = [line.partition(": ")[2] for line in run(tmp_path / "undisturbed", tmp_path / "r0")]
    assert all(wanted), "each has a checksum"
    assert wanted[0] != wanted[1], "each rank draws its own"
    run(tmp_path / "killed", tmp_path / "r1", kill_at=8)
    found = run(tmp_path / "killed", tmp_path / "r2")
    assert [line.partition(": ")[2] for line in found] == wanted, found


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
        with pytest.raises(GraphftError) as caught:
            graphft.load_check_point(other, tmp_path)
        assert caught.value.rule == "checkpoint-fit"
        assert torch.equal(other["model"].weight, before)
        assert torch.equal(torch.get_rng_state(), random)
        other["ranks"] = PerRank(stream=Stream(0))
        monkeypatch.setattr(ranks, "_rank_and_count", lambda: (1, 2))


def test_a_rank_whose_state_cannot_be_saved_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in the exchange, so that no other rank waits for ever."""
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
