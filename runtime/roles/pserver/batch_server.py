"""An async shard: it applies every batch once, when it comes, and keeps checkpoints of its own."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from graphft.runtime.checkpoint.async_writer import AsyncCommits
from graphft.runtime.checkpoint.manifest import PASSES
from graphft.runtime.checkpoint.writer import Snapshot
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.records import Committed, Generation
from graphft.runtime.protocol.async_shard import AsyncShard, Staleness
from graphft.runtime.protocol.events import ApplyBatch, AsyncOptions
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.queue.passes import Requeue
from graphft.runtime.roles.pserver.shard_server import ShardServer


@dataclass(eq=False, repr=False)
class BatchServer(ShardServer):
    """The ServerPort of an async shard."""

    commits: AsyncCommits
    requeue: Requeue

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine: AsyncShard
        self.ledger = Ledger()
        self.effects |= {ApplyBatch: self._apply}
        self._compensates = any(op.type == "dc_asgd" for b in self.blocks.program.blocks.values() for op in b.ops)
        self._passes = 0
        """So many passes, from the first on, are wholly applied."""
        self._final = False
        """The last checkpoint was taken."""
        self._chunk_steps: dict[int, dict[int, int]] = {}
        self._asked, self._due = float("-inf"), False
        """When a checkpoint was asked for because of the last one's age; True while that is still to be taken."""

    # -- ServerPort ---------------------------------------------------------------------------------------------

    def load_check_point(self) -> None:
        """Goes on from this shard's own newest checkpoint; a restart raises its own generation first. Only then, so
        that no trainer completes a chunk with what the shard before acknowledged, are the chunks put back to todo that
        are done, but not here."""
        self.recovery.join()
        self._load()

    def save_check_point(self, names: Sequence[str], keep: int) -> None:
        """Clones the values, with the ledger of this moment; the saver writes and commits them meanwhile."""
        machine, passes = self.machine, self._whole_passes()
        if passes == self.config.plan.passes and not self._final:
            self._tell_staleness()
        self._final = passes == self.config.plan.passes
        self.saver.submit(
            Snapshot(
                machine.generation,
                machine.version,
                self.buffers.clone(names),
                keep,
                json.dumps(machine.ledger.export()),
                {PASSES: passes},
            )
        )

    def generation_in(self, view: JobView) -> Generation | None:
        return view.shard_generations.get(self.member.index)

    def committed_in(self, view: JobView) -> Committed | None:
        return view.shard_commits.get(self.member.index)

    def notify_checkpoint(self, seconds: float) -> None:
        """Has the main thread take a checkpoint when the newest is too old; again, if that is not committed then."""
        now = time.monotonic()
        age = self.recovery.age(self.committed_in(self.member.view))
        if age >= seconds and now - self._asked >= seconds:
            self._asked, self._due = now, True

    def begin(self) -> None:
        o = self.options
        self.buffers.publish(self.recovery.generation.step)
        self.record_metrics(self.recovery.generation.step)
        self.machine = AsyncShard(
            AsyncOptions(
                shard=o.shard,
                buckets=tuple(self.buffers.buckets),
                batches=self.config.plan.batches.tolist(),
                passes=self.config.plan.passes,
                run=self.member.job.run_id,
                checkpoint_every=o.checkpoint_every,
                max_staleness=o.max_staleness,
                compensate=self._compensates,
                skips=bool(o.skip_block),
                values=len(o.metrics),
            ),
            incarnation=self.member.id,
            generation=self.recovery.generation.number,
            version=self.recovery.generation.step,
            ledger=self.ledger,
        )

    def status(self) -> msgspec.Struct:
        found = self.machine.staleness if self.machine else Staleness()
        return msgspec.structs.replace(
            super().status(), staleness=found.counts, staleness_mean=found.mean, staleness_max=found.max
        )

    def epochs_over(self) -> int:
        """As etcd has it: a shard that goes back may have to apply some of them again."""
        recorded = self.member.view.pass_
        return recorded.pass_index if recorded is not None else 0

    # -- going back ---------------------------------------------------------------------------------------------

    def restore(self, generation: Generation) -> None:
        manifest = self.commits.manifest_of(generation)
        if manifest is None:
            values, ledger = self.initial_values(), ""
        else:
            values, ledger = self.commits.store.read_part(manifest, self.member.index)
        self.buffers.restore(values)
        self.ledger = Ledger.load(json.loads(ledger or "{}"))

    def go_back(self) -> None:
        self._load()
        self.begin()

    def _load(self) -> None:
        self.recovery.load()
        self._passes, self._final = 0, False
        count = self.member.retry_while_leased(functools.partial(self.requeue.run, self.ledger))
        if count:
            text = f"{count} chunks are to do again: pserver {self.member.index} lacks some of each"
            self.member.events.emit("requeued", text, chunks=count)

    def follow(self) -> None:
        super().follow()
        if self._due:
            self._due = False
            self.take_checkpoint()
        self._finish()

    # -- the end ------------------------------------------------------------------------------------------------

    def _whole_passes(self) -> int:
        """Returns how many passes are wholly applied here, but for discarded batches."""
        while self._passes < self.config.plan.passes and self._whole(self._passes):
            self._passes += 1
        return self._passes

    def _whole(self, index: int) -> bool:
        if self.machine.ledger.count(index) == len(self.requeue.chunks):
            return True
        recorded = self.member.view.pass_
        if recorded is None or recorded.pass_index <= index:
            return False  # it is not over: no need to look closer
        return not self.member.retry_while_leased(functools.partial(self.requeue.lacking, self.machine.ledger, index))

    def _finish(self) -> None:
        """Takes the last checkpoint when all is applied here. The first shard then commits all shards' as the job's."""
        view, plan = self.member.view, self.config.plan
        all_done = view.pass_ is not None and view.pass_.pass_index >= plan.passes
        if (all_done or self.machine.version >= plan.total_steps) and not self._final:
            if self._whole_passes() == plan.passes:
                self.take_checkpoint()
            elif all_done:
                self.member.retry_while_leased(functools.partial(self.requeue.run, self.machine.ledger))
        ends = [c.passes >= plan.passes for c in view.shard_commits.values()]
        if self.member.index == 0 and view.committed is None and len(ends) == self.config.pservers and all(ends):
            commit = functools.partial(self.commits.commit_job, self.job_dir, plan.total_steps)
            self.recovery.when_storage_answers(functools.partial(self.member.retry_while_leased, commit))

    def _tell_staleness(self) -> None:
        found = self.machine.staleness
        batches = sum(found.counts)
        text = (
            f"pserver {self.member.index} has applied all batches: the {batches} since it started were "
            f"{found.mean:.2f} versions behind, at most {found.max}"
        )
        self.member.events.emit(
            "applied", text, batches=batches, staleness=found.counts, staleness_mean=found.mean, staleness_max=found.max
        )

    # -- effects ------------------------------------------------------------------------------------------------

    def _apply(self, effect: ApplyBatch) -> None:
        contribution = Contribution(0, effect.samples, effect.payloads, effect.values)
        if self.metrics is not None:
            step = self._first_steps(effect.pass_index)[effect.chunk] + effect.batch
            self.metrics.add(step, [contribution], effect.finite)
        if not effect.finite:
            self.leave_out(self.machine.version, effect.kept)
            return
        self.buffers.reduce([contribution])
        if self._compensates:
            self.buffers.back_up(effect.base)
        if self.options.reduce_block:
            self.blocks.run(self.options.reduce_block)
        for block in self.options.update_blocks:
            self.blocks.run(block)
        self.buffers.publish(self.machine.version, effect.kept)
        self.note_update()

    def _first_steps(self, pass_index: int) -> dict[int, int]:
        """Returns the first step in the plan of each chunk of a pass."""
        if pass_index not in self._chunk_steps:
            self._chunk_steps = {pass_index: {c.chunk: c.first_step for c in self.config.plan.chunks_of(pass_index)}}
        return self._chunk_steps[pass_index]
