"""The operators of the Fluid design that talk to etcd: registration, liveness, slots and the chunk queue."""

from __future__ import annotations

from typing import Literal

from graphft.ir import Type
from graphft.ops.context import ChunkWork, Context
from graphft.registry import op


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
def etcd_keep_alive(ctx: Context) -> None:
    """Renews the process's lease. A lease that cannot be relied on any more ends the process ("lease lost")."""
    assert ctx.session is not None
    ctx.session.keep_alive()


@op("etcd_state_watch", effect=True)
def etcd_state_watch(ctx: Context) -> None:
    """Takes in what changed in etcd: who lives, slots, generation, the job's state; wakes whoever waits for it."""
    assert ctx.members is not None
    ctx.members.watch()


@op("etcd_claim_slots", effect=True)
def etcd_claim_slots(ctx: Context, *, slots: int, on_trainer_loss: Literal["takeover", "wait"] = "takeover") -> None:
    """Claims free logical trainers up to a fair share (ceil(slots / live); at most one with "wait")."""
    assert ctx.members is not None
    ctx.members.claim_slots(slots, on_trainer_loss)


@op("etcd_release_slots", effect=True)
def etcd_release_slots(ctx: Context) -> None:
    """Hands slots above the fair share over to trainers that lack some. Stands at the end of a step: its boundary."""
    assert ctx.members is not None
    ctx.members.release_slots()


@op("etcd_enqueue_todo", effect=True)
def etcd_enqueue_todo(ctx: Context) -> None:
    """Makes the records of the pass that begins, one key per chunk; one trainer does it, whole or not at all."""
    assert ctx.queue is not None
    ctx.queue.enqueue_pass()


@op("etcd_get_chunk", infer=[Type("chunk")], effect=True)
def etcd_get_chunk(ctx: Context) -> ChunkWork:
    """The batch to compute now, claiming its chunk (todo -> pending) when it is the chunk's first.

    Sync: the batch that the pass plan gives (step, slot). Async: of a chunk claimed from todo. Raises NoData when
    the slot has no batch at this step, and EndOfPass when todo and pending are empty and every step is applied.
    """
    assert ctx.queue is not None
    return ctx.queue.get_chunk()


@op("etcd_complete_chunk", effect=True)
def etcd_complete_chunk(ctx: Context) -> None:
    """Completes (pending -> done) this trainer's chunks whose last batch every shard has applied."""
    assert ctx.queue is not None
    ctx.queue.complete_chunks()


@op("etcd_enqueue_timeout", effect=True)
def etcd_enqueue_timeout(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3) -> None:
    """Puts overdue chunks back to todo: at once when their holder's lease is gone, else after `timeout` seconds.

    A chunk whose holders failed `max_failures` times in a row without progress goes to failed, and is reported.
    """
    assert ctx.queue is not None
    ctx.queue.requeue_stale(timeout, max_failures)


@op("get_chunk", infer=[Type("chunk")], effect=True)
def get_chunk(ctx: Context) -> ChunkWork:
    """`etcd_get_chunk` without fault tolerance: the batch that the pass plan gives (step, slot), unrecorded."""
    assert ctx.queue is not None
    return ctx.queue.get_chunk()


@op("etcd_put_job", effect=True)
def etcd_put_job(ctx: Context, *, pservers: int) -> None:
    """Writes the job's record and `/<job>/ps_desired`, unless they are there. They hang on nobody's lease."""
    assert ctx.coordinator is not None
    ctx.coordinator.put_job(pservers)


@op("await_job", effect=True)
def await_job(ctx: Context) -> None:
    """Waits until the job is complete. Raises when it failed."""
    assert ctx.coordinator is not None
    ctx.coordinator.await_job()


@op("etcd_report_status", effect=True)
def etcd_report_status(ctx: Context) -> None:
    """Writes this process's progress to `/<job>.status/...`, for `graphft status` and the display."""
    assert ctx.session is not None
    ctx.session.report_status()
