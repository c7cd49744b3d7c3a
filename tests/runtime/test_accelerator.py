"""A process takes a GPU of its own; `make gpu` runs where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from graphft.errors import UsageError
from graphft.runtime.execute import accelerator


def test_each_process_has_a_device_of_its_own_while_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accelerator, "_held", [])  # closed, and so unlocked, when this test ends
    monkeypatch.setattr(accelerator, "_name", lambda kind, index: f"test-{index}")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "find_device", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    assert [accelerator.own_device("cuda", number) for number in (1, 2)] == ["cuda:1", "cuda:0"]
    assert "shared" not in caplog.text
    assert accelerator.own_device("cuda", 5) == "cuda:1"
    assert "1 is shared" in caplog.text
    assert [accelerator.own_device(device, 0) for device in ("cpu", "cuda:1")] == ["cpu", "cuda:1"]


def test_a_role_ends_where_its_device_is_missing() -> None:
    with pytest.raises(UsageError, match=r"compute on cuda:99, which is not on \S+ with torch") as caught:
        accelerator.own_device("cuda:99", 0)
    assert (caught.value.rule, "run it where there is one" in caught.value.help) == ("device", True)


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_make_gpu_without_one() -> None:
    rows = ["bits", "copies", "kills", "pservers"]
    done = subprocess.run([sys.executable, "-m", "tests.gpu", *rows], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no GPU; ") == len(rows), done.stdout
