"""Settings of every test: one thread per process, no network, and no process left behind."""

from __future__ import annotations

import gc
import os
import resource
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import psutil
import pytest
import torch

from tests.support.waiting import command_line

pytest_plugins = ["tests.support.etcd_servers", "tests.support.forks"]

torch.set_num_threads(1)
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

MARK = "GRAPHFT_TEST_SESSION"
DURATIONS = Path(__file__).parents[1] / ".pytest_cache" / "durations.txt"


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collected tests are never garbage: no time goes into looking for some in it, while it grows and in the tests."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


_seconds: Counter[str] = Counter()
"""By test: of its set-up, call and tear-down."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells what the tests cost, and keeps the list of what each took, longest first. Costing more CPU seconds than
    $GRAPHFT_CPU_BUDGET is a failure: a suite grows unnoticed otherwise."""
    cost = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu = sum(usage.ru_utime + usage.ru_stime for usage in (cost, own))
    files: Counter[str] = Counter()
    for node, seconds in _seconds.items():
        files[node.partition("::")[0]] += seconds
    longest = ", ".join(f"{Path(path).name} {seconds:.0f} s" for path, seconds in files.most_common(8))
    terminalreporter.write_line(f"cost: {cpu:.0f} CPU seconds; longest files: {longest}")
    budget = float(os.environ.get("GRAPHFT_CPU_BUDGET", "inf"))
    if cpu > budget:
        terminalreporter.write_line(f"the tests cost {cpu:.0f} CPU seconds, and their budget is {budget:.0f}", red=True)
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED  # type: ignore[union-attr]
    lines = [f"{seconds:8.2f} {node}" for node, seconds in _seconds.most_common()]
    DURATIONS.parent.mkdir(exist_ok=True)
    DURATIONS.write_text("\n".join(lines) + "\n")


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
