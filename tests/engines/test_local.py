"""The engine of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphft
from graphft.runtime.engines.base import ENGINES, Run, engine_options
from graphft.runtime.engines.local import Local
from tests.engines.conformance import check

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_holds_for_every_engine(job_dir: Path, forks: bool) -> None:
    engine = Local(forks).open(Run(job_dir, str(job_dir), {"OMP_NUM_THREADS": "1"}))
    engine.prepare()
    try:
        check(engine, closes=False)
    finally:
        engine.close()


def test_an_engine_is_named() -> None:
    assert [type(engine_options(name)).__name__.lower() for name in ENGINES] == list(ENGINES)
    assert engine_options(Local(False)) == Local(False)
    with pytest.raises(graphft.GraphftError, match=r"there is no engine 'mesos'.*\n.*local, ray, slurm"):
        engine_options("mesos")
