"""Signals and what they raise. 1 of 40 SIGTERMs of a Trainer's script came within a lock of gRPC's: the script hung."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.ending import Interrupted, interruptible
from graphft.runtime.process.interrupts import Asked, uninterrupted


class TimedOut(Exception):
    pass


def timed_out(*_: object) -> None:
    raise TimedOut


@pytest.fixture(params=["SIGINT", "SIGTERM", "SIGALRM"])
def raises(request: pytest.FixtureRequest) -> Iterator[tuple[int, type[BaseException]]]:
    """A signal, and what its handler raises: Python's own, of a launch, of the user's."""
    number = signal.Signals[request.param]
    before = [(s, signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGALRM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, timed_out)
    yield number, {"SIGINT": KeyboardInterrupt, "SIGTERM": Interrupted, "SIGALRM": TimedOut}[request.param]
    for other, handler in before:
        signal.signal(other, handler)


def come_within(number: int, reached: list[str]) -> None:
    with uninterrupted():
        with uninterrupted():
            signal.raise_signal(number)
            reached.append("inner")
        reached.append("outer")


def test_what_a_handler_raises_comes_at_the_end(raises: tuple[int, type[BaseException]]) -> None:
    number, expected = raises
    reached: list[str] = []
    with suppress(Interrupted), interruptible(lambda: ""):  # whose end raises again what was caught in it
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
        with pytest.raises(expected):
            come_within(number, reached)
        assert {s: signal.getsignal(s) for s in before} == before
        with uninterrupted():
            reached.append("nothing is left of it")
    assert reached == ["inner", "outer", "nothing is left of it"]


def test_a_call_to_etcd_ends_before_a_signal_raises(
    etcd: Etcd, raises: tuple[int, type[BaseException]], monkeypatch: pytest.MonkeyPatch
) -> None:
    number, expected = raises
    ended = []
    call = etcd._kv.Range

    def during(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(number)
        ended.append(call(*arguments, **options))
        return ended[0]

    monkeypatch.setattr(etcd._kv, "Range", during)
    with suppress(Interrupted), interruptible(lambda: ""), pytest.raises(expected):
        etcd.get("key")
    assert ended, "the signal's exception came within the call"


def test_a_signal_may_come_within_the_wait_for_it() -> None:
    before, main, signals = signal.getsignal(signal.SIGUSR2), threading.get_ident(), 200
    asked, came = Asked(signal.SIGUSR2), 0

    def send() -> None:
        for _ in range(signals):
            signal.pthread_kill(main, signal.SIGUSR2)
            time.sleep(0.0001)  # for the main thread to go on

    sender = threading.Thread(target=send)
    sender.start()
    try:
        while sender.is_alive():
            came += asked.wait(0)
        while asked.wait(0):
            came += 1
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert 0 < came <= signals
    assert not asked.wait(0.001)
