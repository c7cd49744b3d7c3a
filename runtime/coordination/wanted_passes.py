"""How many passes of a job are wanted so far: of one whose passes are on demand, trainers begin no others."""

from __future__ import annotations

import contextlib

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError, Store


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
