"""The thread of a trainer that computes validations, at its end."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphft.runtime.etcd import EtcdError
from graphft.runtime.roles.trainer import validator as module
from graphft.runtime.roles.trainer.validator import Validator


class End:
    """The end of the process."""

    def __init__(self) -> None:
        self.closing, self.statuses = threading.Event(), list[int]()

    def now(self, status: int) -> None:
        self.statuses.append(status)


@pytest.mark.parametrize(("leaves", "statuses"), [(True, []), (False, [module.EXIT_FAILED])])
def test_a_batch_that_outlasts_its_trainers_end_is_no_failure(
    leaves: bool, statuses: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Blocks", lambda *_: None)
    job = SimpleNamespace(programs=SimpleNamespace(evaluation=SimpleNamespace(values={})))
    member: Any = SimpleNamespace(job=job, config=SimpleNamespace(device="cpu", validate=True))
    end: Any = End()
    validator = Validator(member, Path(), member, end)

    def batch(blocks: object) -> float:
        if leaves:
            end.closing.set()
        raise EtcdError("this etcd client is closed", rule="etcd-closed", help="")

    monkeypatch.setattr(validator, "_try", batch)
    validator.start()
    validator._thread.join(120)
    assert not validator._thread.is_alive()
    assert end.statuses == statuses
