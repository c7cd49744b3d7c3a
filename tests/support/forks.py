"""Fixtures: processes of a job's tests are forks of one that has imported torch (`nursery.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graphft.runtime.engines import local
from graphft.runtime.process.role_process import role_environment
from tests.support.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery({**os.environ, **role_environment(), "OPENBLAS_NUM_THREADS": "1"})
    process = nursery.start()
    yield nursery
    nursery.close()
    process.wait()


@contextmanager
def forked_from(nursery: Nursery) -> Iterator[pytest.MonkeyPatch]:
    """Fork servers of jobs that this process launches come from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "spawn", nursery.spawn)
        yield patch


@pytest.fixture(scope="module")
def forks(nursery: Nursery) -> Iterator[None]:
    """For a module's tests: others, which the same process runs, look at what is started."""
    with forked_from(nursery):
        yield
