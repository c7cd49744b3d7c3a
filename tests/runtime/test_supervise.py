"""What the launcher makes of a job's status while it looks after the processes."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.supervise import _registered
from graphft.runtime.process.identity import Identity
from graphft.runtime.roles.environment import ROLES


def test_who_is_registered_of_each_role() -> None:
    """A frozen coordinator is replaced as others are, and one that is registered is not."""
    identities = {role: Identity(pid=pid) for pid, role in enumerate(ROLES, 1)}
    members = {f"{role}s": {"x": {"process": msgspec.to_builtins(found)}} for role, found in identities.items()}
    status = replace(JobStatus("j", "running", {}, 0, 0, 0, None), **members)
    assert _registered(status) == set(identities.values())
