"""An async shard: applies every batch once, when it comes, and keeps checkpoints of its own."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.ops.context import ServeOptions
from graphft.runtime.checkpoint.async_writer import AsyncCommits, AsyncSaver, meta_of, shard_store
from graphft.runtime.coordination.records import Generation
from graphft.runtime.etcd import Session, Store
from graphft.runtime.protocol.async_shard import ApplyBatch, AsyncOptions, AsyncShard
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.protocol.staleness import Staleness
from graphft.runtime.queue.requeue import Requeue
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.roles.role import log

if TYPE_CHECKING:
    from graphft.transpiler import Job


class BatchPserver(Pserver):
    """An async shard's process."""

    machine: AsyncShard
    commits: AsyncCommits

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int, session: Session | None = None) -> None:
        super().__init__(job, job_dir, etcd, index, session)
        self.ledger = Ledger()
        self.requeue = Requeue(etcd, self.keys, self.config.plan)
        self.effects |= {ApplyBatch: self._apply}
        self._compensates = any(op.type == "dc_asgd" for b in self.program.blocks.values() for op in b.ops)
        self._passes = 0
        """So many passes, from the first on, are wholly applied."""
        self._final = False
        """Whether the last checkpoint was taken."""
        self._asked, self._due = float("-inf"), False
        """When a checkpoint was asked for because of the last one's age, and whether that is still to be taken."""

    def make_commits(self) -> AsyncCommits:
        return AsyncCommits(
            self.etcd,
            self.keys.of_shard(self.index),
            shard_store(self.job_dir, self.index),
            self.index,
            self.config.pservers,
            self.job.run_id,
            self.id,
        )

    def make_saver(self) -> AsyncSaver:
        return AsyncSaver(self.commits, self.events, self.job, self.job_dir, self.close_records)

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def load_check_point(self) -> None:
        """Goes on from this shard's own newest checkpoint; a restart raises its own generation first.

        Only then, so that no trainer completes a chunk with what the shard before acknowledged, are the chunks
        put back to todo that are done, but not here.
        """
        self.when_storage_answers(self.join_generation)
        if self.restarted:
            self.events.emit(
                "restarted",
                f"pserver {self.index} is back at version {self.generation.step}, "
                f"its generation {self.generation.number}",
                step=self.generation.step,
            )
        self._go_back()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values, with the ledger of this moment; the saver writes and commits them meanwhile."""
        machine, passes = self.machine, self._whole_passes()
        if passes == self.config.plan.passes and not self._final:
            self._tell_staleness()
        self._final = passes == self.config.plan.passes
        self.saver.submit(
            machine.generation,
            machine.version,
            self.buffers.clone(names),
            keep,
            json.dumps(machine.ledger.export()),
            meta_of(passes),
        )

    def notify_checkpoint(self, seconds: float) -> None:
        """Has the main thread take a checkpoint when the newest is too old; again, if that is not committed then."""
        now = time.monotonic()
        if self.age(self.view.shard_commits.get(self.index)) >= seconds and now - self._asked >= seconds:
            self._asked, self._due = now, True

    def serve(self, options: ServeOptions) -> None:
        self.options = options
        self.commits.ensure_generation(resume=False)  # where one was to be gone on with, load_check_point did
        self._make_machine()
        self.progress.begin("serving")
        while not self.over():
            self.serve_once()

    def _make_machine(self) -> None:
        o = self.options
        self.buffers.publish(self.generation.step)
        self.machine = AsyncShard(
            AsyncOptions(
                o.shard,
                tuple(self.buffers.buckets),
                self.config.plan.batches.tolist(),
                self.config.plan.passes,
                self.job.run_id,
                self.secret,
                o.checkpoint_every,
                o.max_staleness,
                self._compensates,
                self.max_peers,
            ),
            incarnation=self.id,
            generation=self.generation.number,
            version=self.generation.step,
            ledger=self.ledger,
        )

    def status(self) -> msgspec.Struct:
        found = self.machine.staleness if self.machine else Staleness()
        return msgspec.structs.replace(
            super().status(), staleness=found.counts, staleness_mean=found.mean, staleness_max=found.max
        )

    # -- going back ---------------------------------------------------------------------------------------------

    def restore(self, generation: Generation) -> None:
        manifest = self.commits.manifest_of(generation)
        if manifest is None:
            values, ledger = self.initial_values(), ""
        else:
            values, ledger = self.store.read_part(manifest, self.index)
        self.buffers.restore(values)
        self.ledger = Ledger.load(json.loads(ledger or "{}"))

    def _go_back(self) -> None:
        self.load()
        self._passes, self._final = 0, False
        count = self.retry_while_leased(functools.partial(self.requeue.run, self.ledger))
        if count:
            self.events.emit(
                "put-back", f"{count} chunks are to do again: pserver {self.index} lacks some of each", chunks=count
            )

    def follow(self) -> None:
        generation = self.seen.shard_generations.get(self.index)
        self.overtake(generation)
        if generation is not None and generation.number > self.machine.generation:
            log.info(
                "generation %d: back from version %d to %d (%s)",
                generation.number,
                self.machine.version,
                generation.step,
                generation.reason,
            )
            self.generation = generation
            self._go_back()
            self._make_machine()
        super().follow()
        if self._due:
            self._due = False
            self.run_block(self.options.checkpoint_block)
        self._finish()

    # -- the end ------------------------------------------------------------------------------------------------

    def _whole_passes(self) -> int:
        """How many passes are wholly applied here, but for what is poison."""
        while self._passes < self.config.plan.passes and self._whole(self._passes):
            self._passes += 1
        return self._passes

    def _whole(self, index: int) -> bool:
        if self.machine.ledger.count(index) == len(self.requeue.chunks):
            return True
        recorded = self.view.pass_
        if recorded is None or recorded.pass_index <= index:
            return False  # it is not over: no need to look closer
        ledger = self.machine.ledger
        left_out = self.retry_while_leased(functools.partial(self.requeue.left_out, ledger, index))
        return left_out.issuperset(self.requeue.lacking(ledger, index))

    def _finish(self) -> None:
        """When all is applied here: the last checkpoint. The first shard then commits all shards' as the job's."""
        view, plan = self.view, self.config.plan
        all_done = view.pass_ is not None and view.pass_.pass_index >= plan.passes
        if (all_done or self.machine.version >= plan.total_steps) and not self._final:
            if self._whole_passes() == plan.passes:
                self.run_block(self.options.checkpoint_block)
            elif all_done:
                self.retry_while_leased(functools.partial(self.requeue.run, self.machine.ledger))
        ends = [c.passes >= plan.passes for c in view.shard_commits.values()]
        if self.index == 0 and view.committed is None and len(ends) == self.config.pservers and all(ends):
            self.when_storage_answers(
                functools.partial(
                    self.retry_while_leased, functools.partial(self.commits.commit_job, self.job_dir, plan.total_steps)
                )
            )

    def _tell_staleness(self) -> None:
        found = self.machine.staleness
        batches = sum(found.counts)
        text = (
            f"pserver {self.index} has applied all batches: the {batches} since it started were {found.mean:.2f} "
            f"versions behind, at most {found.max}"
        )
        self.events.emit(
            "applied", text, batches=batches, staleness=found.counts, staleness_mean=found.mean, staleness_max=found.max
        )

    # -- effects ------------------------------------------------------------------------------------------------

    def _apply(self, effect: ApplyBatch) -> None:
        self.buffers.reduce([Contribution(0, effect.samples, effect.payloads)])
        if self._compensates:
            self.buffers.back_up(effect.base)
        if self.options.reduce_block:
            self.run_block(self.options.reduce_block)
        self.run_optimizer(self.machine.version, effect.kept)
