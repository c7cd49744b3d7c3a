"""Real trainers on a real etcd that do not run: a test plays their main thread, and what the shards say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from graphft.ops.context import ClaimTerms
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.protocol.events import FromShard, Rollback, ShardUp
from graphft.runtime.protocol.messages import Welcome
from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer, UnitTrainer
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.transpiler.job import Job
from tests.support.patient import Patient
from tests.support.waiting import until

TERMS = ClaimTerms(max_failures=1, max_discarded=99)


class Interposed:
    """A real etcd client. `before_txn` and `after_txn` run, once, around a transaction that changes something."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd = etcd
        self.before_txn: Callable[[], None] | None = None
        self.after_txn: Callable[[], None] | None = None

    def txn(self, compare: Any, success: Any, *args: Any, **kwargs: Any) -> Any:
        changes = any(op.kind in ("put", "delete") for op in success)
        if changes and self.before_txn is not None:
            self._once("before_txn")
        result = self.etcd.txn(compare, success, *args, **kwargs)
        if changes and self.after_txn is not None:
            self._once("after_txn")
        return result

    def _once(self, name: str) -> None:
        action = getattr(self, name)
        setattr(self, name, None)
        action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.etcd, name)


class Stage:
    """The trainers of one job, and its records."""

    def __init__(self, stack: ExitStack, server: EmbeddedEtcd, keys: Keys, job: Job, folder: Path) -> None:
        self.stack, self.server, self.keys, self.folder = stack, server, keys, folder
        # Nobody renews the leases: no daemon block runs.
        self.job = Job(job.source, job.config.replace(name=keys.job, lease_ttl=600), job.programs)
        self.etcd = stack.enter_context(Patient(server.endpoints))
        put_job(self.etcd, keys, self.job)

    def begun(self) -> Stage:
        """A sync job's first generation is there."""
        self.etcd.put(self.keys.generation, msgspec.json.encode(Generation()))
        return self

    def trainer(self, index: int) -> Any:
        """A registered trainer; its `etcd.store` is interposed."""
        config = self.job.config
        kind = SlotTrainer if config.sync else UnitTrainer if config.local else ChunkTrainer
        trainer = kind(self.job, self.folder, Interposed(Patient(self.server.endpoints)), index)  # type: ignore[arg-type]
        self.stack.callback(trainer.transport.close)
        self.stack.callback(trainer.close)
        self.stack.callback(trainer.prefetcher.close)
        trainer.session.register(role="trainer", index=index, lease=True)
        until(lambda: trainer.member.id in trainer.member.view.trainers)
        return trainer

    def records(self, pass_index: int = 0) -> dict[str, set[int]]:
        """Chunk numbers by kind of record; kinds that there are none of are discarded."""
        found: dict[str, set[int]] = {}
        for kv in self.etcd.range(self.keys.queue(pass_index), keys_only=True).kvs:
            kind, chunk = kv.key.removeprefix(self.keys.queue(pass_index)).split("/")
            found.setdefault(kind, set()).add(int(chunk))
        return found


Staged = Callable[[Job], Stage]


def shards_at(trainer: Any, version: int, generation: int = 0) -> None:
    """The trainer hears from all of its shards that they are at this version."""
    comm = trainer.comm
    if trainer.shards.machine is None:
        comm.control(Rollback(generation, 0))
    for shard in range(trainer.config.pservers):
        comm.do(ShardUp(shard, f"incarnation {shard}"))
        comm.do(FromShard(shard, Welcome(shard, f"incarnation {shard}", generation, version)))
