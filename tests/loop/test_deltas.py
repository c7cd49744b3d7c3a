"""What did not change since is not written again; what a version needs of earlier ones stays, and is checked."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import graphft
from graphft import TrainStatus
from graphft.disk import block_deltas
from graphft.disk.block_deltas import BLOCK, MAX_FILES
from graphft.runtime.cli import main
from graphft.runtime.loop.check_points import CheckPoints
from tests.loop.test_kills import die_at, loaded

pytestmark = pytest.mark.timeout(600)
ROWS, WIDTH = 8192, 64  # 2 MB: 256 rows in a block


class Tensors:
    """A state of any tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = dict(state)


def table() -> Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)


def sizes(path: Path) -> list[int]:
    """Bytes of the tensors' files, the oldest first."""
    return [p.stat().st_size for p in sorted(path.glob("*/*.safetensors"))]


def read(path: Path, version: int | None = None) -> dict[str, Tensor]:
    found = CheckPoints(str(path)).newest(version)
    assert found is not None
    state: dict[str, Tensor] = found.states["state"]
    return state


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever little is saved counts."""
    monkeypatch.setattr(block_deltas, "LEAST_SAVED", 0)
    monkeypatch.setattr(block_deltas, "LEAST_SHARE", 0.0)


def test_frozen_layers_are_written_once(tmp_path: Path) -> None:
    place = CheckPoints(str(tmp_path), keep=9)
    for number in range(4):
        state = {"frozen": table(), "head": torch.full((100,), float(number))}
        place.save(Tensors(state), TrainStatus(number))
        assert is_same(read(tmp_path), state)
    whole, *others = sizes(tmp_path)
    assert whole > 2_000_000
    assert max(others) < 12_000
    assert all(is_same(read(tmp_path, n), {**state, "head": torch.full((100,), float(n))}) for n in range(4))


def test_a_delta_is_listed_as_one(eager: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was said to have 0.0 MB."""
    place = CheckPoints(tmp_path)
    for number in range(2):
        place.save(Tensors({"frozen": table(), "head": torch.full((100,), float(number))}), TrainStatus())
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    _, delta, full = capsys.readouterr().out.splitlines()
    assert delta.endswith("(a delta, needs files of checkpoint-00000000)")
    assert " KB " in delta
    assert " 2.1 MB " in full


@pytest.mark.parametrize("processes", ["one", "many"])
def test_rows_that_were_not_touched(tmp_path: Path, processes: str) -> None:
    """Another process knows from the version that it has loaded of which blocks that consists."""
    place, rows = CheckPoints(str(tmp_path), keep=9), table()
    versions = []
    for step, touched in enumerate([[], [5], [5, 4000], [8191]]):
        rows[touched] += 1
        if processes == "many":
            place = CheckPoints(str(tmp_path), keep=9)
            place.load({"state": Tensors({})})
        place.save(Tensors({"table": rows}), TrainStatus(step=step))
        versions.append(rows.clone())
    _, *others = sizes(tmp_path)
    assert [size // BLOCK for size in others] == [1, 2, 1]
    assert all(torch.equal(read(tmp_path, n)["table"], versions[n]) for n in range(4))


@pytest.mark.parametrize("pieces", [block_deltas.MAX_PIECES, 9])
def test_rows_all_over_an_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Every second block changes, then every third. A tensor of too many pieces has what lies between."""
    monkeypatch.setattr(block_deltas, "MAX_PIECES", pieces)
    rows, versions, place = torch.arange(64 * BLOCK, dtype=torch.uint8), [], CheckPoints(str(tmp_path), keep=9)
    for step, every in enumerate((1, 2, 3, 5, 7)):
        rows[:: every * BLOCK] += 1
        place.save(Tensors({"table": rows}), TrainStatus(step))
        versions.append(rows.clone())
    if pieces > 64:
        assert [size // BLOCK for size in sizes(tmp_path)] == [64, 32, 22, 13, 10]
    assert all(torch.equal(read(tmp_path, n)["table"], versions[n]) for n in range(5))
    for manifest in place.store.manifests():
        tensors, _ = place.store.tensors_in(manifest, manifest.parts[0])
        assert len(tensors["state.table"].pieces) <= pieces


def test_a_file_without_others_is_one_for_everyone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    graphft.save_check_point(Tensors({"table": table()}), TrainStatus(), str(tmp_path))
    (file,) = tmp_path.glob("*/*.safetensors")
    assert torch.equal(load_file(file)["state.table"], table())


def test_what_is_needed_stays_when_its_version_goes(tmp_path: Path) -> None:
    frozen, place = {"frozen": table()}, CheckPoints(str(tmp_path), keep=2)
    for number in range(6):
        tensors = {**frozen, "head": torch.full((300_000,), float(number))}
        place.save(Tensors(tensors), TrainStatus(number))
    assert sorted(p.name for p in tmp_path.glob("*/*")) != []
    assert sorted(p.parent.name[-1] for p in tmp_path.glob("*/manifest.json")) == ["4", "5"]
    assert sorted(p.parent.name[-1] for p in tmp_path.glob("*/*.safetensors")) == ["0", "4", "5"]
    assert is_same(read(tmp_path), tensors)
    changed = {"frozen": table() + 1, "head": tensors["head"]}  # nothing of the first is needed any more
    for _ in range(2):
        place.save(Tensors(changed), TrainStatus(9))
    assert sorted(p.parent.name[-1] for p in tmp_path.glob("*/*.safetensors")) == ["5", "6", "7"]
    assert is_same(read(tmp_path), changed)


@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_damage_in_an_older_file_that_is_needed(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    """All that need it are damaged; the newest that does not is used."""
    first, place = {"frozen": table(), "head": torch.zeros(300_000)}, CheckPoints(str(tmp_path), keep=9)
    place.save(Tensors(first), TrainStatus(0))
    second = {"frozen": table() + 1, "head": torch.zeros(300_000) + 1}
    for epoch in (1, 2):
        place.save(Tensors(second), TrainStatus(epoch))
    (needed,) = tmp_path.glob("*1/*.safetensors")
    whole = needed.read_bytes()
    if harm == "missing":
        needed.unlink()
    else:
        needed.write_bytes(whole[:-1] if harm == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
    assert is_same(read(tmp_path), first)
    assert str(needed) in caplog.text
    assert "going back to checkpoint 0" in caplog.text


def test_a_needed_file_that_is_gone_before_a_save(tmp_path: Path) -> None:
    place, state = CheckPoints(str(tmp_path), keep=9), {"frozen": table()}
    place.save(Tensors(state), TrainStatus(0))
    shutil.rmtree(tmp_path / "checkpoint-00000000")
    place.save(Tensors(state), TrainStatus(1))
    assert is_same(read(tmp_path), state), "all was written again"


@given(seed=st.integers(0, 10**6), keep=st.integers(1, 3), new_process=st.floats(0, 1))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changes(
    eager: None, tmp_path_factory: pytest.TempPathFactory, seed: int, keep: int, new_process: float
) -> None:
    """Tensors come, go, change their shapes, dtypes, and bytes at any place; every version that is kept loads."""
    path, pick = tmp_path_factory.mktemp("any"), random.Random(seed)
    place, state, history = CheckPoints(str(path), keep=keep), dict[str, Tensor](), dict[int, dict[str, Tensor]]()
    for step in range(14):
        for name in "abcd":
            what = pick.random()
            if what < 0.15 or name not in state:
                count = pick.choice([0, 1, 20_000, 70_000])
                dtype = pick.choice([torch.float32, torch.bfloat16, torch.int64])
                state[name] = torch.randint(0, 100, (count,)).to(dtype)
            elif what < 0.2:
                state.pop(name)
            elif what < 0.6 and state[name].numel():
                value = state[name] = state[name].clone()
                for _ in range(pick.randint(1, 4)):
                    value[pick.randrange(len(value))] += 1
        if pick.random() < new_process:
            place = CheckPoints(str(path), keep=keep)
            if pick.random() < 0.5:
                assert place.load(Tensors({})) is not None or step == 0
        history[place.save(Tensors(dict(state)), TrainStatus(step=step))] = dict(state)
        there = sorted(int(p.parent.name[-8:]) for p in path.glob("*/manifest.json"))
        assert there == sorted(history)[-keep:]
        for version in there:
            assert is_same(read(path, version), history[version])
            found = CheckPoints(str(path)).store.manifest(version)
            assert len(found.needs) <= MAX_FILES


def test_kills_at_any_operation(eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in test_kills, where each save writes everything."""
    from tests.loop import test_kills

    class Partly(test_kills.Values):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "frozen": torch.arange(1000.0)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert torch.equal(state.pop("frozen"), torch.arange(1000.0))
            super().load_state_dict(state)

    monkeypatch.setattr(test_kills, "Values", Partly)
    path, place, newest = str(tmp_path), CheckPoints(str(tmp_path), keep=2), 1

    def save(number: int) -> None:
        place.save(Partly(number), TrainStatus(number), random_states=False)

    save(0)
    save(newest)
    for count in range(1, 200):
        number = count + 1
        killed = die_at(count, functools.partial(save, number))
        found = loaded(path)
        assert found in (newest, number)
        newest = found
        if not killed:
            break
    assert count > 20
    assert not killed
    assert sum(p.stat().st_size > 4000 for p in tmp_path.glob("*/*.safetensors")) >= 1
    needed = {name.split("/")[0] for v in (0, 1) for name in _needs(tmp_path)[v]}
    assert len(list(tmp_path.iterdir())) == 2 + len(needed - {p.parent.name for p in tmp_path.glob("*/manifest.json")})


def _needs(path: Path) -> list[dict[str, int]]:
    store = CheckPoints(str(path)).store
    return [store.manifest(v).needs for v in store.versions() if store.committed(v)]


def test_what_was_damaged_is_not_referred_to(tmp_path: Path) -> None:
    """A loop that went back by a version made the same values again; the new version referred to the damaged ones, and
    all later ones to it: of one flipped bit, which had been noticed, all was lost."""
    place, state = CheckPoints(str(tmp_path)), Tensors({"x": table()})
    place.save(state, TrainStatus(0))
    state.tensors = {"x": table() * 2}
    place.save(state, TrainStatus(1))
    _, newest = sorted(tmp_path.glob("*/*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[-1000] ^= 1
    newest.write_bytes(data)
    place = CheckPoints(str(tmp_path))
    assert place.load(Tensors({})) == TrainStatus(0)
    for _ in range(2):
        place.save(state, TrainStatus(1))
    assert is_same(read(tmp_path, 2), state.tensors)
    assert is_same(read(tmp_path, 3), state.tensors)
    whole, small = sizes(tmp_path)[-2:]
    assert whole > 2**21, "it refers to nothing"
    assert small < 2**16, "what is whole is referred to"
