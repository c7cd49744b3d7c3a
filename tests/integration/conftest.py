"""One captured program for all, a folder for all jobs, and no process of theirs left after any test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.ir import Program
from graphft.runtime import standby
from tests.integration import training
from tests.integration.nursery import Nursery
from tests.integration.plays import Pace, Played, await_gone, play


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which all jobs of these tests are."""
    return tmp_path_factory.mktemp("integration")


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[None]:
    """Standbys of the jobs that this process launches come from there."""
    nursery = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standby, "spawn", nursery.spawn)
        yield
    nursery.close()


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
def program() -> Program:
    return training.program()


@pytest.fixture(scope="session")
def undisturbed(program: Program, workplace: Path) -> Played:
    """Three trainers, two pservers, nothing happens."""
    return play(training.job(program), workplace / "undisturbed")
