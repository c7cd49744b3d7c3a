"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Returns what a command that must fail says; it must say nothing else."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    if "launch" in arguments:  # which says first what is run
        err = err.removeprefix(f"new run in {arguments[-1]}\n")
    assert err.startswith("error[")
    assert "help: " in err
    return err


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(a) for a in arguments]) == 0
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.endswith("makes the job's records")]  # of the tests' Dataset
    assert not told
    return out
