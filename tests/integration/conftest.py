"""One captured program for all, a folder for all jobs, and no process of theirs left after any test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from graphft import ir
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, Program, await_gone, play
from tests.support.forks import forked_from
from tests.support.nursery import Nursery


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder below which the jobs are that several tests look at."""
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
def nothing_left(workplace: Path, tmp_path: Path) -> Iterator[None]:
    yield
    assert not await_gone(workplace) + await_gone(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own, which does not exist yet; where the test passed, pytest deletes it right after: the
    jobs of all tests take 10 GB, most of it etcd's logs."""
    return tmp_path / "job"


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace")


@pytest.fixture(scope="session")
def program() -> ir.Program:
    return training.program()


@pytest.fixture(scope="session")
def undisturbed(program: ir.Program, workplace: Path, nursery: Nursery) -> Played:
    """Three trainers, two pservers, nothing happens. It goes slowly until its age of a checkpoint has been seen."""
    pace = Pace(workplace / "pace")
    seen = Act(
        lambda s: bool(s.learning_rates and s.checkpoint and s.checkpoint_age is not None), lambda _: pace.set(0)
    )
    with at_work(nursery):
        return play(training.job(program, pace=pace.file), workplace / "undisturbed", [seen])
