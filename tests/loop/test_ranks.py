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
from graphft.runtime.loop.ranks import RankStates, gather_rank_states
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


def test_all_ranks_go_on_to_the_bit(tmp_path: Path) -> None:
    wanted = [line.partition(": ")[2] for line in run(tmp_path / "undisturbed", tmp_path / "r0")]
    assert all(wanted), "each has a checksum"
    assert wanted[0] != wanted[1], "each rank draws its own"
    run(tmp_path / "killed", tmp_path / "r1", kill_at=8)
    found = run(tmp_path / "killed", tmp_path / "r2")
    assert [line.partition(": ")[2] for line in found] == wanted, found


def saved(tmp_path: Path, *, count: int = 1, **options: Any) -> tuple[dict[str, Any], Stream]:
    """A checkpoint that so many ranks have saved; objects to load it into."""
    state, stream = {"model": nn.Linear(2, 1)}, Stream(3)
    one = gather_rank_states({"stream": stream}).states
    graphft.CheckPoints(str(tmp_path)).save(state, TrainStatus(0), ranks=RankStates(one * count), **options)
    return state, stream


def test_one_process_is_one_rank(tmp_path: Path) -> None:
    state, stream = saved(tmp_path)
    drawn, random = stream.next(), torch.rand(3)
    assert graphft.load_check_point(state, str(tmp_path), per_rank={"stream": stream}) == TrainStatus(0)
    assert torch.equal(stream.next(), drawn)
    assert torch.equal(torch.rand(3), random)


def test_generators_of_a_rank_need_no_objects(tmp_path: Path) -> None:
    state = {"model": nn.Linear(2, 1)}
    graphft.save_check_point(state, TrainStatus(0), str(tmp_path), per_rank={})
    random = torch.rand(3)
    graphft.load_check_point(state, str(tmp_path))
    assert torch.equal(torch.rand(3), random)


@pytest.mark.parametrize(
    ("count", "rank", "names", "message"),
    [
        (2, 0, ["stream"], "2 ranks have saved their states of stream, and there are 1"),
        (2, 2, [], "2 ranks have saved their states, and this is rank 2"),
        (1, 0, [], "it has stream of each rank, which per_rank= lacks"),
        (1, 0, ["stream", "other"], "other is not in the checkpoint"),
        (0, 0, ["stream"], "it was saved without per_rank="),
    ],
)
def test_what_does_not_fit_is_told_and_changes_nothing(
    tmp_path: Path, count: int, rank: int, names: list[str], message: str
) -> None:
    if count:
        state, _ = saved(tmp_path, count=count)
    else:
        state = {"model": nn.Linear(2, 1)}
        graphft.save_check_point(state, TrainStatus(0), str(tmp_path))
    other = {"model": nn.Linear(2, 1)}
    before, random = other["model"].weight.clone(), torch.get_rng_state()
    with pytest.raises(GraphftError, match=message):
        graphft.load_check_point(
            other, str(tmp_path), trainer_id=rank, per_rank={name: Stream(0) for name in names} if names else None
        )
    assert torch.equal(other["model"].weight, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert graphft.load_check_point(other, str(tmp_path), trainer_id=rank, random_states=False) == TrainStatus(0)
    assert torch.equal(other["model"].weight, state["model"].weight)


def test_mistakes_are_told(tmp_path: Path) -> None:
    state, stream = {"model": nn.Linear(2, 1)}, Stream(0)
    with pytest.raises(GraphftError, match=r"trainer_id is 1, and this is rank 0 of torch\.distributed"):
        graphft.save_check_point(state, TrainStatus(0), str(tmp_path), trainer_id=1, per_rank={})
    with pytest.raises(GraphftError, match=r"state\['stream'\] is a int, which has no state_dict"):
        graphft.save_check_point(state, TrainStatus(0), str(tmp_path), per_rank={"stream": 3})  # type: ignore[dict-item]
    saved(tmp_path)
    with pytest.raises(GraphftError, match="model is in the state and in per_rank"):
        graphft.load_check_point(state, str(tmp_path), per_rank={"model": stream})


def test_a_rank_whose_state_cannot_be_saved_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in the exchange, so that no other rank waits for ever."""
    monkeypatch.setattr(ranks, "_all_gather", lambda data: [data, b""])
    with pytest.raises(GraphftError, match="rank 1 has a state that cannot be saved, so no rank saves"):
        gather_rank_states()

    class Odd(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": object()}

    sent: list[bytes] = []
    monkeypatch.setattr(ranks, "_all_gather", lambda data: sent.append(data) or [data])
    with pytest.raises(GraphftError, match=r"stream\.generator cannot be saved"):
        gather_rank_states({"stream": Odd(0)})
    assert sent == [b""]
