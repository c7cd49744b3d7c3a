"""One captured program for all, a folder for all jobs, and no process of theirs left after any test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphft import ir
from tests.integration import training
from tests.integration.plays import Pace, Played, Program, await_gone, play
from tests.support.forks import forked_from
from tests.support.nursery import Nursery


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which all jobs of these tests are."""
    return tmp_path_factory.mktemp("integration")


@contextmanager
def at_work(nursery: Nursery) -> Iterator[None]:
    """Programs that are started come from there, too."""
    with forked_from(nursery) as patch:
        patch.setattr(Program, "nursery", nursery, raising=False)
        yield


@pytest.fixture(autouse=True)
def forks(nursery: Nursery) -> Iterator[None]:
    """In these tests only: others, which the same process runs, look at what is started."""
    with at_work(nursery):
        yield


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
def undisturbed(program: ir.Program, workplace: Path, nursery: Nursery) -> Played:
    """Three trainers, two pservers, nothing happens."""
    with at_work(nursery):
        return play(training.job(program), workplace / "undisturbed")
