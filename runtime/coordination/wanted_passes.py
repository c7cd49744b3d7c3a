"""How many passes of a job are wanted so far: of one whose passes are on demand, trainers begin no others."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from graphft.errors import UsageError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError, Store

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


def check_asked_for(config: JobConfig, job: object, instead: str) -> None:
    """Raises UsageError for a job that would wait for ever without the script that asks for its epochs."""
    if config.passes_on_demand:
        raise UsageError(
            f"{job} is the job of a graphft.Trainer: its script asks for the epochs, one by one, and nobody else does",
            rule="on-demand",
            help=instead,
        )


class WantedPasses:
    """The record of one launch, in which it only grows; who has lost it with etcd's data gets it again from `keep`."""

    def __init__(self, etcd: Store, keys: Keys, count: int) -> None:
        self.etcd, self.keys, self.count = etcd, keys, count

    def begin(self) -> None:
        """As the launch begins: what one before it wanted, which was interrupted, is not wanted any more. Another one
        that is at work keeps its own. Raises EtcdError."""
        self.etcd.put(self.keys.wanted_passes, str(self.count).encode())

    def want(self, count: int) -> None:
        """Passes before `count` may begin from now on. Raises EtcdError: `keep` tries again."""
        self.count = max(self.count, count)
        kv = self.etcd.get(self.keys.wanted_passes)
        if kv is None or int(kv.value) < self.count:
            self.etcd.put(self.keys.wanted_passes, str(self.count).encode())

    def keep(self) -> None:
        """To be called now and then."""
        with contextlib.suppress(EtcdError):
            self.want(self.count)
