"""A Ray that has died is not waited for without a word."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.runtime.engines.ray_address import choose_address, note_in


@pytest.fixture
def alive() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> Iterator[str]:
    """Nobody listens there, and nobody else gets the port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{server.getsockname()[1]}"


def noting(folder: Path, address: str, **variables: str) -> dict[str, str]:
    environment = {"RAY_TMPDIR": str(folder), **variables}
    file = note_in(environment)
    file.parent.mkdir(exist_ok=True)
    file.write_text(address)
    return environment


def test_one_that_is_noted_and_has_died_is_not_used(
    tmp_path: Path, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_address("", noting(tmp_path, dead)) == "local"
    file = tmp_path / "ray" / "ray_current_cluster"
    assert f"no Ray answers at {dead}, which {file} names: the job gets a Ray of its own" in caplog.text
    assert f"RAY_ADDRESS={dead}: it waits for that one" in caplog.text


def test_auto_waits_for_it_and_that_is_told(tmp_path: Path, dead: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_address("auto", noting(tmp_path, dead)) == "auto"
    assert choose_address("", noting(tmp_path, dead, RAY_ADDRESS="auto")) == "auto"
    assert caplog.text.count("delete that file") == 2


def test_so_it_does_for_one_that_the_user_has_named(
    tmp_path: Path, dead: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_address(dead, noting(tmp_path, "")) == dead
    assert choose_address("", noting(tmp_path, "", RAY_ADDRESS=dead)) is None  # ray.init takes the variable
    assert caplog.text.count(f"no Ray answers at {dead}; Ray waits for it") == 2


def test_nothing_is_said_otherwise(tmp_path: Path, alive: str, dead: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_address("", {"RAY_TMPDIR": str(tmp_path)}) is None
    assert choose_address("", noting(tmp_path, alive)) is None
    assert choose_address("auto", noting(tmp_path, alive)) == "auto"
    assert choose_address(alive, noting(tmp_path, dead)) == alive
    assert choose_address("", noting(tmp_path, dead, RAY_ADDRESS=alive)) is None
    assert choose_address("", noting(tmp_path, dead, RAY_ADDRESS="local")) is None
    for address in ("local", "ray://head:10001"):
        assert choose_address(address, noting(tmp_path, dead)) == address
    assert not caplog.records
