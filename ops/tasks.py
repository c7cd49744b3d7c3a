"""The operators of the EDL design: a coordinator gives out tasks (chunks), trainers ask it for them.

In the place of the queue's operators in `etcd.py`: `transpile(dispatch="coordinator")`.
"""

from __future__ import annotations

from graphft.ir import Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, Context


@op("find_coordinator", effect=True)
def find_coordinator(ctx: Context, *, timeout: float = 600.0) -> None:
    """Waits for the address of a coordinator at `/<job>/coordinator/addr`. Raises after `timeout` seconds."""
    assert ctx.session is not None
    ctx.session.find_coordinator(timeout)


@op("get_task", infer=[Type("chunk")], effect=True)
def get_task(ctx: Context) -> ChunkWork:
    """The batch to compute now, of a task (a chunk) that the coordinator has given this trainer (todo -> pending).

    Sync: the batch that the pass plan gives (step, slot). Async: of a task from todo. Trainers hold tasks ahead. The
    coordinator's `serve_tasks` has the terms. Raises NoData when there is no batch now, EndOfPass when todo and pending
    are empty.
    """
    assert ctx.queue is not None
    return ctx.queue.get()


@op("finish_task", effect=True)
def finish_task(ctx: Context) -> None:
    """Tells the coordinator (pending -> done) which of this trainer's tasks every shard has applied wholly."""
    assert ctx.queue is not None
    ctx.queue.complete()


@op("fail_task", effect=True)
def fail_task(ctx: Context) -> None:
    """Tells the coordinator that the batch at hand cannot be computed, and why: its task goes back to todo, with its
    failures counted. A batch that failed too often is discarded."""
    assert ctx.queue is not None
    ctx.queue.fail()


@op("renew_tasks", effect=True)
def renew_tasks(ctx: Context, *, timeout: float = 60.0) -> None:
    """Tells the coordinator, some times in `timeout` seconds, that this trainer is at work, and what it holds."""
    assert ctx.claims is not None
    ctx.claims.renew(timeout)


@op("acquire_coordinator_lock", effect=True)
def acquire_coordinator_lock(ctx: Context) -> None:
    """Waits for the lock `/<job>/coordinator/lock`, which one process holds at a time: until then it stands by."""
    assert ctx.task_server is not None
    ctx.task_server.acquire_lock()


@op("load_tasks", effect=True)
def load_tasks(ctx: Context) -> None:
    """Recovers the task queues from etcd, or creates them."""
    assert ctx.task_server is not None
    ctx.task_server.load_tasks()


@op("publish_coordinator", effect=True)
def publish_coordinator(ctx: Context) -> None:
    """Writes this process's address to `/<job>/coordinator/addr`, for trainers to find."""
    assert ctx.task_server is not None
    ctx.task_server.publish()


@op("serve_tasks", effect=True)
def serve_tasks(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3, max_discarded: int = 0) -> None:
    """Answers trainers until the job is over; what it answers is in etcd before, under the lock.

    A task that is not renewed by its trainer within `timeout` seconds, or whose trainer is gone, goes back to todo. A
    batch that failed `max_failures` times in a row is discarded, its records in later passes, too; the job fails when
    these are more than `max_discarded` records (-1: at the first).
    """
    assert ctx.task_server is not None
    ctx.task_server.serve(timeout, max_failures, max_discarded)
