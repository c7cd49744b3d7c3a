"""Checkpoints of a Trainer's run that are damaged, gone, or put in the place of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import graphft
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.launcher.folder_status import look_at
from tests.driver import epochs
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


def looks_at(trainer: graphft.Trainer, folder: Path, state: dict[str, Any]) -> list[Callable[[], object]]:
    """What a script does with the newest checkpoint."""
    return [
        *(lambda: trainer.epoch, trainer.train, trainer.validate, trainer.state_dict),
        *(lambda: trainer.save(folder), lambda: trainer.load_state_dict(state)),
    ]


@pytest.mark.slow
def test_checkpoints_that_are_gone_are_no_beginning(tmp_path: Path) -> None:
    """Neither are they for the next script, even where etcd has forgotten the run."""
    trainer = epochs.trainer(tmp_path / "job", validation=epochs.validation())
    trainer.train(epochs=2)
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    trainer.shutdown()
    (tmp_path / "job" / "checkpoints").rename(tmp_path / "away")
    another = epochs.trainer(tmp_path / "job", validation=epochs.validation())
    for one, what in (
        (trainer, f"step {2 * epochs.PER_EPOCH} is gone, or damaged: .* holds no"),
        (another, "was there when it was trained last is gone"),
    ):
        for call in looks_at(one, tmp_path / "saved", state):
            with pytest.raises(graphft.GraphftError, match=what):
                call()
    assert not (tmp_path / "saved").exists()
    assert "its checkpoints are gone, or damaged: bring them back" in look_at(tmp_path / "job").describe()
    (tmp_path / "away").rename(tmp_path / "job" / "checkpoints")
    assert another.train()["epoch"] == 3
    another.shutdown()
    assert trainer.epoch == 3


@pytest.mark.slow
def test_a_damaged_checkpoint_is_no_state_of_the_epoch(tmp_path: Path) -> None:
    with epochs.trainer(tmp_path / "job", checkpoint_every=100) as trainer:
        trainer.train(epochs=2)
        newest = max((tmp_path / "job" / "checkpoints").glob("step-*"), key=lambda folder: folder.stat().st_mtime)
        for part in newest.glob("*.safetensors"):
            part.write_bytes(b"damaged" * 9)
        for look in (trainer.state_dict, lambda: trainer.validate(epochs.validation())):
            with pytest.raises(graphft.GraphftError, match=r"of step 12, epoch 2, is damaged: .* of step 6, epoch 1"):
                look()
        assert trainer.train()["epoch"] == 3
        assert trainer.state_dict()["epoch"] == 3


@pytest.mark.slow
def test_a_state_that_was_loaded_is_not_replaced_by_the_one_before(tmp_path: Path) -> None:
    """Its checkpoint is of the same step as the one whose place it took."""
    options = {"validation": epochs.validation()}
    with epochs.trainer(tmp_path / "job", **options) as trainer:
        trainer.train()
        state = trainer.state_dict()
        state["model"] = {name: torch.zeros_like(value) for name, value in state["model"].items()}
        trainer.load_state_dict(state)
    (loaded,) = (tmp_path / "job" / "checkpoints").glob("step-*.g1")
    shutil.copytree(loaded, tmp_path / "copy")
    for part in loaded.glob("*.safetensors"):
        data = part.read_bytes()
        part.write_bytes(data[:-4] + b"abcd")
    for one in trainer, epochs.trainer(tmp_path / "job", **options):
        for look in (one.state_dict, one.validate, lambda: one.save(tmp_path / "saved")):  # noqa: B023
            with pytest.raises(graphft.GraphftError, match=r"error\[checkpoint\]"):
                look()
    command = [sys.executable, "-m", "tests.driver.epochs", str(tmp_path / "job"), "2"]
    with (tmp_path / "told").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as again:
        until(lambda: "where a state was loaded in the place of" in (tmp_path / "told").read_text())
        for part in (tmp_path / "copy").glob("*.safetensors"):  # which the pservers read meanwhile
            part.replace(loaded / part.name)
        assert again.wait(120) == 0, (tmp_path / "told").read_text()
    assert not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_what_does_not_fit_is_forgotten_nowhere(tmp_path: Path) -> None:
    """Etcd's records stay, which know what was discarded, and the newest checkpoint is the newest."""
    with epochs.trainer(tmp_path / "job") as trainer:
        trainer.train()
        state = trainer.state_dict()
        state["optimizer"] = {"0.weight": {"exp_avg": torch.zeros(6, 16)}}
        with pytest.raises(graphft.GraphftError, match=r"exp_avg of 0.weight does not fit: .* of shape \[6, 16\]"):
            trainer.load_state_dict(state)
        assert (tmp_path / "job" / "etcd").exists()
        assert trainer.train()["epoch"] == 2


def test_a_load_forgets_no_other_run_of_the_name(tmp_path: Path, etcd_server: EmbeddedEtcd) -> None:
    """Which is unfinished, in another folder: `train()` is refused beside it, and so is this."""
    options = {"name": f"two{os.getpid()}", "etcd_endpoints": tuple(etcd_server.endpoints)}
    keys = Keys(str(options["name"]))
    with epochs.trainer(tmp_path / "one", **options) as one:
        one.train()
        values = one.state_dict()["model"]
    with Etcd(etcd_server.endpoints) as etcd:
        spec = etcd.get(keys.spec)
        assert spec is not None
        another = msgspec.json.encode(msgspec.json.decode(spec.value) | {"run": "ffff", "folder": ""})
        etcd.put(keys.spec, another)
        with pytest.raises(graphft.GraphftError, match=r"error\[foreign-job\](?s:.*)it is unfinished"):
            one.load_state_dict(values)
        left = etcd.get(keys.spec)
        assert left is not None
        assert left.value == another
        etcd.put(keys.spec, spec.value)
    one.load_state_dict(values)
