"""The operators that talk to etcd or to a coordinator: registration, liveness, slots, and the queue of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, ClaimTerms, Context


@op("etcd_register", effect=True)
def etcd_register(ctx: Context, *, role: str, index: int = -1, lease: bool = True) -> None:
    """Registers this process: a pserver claims `/<job>/ps/<index>`, a trainer `/<job>/trainers/<id>`.

    The key hangs on the process's lease (`lease = true`). An index that is claimed by a live process is waited for.
    """
    ctx.session.register(role=role, index=index, lease=lease)


@op("wait_pservers", effect=True)
def wait_pservers(ctx: Context, *, count: int, timeout: float = 600.0) -> None:
    """Waits until all `count` pservers have registered, and connects to each. Seconds; raises after `timeout`."""
    ctx.session.wait_pservers(count, timeout)


@op("etcd_keep_alive", effect=True)
def etcd_keep_alive(ctx: Context, *, progress_timeout: float = 54.0) -> None:
    """Renews the process's lease, as long as its main thread makes progress: a mark every `progress_timeout` seconds. A
    process whose main thread hangs, or whose lease cannot be relied on any more, ends itself."""
    ctx.session.keep_alive(progress_timeout)


@op("etcd_state_watch", effect=True)
def etcd_state_watch(ctx: Context) -> None:
    """Writes this process's state (`/<job>.status/...`), and reads the keys of its peers."""
    ctx.view.watch()
    ctx.session.report_status()


@op("etcd_claim_slots", effect=True)
def etcd_claim_slots(ctx: Context, *, slots: int, on_trainer_loss: Literal["takeover", "wait"] = "takeover") -> None:
    """Claims free logical trainers up to a fair share (ceil(slots / live); at most one with "wait")."""
    ctx.slots.claim_slots(slots, on_trainer_loss)


@op("etcd_release_slots", effect=True)
def etcd_release_slots(ctx: Context) -> None:
    """Hands slots above the fair share over to trainers that lack some. Stands at the end of a step: its boundary."""
    ctx.slots.release_slots()


@op("etcd_await_pass", effect=True)
def etcd_await_pass(ctx: Context) -> None:
    """Raises NotYet while `/<job>/wanted_passes`, which a driver that trains epoch by epoch raises, does not count the
    pass of this step. This trainer keeps its slots."""
    ctx.slots.await_pass()


@op("etcd_await_validation", effect=True)
def etcd_await_validation(ctx: Context) -> None:
    """Raises NotYet at a step behind one that is validated, until the validation has decided (on a lower learning rate,
    or that this step is never wanted), and while too many validations are open."""
    ctx.slots.await_validation()


@op("etcd_enqueue_todo", effect=True)
def etcd_enqueue_todo(ctx: Context) -> None:
    """Makes the records of the pass that begins, one key per chunk, once."""
    ctx.queue.begin_pass()


@op("etcd_get_chunk", infer=[Type("chunk")], effect=True)
def etcd_get_chunk(ctx: Context, *, max_failures: int = 3, max_discarded: int = 0) -> ChunkWork:
    """Returns the batch to compute now, claiming its chunk (todo -> pending) when it is the chunk's first.

    Sync: the batch that the pass plan gives (step, slot). A batch that failed `max_failures` times in a row is
    discarded, its records in later passes, too; the job fails when these are more than `max_discarded` records (-1: at
    the first). Raises NoData when the slot has no batch at this step, and EndOfPass at the end of a pass.
    """
    return ctx.queue.get(ClaimTerms(max_failures, max_discarded))


@op("etcd_complete_chunk", effect=True)
def etcd_complete_chunk(ctx: Context) -> None:
    """Completes (pending -> done) this trainer's chunks whose last batch every shard has applied."""
    ctx.queue.complete()


@op("etcd_enqueue_timeout", effect=True)
def etcd_enqueue_timeout(ctx: Context, *, timeout: float = 60.0) -> None:
    """Puts chunks back to todo whose claims were not renewed for `timeout` seconds, and renews this process's own."""
    ctx.claims.renew(timeout)


@op("get_chunk", infer=[Type("chunk")], effect=True)
def get_chunk(ctx: Context) -> ChunkWork:
    """Returns, without fault tolerance, the batch of the pass plan; async: this trainer's next one."""
    return ctx.queue.get()


@op("etcd_put_job", effect=True)
def etcd_put_job(ctx: Context, *, pservers: int) -> None:
    """Writes the job's record, unless it is there, and `/<job>/ps_desired`: they hang on no lease."""
    ctx.coordinator.put_job(pservers)


@op("await_job", effect=True)
def await_job(ctx: Context) -> None:
    """Waits until the job is complete. Raises when it failed."""
    ctx.coordinator.await_job()


# -- dispatch="coordinator": a coordinator gives out tasks (chunks) -----------------------------------------------


@op("find_coordinator", effect=True)
def find_coordinator(ctx: Context, *, timeout: float = 600.0) -> None:
    """Waits for the address of a coordinator at `/<job>/coordinator/addr`. Raises after `timeout` seconds."""
    ctx.session.find_coordinator(timeout)


@op("get_task", infer=[Type("chunk")], effect=True)
def get_task(ctx: Context) -> ChunkWork:
    """Returns the batch to compute now, of a task (a chunk) that the coordinator has given this trainer.

    Raises NoData when there is no batch now, EndOfPass when todo and pending are empty.
    """
    return ctx.queue.get()


@op("finish_task", effect=True)
def finish_task(ctx: Context) -> None:
    """Tells the coordinator (pending -> done) which of this trainer's tasks every shard has applied wholly."""
    ctx.queue.complete()


@op("fail_task", effect=True)
def fail_task(ctx: Context) -> None:
    """Tells the coordinator that the batch at hand cannot be computed, and why: its task goes back to todo."""
    ctx.queue.fail()


@op("renew_tasks", effect=True)
def renew_tasks(ctx: Context, *, timeout: float = 60.0) -> None:
    """Tells the coordinator, some times in `timeout` seconds, that this trainer is at work, and what it holds."""
    ctx.claims.renew(timeout)


@op("acquire_coordinator_lock", effect=True)
def acquire_coordinator_lock(ctx: Context) -> None:
    """Waits for the lock `/<job>/coordinator/lock`, which one process holds at a time: until then it stands by."""
    ctx.task_server.acquire_lock()


@op("load_tasks", effect=True)
def load_tasks(ctx: Context) -> None:
    """Recovers the task queues from etcd, or creates them."""
    ctx.task_server.load_tasks()


@op("publish_coordinator", effect=True)
def publish_coordinator(ctx: Context) -> None:
    """Writes this process's address to `/<job>/coordinator/addr`, for trainers to find."""
    ctx.task_server.publish()


@op("serve_tasks", effect=True)
def serve_tasks(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3, max_discarded: int = 0) -> None:
    """Answers trainers until the job is over. A task that is not renewed by its trainer within `timeout` seconds goes
    back to todo. `max_failures` and `max_discarded` are as of `etcd_get_chunk`."""
    ctx.task_server.serve(timeout, max_failures, max_discarded)


@op("etcd_get_range", infer=[Type("chunk")], effect=True)
def etcd_get_range(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3) -> ChunkWork:
    """Returns the batch to compute now, of a range of the held-out data that this process has claimed.

    A claim hangs on its process's lease, and must be renewed by progress within `timeout` seconds. A range that cannot
    be computed `max_failures` times ends the job. Raises NoData when there is nothing to claim.
    """
    return ctx.validation.get_range(timeout, max_failures)


def _weights(operator: Operator, block: Block) -> list[Type]:
    names, variables = operator.attrs["names"], block.program.variables
    if missing := [name for name in names if name not in variables]:
        raise ProgramError(
            f"read_check_point gives %{missing[0]}, but the program has no variable of that name",
            block=block,
            rule="columns",
            help="name the results like the model's parameters and buffers",
        )
    return [variables[name].type for name in names]


@op("read_check_point", infer=_weights, effect=True)
def read_check_point(ctx: Context, chunk: ChunkWork, *, names: tuple[str, ...]) -> Sequence[Tensor] | Tensor:
    """Returns the model of the checkpoint that is validated, whole tensors in the order of `names`."""
    weights = ctx.validation.weights(names)
    return weights[0] if len(names) == 1 else weights


@op("etcd_complete_range", effect=True)
def etcd_complete_range(ctx: Context, chunk: ChunkWork, *results: Tensor) -> None:
    """Adds the results of a batch to its range: means, and those that have an entry for each record. With the last
    range, the validation is complete: block `reduce` runs, and the result is written."""
    ctx.validation.complete_range(chunk, results)
