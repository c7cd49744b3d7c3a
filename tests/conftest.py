"""Settings of every test: one thread per process, no network, and no process left behind."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator

# Before torch is imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import psutil
import pytest
import torch

from tests.support.processes import command_line
from tests.support.slow import is_slow

pytest_plugins = ["tests.support.etcd_servers", "tests.support.forks"]

torch.set_num_threads(1)
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

MARK = "GRAPHFT_TEST_SESSION"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected is never garbage: no time goes into looking for some in it, while it grows and in the tests."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the session when a process started by a test outlives it, children of children included.

    Every process that a test starts inherits a mark in its environment, so orphans are found as well. Runs first
    of the session's fixtures, and hence ends last: a server shared by the session's tests is gone by then.
    """
    mark = os.environ[MARK] = uuid.uuid4().hex
    yield
    left = _marked(mark)
    _, left = psutil.wait_procs(left, timeout=60)
    report = [f"{p.pid}: {' '.join(command_line(p)) or '(zombie)'}" for p in left]
    for p in left:
        p.kill()
    assert not report, "processes left behind by the tests:\n" + "\n".join(report)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for p in psutil.process_iter():
        try:
            marked = p.environ().get(MARK) == mark and p.pid != os.getpid()
            if marked and "multiprocessing.resource_tracker" not in " ".join(command_line(p)):
                found.append(p)
        except psutil.Error:  # ended meanwhile, or not ours to read
            continue
    return found
