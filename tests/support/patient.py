"""An etcd client for tests that are not about time: it waits for an answer however early the product gives up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from graphft.runtime.etcd import Etcd

SECONDS = 60.0


class Patient(Etcd):
    """A `deadline` shorter than its own does not count, for much of the product gives up after a second by design, and
    does without a record that the test then misses. A try is long, too: etcd may have applied one that it answered
    late, and then the next try finds that done. For an etcd that the test neither stops nor freezes."""

    def __init__(self, *arguments: Any, timeout: float = 20.0, deadline: float = SECONDS, **rest: Any) -> None:
        super().__init__(*arguments, timeout=timeout, deadline=deadline, **rest)

    def ping(self, deadline: float = SECONDS) -> None:
        super().ping(max(deadline, self.deadline))


def _patiently(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(self: Patient, *arguments: Any, deadline: float | None = None, **rest: Any) -> Any:
        return method(self, *arguments, deadline=max(deadline or 0.0, self.deadline), **rest)

    return called


KEYS = ("get", "range", "count", "put", "delete", "delete_prefix", "txn")
LEASES = ("lease_grant", "lease_keepalive_once", "lease_revoke")
for _name in (*KEYS, *LEASES):
    setattr(Patient, _name, _patiently(getattr(Etcd, _name)))
