"""One captured program for all, a folder for all jobs, and no process of theirs left after any test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime import standby
from graphft.runtime.child_environment import role_environment
from tests.integration import training
from tests.integration.nursery import Nursery
from tests.integration.plays import Pace, Played, Program, await_gone, play


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which all jobs of these tests are."""
    return tmp_path_factory.mktemp("integration")


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Programs that the tests start come from there, and standbys of the jobs that this process launches."""
    nursery = Nursery({**os.environ, **role_environment(), "OPENBLAS_NUM_THREADS": "1"})
    process = nursery.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "spawn", nursery.spawn)
        patch.setattr(Program, "nursery", nursery, raising=False)
        yield
    nursery.close()
    process.wait()


@pytest.fixture(autouse=True)
def nothing_left(workplace: Path) -> Iterator[None]:
    yield
    assert not await_gone(workplace)


@pytest.fixture
def folder(workplace: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of the test's own, which does not exist yet."""
    return workplace / f"{request.module.__name__.rsplit('.', 1)[-1]}-{request.node.name}"


@pytest.fixture
def pace(workplace: Path, request: pytest.FixtureRequest) -> Pace:
    """How fast the test's job goes."""
    return Pace(workplace / f"{request.module.__name__.rsplit('.', 1)[-1]}-{request.node.name}.pace")


@pytest.fixture(scope="session")
def program() -> ir.Program:
    return training.program()


@pytest.fixture(scope="session")
def undisturbed(program: ir.Program, workplace: Path) -> Played:
    """Three trainers, two pservers, nothing happens."""
    return play(training.job(program), workplace / "undisturbed")
