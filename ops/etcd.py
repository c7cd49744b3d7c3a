"""The operators of the Fluid design that talk to etcd: registration, liveness, slots and the chunk queue."""

from __future__ import annotations

from typing import Literal

from graphft.ir import Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, ClaimTerms, Context


@op("etcd_register", effect=True)
def etcd_register(ctx: Context, *, role: str, index: int = -1, lease: bool = True) -> None:
    """Registers this process: a pserver claims `/<job>/ps/<index>`, a trainer `/<job>/trainers/<id>`.

    The key hangs on the process's lease (`lease = true`), so that it goes when the process does. An index that
    is claimed by a live process is waited for.
    """
    assert ctx.session is not None
    ctx.session.register(role=role, index=index, lease=lease)


@op("wait_pservers", effect=True)
def wait_pservers(ctx: Context, *, count: int, timeout: float = 600.0) -> None:
    """Waits until all `count` pservers have registered, and connects to each. Seconds; raises after `timeout`."""
    assert ctx.session is not None
    ctx.session.wait_pservers(count, timeout)


@op("etcd_keep_alive", effect=True)
def etcd_keep_alive(ctx: Context, *, progress_timeout: float = 54.0) -> None:
    """Renews the process's lease, as long as its main thread makes progress: a mark every `progress_timeout` seconds,
    which is nine tenths of the job's `chunk_timeout`.

    A process whose main thread hangs ends itself. A lease that cannot be relied on any more ends it, too ("lease
    lost").
    """
    assert ctx.session is not None
    ctx.session.keep_alive(progress_timeout)


@op("etcd_state_watch", effect=True)
def etcd_state_watch(ctx: Context) -> None:
    """Writes this process's state (`/<job>.status/...`), and takes in what the keys of its peers say.

    They say who lives, who holds which slot, the generation, the newest checkpoint, the job's state. What the main
    thread waits for is woken.
    """
    assert ctx.view is not None
    assert ctx.session is not None
    ctx.view.watch()
    ctx.session.report_status()


@op("etcd_claim_slots", effect=True)
def etcd_claim_slots(ctx: Context, *, slots: int, on_trainer_loss: Literal["takeover", "wait"] = "takeover") -> None:
    """Claims free logical trainers up to a fair share (ceil(slots / live); at most one with "wait")."""
    assert ctx.slots is not None
    ctx.slots.claim_slots(slots, on_trainer_loss)


@op("etcd_release_slots", effect=True)
def etcd_release_slots(ctx: Context) -> None:
    """Hands slots above the fair share over to trainers that lack some. Stands at the end of a step: its boundary."""
    assert ctx.slots is not None
    ctx.slots.release_slots()


@op("etcd_await_pass", effect=True)
def etcd_await_pass(ctx: Context) -> None:
    """Raises NotYet as long as `/<job>/wanted_passes` does not count the pass of this step: who trains epoch by epoch
    raises it. Nothing is lost meanwhile: this trainer keeps its slots, and looks again."""
    assert ctx.slots is not None
    ctx.slots.await_pass()


@op("etcd_await_validation", effect=True)
def etcd_await_validation(ctx: Context, *, every: int = 0, passes: bool = False) -> None:
    """Raises NotYet at a step behind one that is validated (each `every` steps, or with `passes` at the end of every
    pass): in a job that decides by its validations, until it is known what follows from that (a lower learning rate, or
    that this step is never wanted); in any, while too many are not over, each of which keeps a checkpoint."""
    assert ctx.slots is not None
    ctx.slots.await_validation(every, passes)


@op("etcd_enqueue_todo", effect=True)
def etcd_enqueue_todo(ctx: Context) -> None:
    """Makes the records of the pass that begins, one key per chunk; one trainer does it, whole or not at all."""
    assert ctx.queue is not None
    ctx.queue.begin_pass()


@op("etcd_get_chunk", infer=[Type("chunk")], effect=True)
def etcd_get_chunk(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3, max_discarded: int = 0) -> ChunkWork:
    """The batch to compute now, claiming its chunk (todo -> pending) when it is the chunk's first.

    Sync: the batch that the pass plan gives (step, slot). Async: of a chunk claimed from todo. A claim must be renewed
    by progress within `timeout` seconds. A batch that failed `max_failures` times in a row is discarded, its records in
    later passes, too, and reported; the job fails when these are more than `max_discarded` records (-1: at the first).
    Raises NoData when the slot has no batch at this step, and EndOfPass when todo and pending are empty and every step
    is applied.
    """
    assert ctx.queue is not None
    return ctx.queue.get(ClaimTerms(timeout, max_failures, max_discarded))


@op("etcd_complete_chunk", effect=True)
def etcd_complete_chunk(ctx: Context) -> None:
    """Completes (pending -> done) this trainer's chunks whose last batch every shard has applied.

    Sync: it stands behind the receives, which wait for the step before: what is completed are chunks of steps before
    this one.
    """
    assert ctx.queue is not None
    ctx.queue.complete()


@op("etcd_enqueue_timeout", effect=True)
def etcd_enqueue_timeout(ctx: Context, *, timeout: float = 60.0) -> None:
    """Puts chunks back to todo whose claims were not renewed for `timeout` seconds, and renews this process's own.

    `timeout` is the job's `chunk_timeout`, as in `etcd_get_chunk`. What a dead process had claimed is free as soon as
    its lease ends: etcd deletes the claim with it.
    """
    assert ctx.claims is not None
    ctx.claims.renew(timeout)


@op("get_chunk", infer=[Type("chunk")], effect=True)
def get_chunk(ctx: Context) -> ChunkWork:
    """Without fault tolerance: the batch that the pass plan gives (step, slot); async: this trainer's next one.

    Nothing is recorded.
    """
    assert ctx.queue is not None
    return ctx.queue.get()


@op("etcd_put_job", effect=True)
def etcd_put_job(ctx: Context, *, pservers: int) -> None:
    """Writes the job's record, unless it is there, and `/<job>/ps_desired`: they hang on no lease."""
    assert ctx.coordinator is not None
    ctx.coordinator.put_job(pservers)


@op("await_job", effect=True)
def await_job(ctx: Context) -> None:
    """Waits until the job is complete. Raises when it failed."""
    assert ctx.coordinator is not None
    ctx.coordinator.await_job()
