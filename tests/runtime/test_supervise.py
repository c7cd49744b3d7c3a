"""What the launcher makes of a job's status while it looks after the processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdUnreachable
from graphft.runtime.launcher import supervise as module
from graphft.runtime.launcher.supervise import _registered, why_failed
from graphft.runtime.process.identity import Identity
from graphft.runtime.roles.environment import ROLES


def test_who_is_registered_of_each_role() -> None:
    """A frozen coordinator is replaced as others are, and one that is registered is not."""
    identities = {role: Identity(pid=pid) for pid, role in enumerate(ROLES, 1)}
    members = {f"{role}s": {"x": {"process": msgspec.to_builtins(found)}} for role, found in identities.items()}
    status = replace(JobStatus("j", "running", {}, 0, 0, 0, None), **members)
    assert _registered(status) == set(identities.values())


def test_the_last_look_waits_for_an_etcd_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose processes had all ended well was called failed: the only look that saw it complete had a second."""
    deadlines: list[float] = []

    def read(etcd: Any, keys: Any, *, deadline: float, brief: bool, begins: int) -> JobStatus:
        deadlines.append(deadline)
        if deadline < 5.0:
            raise EtcdUnreachable("no answer")
        return JobStatus("j", "complete", {}, 0, 0, 0, None)

    monkeypatch.setattr(module, "read_status", read)
    ended: Any = SimpleNamespace(all_done=True, failed="")
    etcd: Any = SimpleNamespace(is_full=lambda: False)
    last = module.supervise(ended, etcd, Keys("j"), lambda *_: None, None, False, 0)
    assert (last is not None, why_failed(ended, last), len(deadlines)) == (True, "", 1)
