"""Checkpoints on S3, over its real protocol: the commit is a conditional put."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

import graphft
from graphft import TrainStatus
from graphft.runtime.fs import FS, file_system
from graphft.runtime.loop.check_points import CheckPoints
from tests.loop.loops import Loop
from tests.support.creating import create_together
from tests.support.s3_server import s3_server

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto")), reason="s3fs or moto is not installed"
    ),
]


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    with s3_server("bucket") as options:
        yield options


@pytest.fixture
def place(options: dict[str, Any], request: pytest.FixtureRequest) -> tuple[FS, str]:
    return file_system(f"s3://bucket/{request.node.name}", options)


def test_of_those_that_create_an_object_one_does(place: tuple[FS, str]) -> None:
    fs, root = place
    first = create_together(fs, f"{root}/a")
    with fs.open(f"{root}/a") as file:
        assert file.read() == bytes([first])
    assert not fs.create(f"{root}/a", b"late")


def test_what_fails_while_it_is_written_does_not_come_to_be(place: tuple[FS, str]) -> None:
    fs, root = place

    def fail() -> None:
        with fs.writing(f"{root}/a") as file:
            file.write(bytes(12 << 20))  # more than one part of a multipart upload
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not fs.stat(f"{root}/a")
    with fs.writing(f"{root}/a") as file:
        file.write(bytes(12 << 20))
    assert fs.size(f"{root}/a") == 12 << 20


def test_old_ones_go(place: tuple[FS, str]) -> None:
    fs, root = place
    for epoch in range(4):
        CheckPoints(root, fs, keep=2).save(Loop().state, TrainStatus(epoch))
    assert fs.ls_dir(root) == ["checkpoint-00000002", "checkpoint-00000003"]
    assert graphft.load_check_point(Loop().state, root, fs) == TrainStatus(3)
