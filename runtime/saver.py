"""Writing checkpoints beside the steps: one background thread per shard."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphft.fileio import write_atomically
from graphft.runtime.checkpoint import DamagedCheckpoint, to_bytes
from graphft.runtime.commit import Commits, Committed, decode_committed
from graphft.runtime.etcd import EtcdError, put_op, value_is
from graphft.runtime.events import Events

if TYPE_CHECKING:
    from graphft.transpiler import Job

RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Snapshot:
    generation: int
    step: int
    values: Mapping[str, Tensor]
    ledger: str
    keep: int
    meta: Mapping[str, Any]


class Saver:
    """Writes this shard's parts in order, and commits a checkpoint when its part was the last.

    While etcd does not answer the thread retries: a checkpoint is late then, never lost silently. An unexpected
    error ends the thread, and `check` raises it in the shard's loop.
    """

    def __init__(self, commits: Commits, events: Events, job: Job, job_dir: Path) -> None:
        self.commits, self.events, self.job, self.job_dir = commits, events, job, job_dir
        self._queue: queue.SimpleQueue[_Snapshot | Committed | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._finishing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def submit(self, generation: int, step: int, values: Mapping[str, Tensor], keep: int, ledger: str = "",
               meta: Mapping[str, Any] | None = None) -> None:
        """Saves `values`, which must not change any more, as this shard's part of the checkpoint of `step`.

        `meta`: the manifest's.
        """
        self._queue.put(_Snapshot(generation, step, values, ledger, keep, meta or {}))

    def finish(self, committed: Committed) -> None:
        """Writes the trained model from the final checkpoint and completes the job. Repeats meanwhile do nothing."""
        if not self._finishing:
            self._finishing = True
            self._queue.put(committed)

    def check(self) -> None:
        """Raises what the thread died of."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                while not self._closed.is_set():
                    try:
                        self._save(item) if isinstance(item, _Snapshot) else self._finish(item)
                        break
                    except EtcdError as error:
                        self.events.log.warning("checkpoint: etcd: %s; trying again", error.message)
                        self._closed.wait(RETRY_SECONDS)
        except BaseException as error:
            self._failure = error

    def _save(self, item: _Snapshot) -> None:
        commits = self.commits
        part = commits.store.write_part(item.generation, item.step, commits.shard, commits.shards, item.values,
                                        item.ledger)
        manifest = commits.publish(item.generation, item.step, part, item.meta)
        if manifest is not None:
            self.events.log.info("checkpoint of step %d is committed", item.step)
            commits.store.prune(item.keep, manifest)

    def _finish(self, committed: Committed) -> None:
        from graphft.transpiler.assemble import assemble

        commits = self.commits
        try:
            shards = self.read_final(committed)
        except DamagedCheckpoint as error:
            self.redo(committed, error)
            self._finishing = False
            return
        model = self.job_dir / "model.safetensors"
        write_atomically(model, to_bytes(assemble(self.job.trainer_program(), shards)))
        state = commits.keys.state
        if commits.etcd.txn([value_is(state, b"running")], [put_op(state, b"complete")], token=state).ok:
            self.events.emit("complete", f"the model is in {model}", path=str(model))

    def read_final(self, committed: Committed) -> list[dict[str, Tensor]]:
        """What each shard holds at the end of the job. Raises DamagedCheckpoint."""
        store = self.commits.store
        manifest = store.read_manifest(committed.checkpoint)
        return [store.read_part(manifest, i)[0] for i in range(self.commits.shards)]

    def redo(self, committed: Committed, error: DamagedCheckpoint) -> None:
        """The final checkpoint cannot be read: everyone goes back to one that can, and trains to the end again."""
        if decode_committed(self.commits.etcd.get(self.commits.keys.committed)) == committed:
            epoch = self.commits.rollback("the final checkpoint is damaged", below=committed.step)
            self.events.emit("damaged-checkpoint", f"the final checkpoint is damaged, going back to step {epoch.step}: "
                                                   f"{error.message}", step=epoch.step)
