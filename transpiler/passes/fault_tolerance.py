"""The queue, liveness and checkpoints: what `ft` adds, and what stands in its place without it."""

from __future__ import annotations

from typing import Any

from graphft.ir import Kind, Operator, Program, Ref
from graphft.transpiler.config import JobConfig
from graphft.transpiler.programs import Programs, chunk_variable, order_blocks

PROGRESS_PART = 0.9
"""Part of `chunk_timeout` that a main thread may go without a mark. A process that hangs ends itself a little before
others take its claims away, so that it can still say which batch was at fault."""


def insert_queue(job: Programs, config: JobConfig) -> None:
    """Begins a step by getting its batch: which one, its columns, its random seed.

    With `ft`, the queue in etcd records the progress: the step claims chunks and completes those that every shard has
    applied (sync: behind the receives, which wait for the step before; async: behind the sends), daemons return stale
    ones. With `dispatch` "coordinator", the step gets tasks from a coordinator and finishes them.
    Without `ft`, the step computes what the plan says (`get_chunk`)."""
    trainer, coordinator, tasks = job.trainer, _coordinator(job), config.dispatch == "coordinator"
    step = trainer.blocks["step"]
    columns = tuple(v.name for v in trainer.of_kind(Kind.INPUT))
    chunk = chunk_variable(trainer, "chunk")
    terms: dict[str, Any] = {"max_failures": config.max_failures, "max_discarded": config.may_discard}
    get, attrs = ("get_chunk", {}) if not config.ft else ("get_task", {}) if tasks else ("etcd_get_chunk", terms)
    step.ops[:0] = [
        Operator(get, (), attrs, (chunk,)),
        Operator("read_chunk", (Ref(chunk),), {"columns": columns}, columns),
        Operator("seed_rng", (Ref(chunk),)),
    ]
    if config.passes_on_demand:
        trainer.block("pass").append_op("etcd_await_pass")
    if config.ft:
        barrier = "fetch_barrier" if config.sync else "send_barrier"
        at = next(i for i, op in enumerate(step.ops) if op.type == barrier)
        step.ops.insert(at + 1, Operator("finish_task" if tasks else "etcd_complete_chunk"))
    if config.ft and tasks:
        trainer.block("failed").append_op("fail_task")
        trainer.block("daemon").append_op("renew_tasks", timeout=config.chunk_timeout)
        serve = coordinator.block("serve")
        for type in ("acquire_coordinator_lock", "load_tasks", "publish_coordinator"):
            serve.append_op(type)
        serve.append_op("serve_tasks", timeout=config.chunk_timeout, **terms)
    elif config.ft:
        trainer.block("pass").append_op("etcd_enqueue_todo")
        for program in (trainer, coordinator):
            program.block("daemon").append_op("etcd_enqueue_timeout", timeout=config.chunk_timeout)
    order_blocks(trainer, "pass")


def insert_liveness(job: Programs, config: JobConfig) -> None:
    """Has every role register in etcd when it starts; trainers wait for all pservers. A daemon block watches the job's
    state. With `ft`, what a process registers hangs on its lease, kept alive while the main thread makes
    progress; sync trainers claim the slots of those that died."""
    trainer, coordinator = job.trainer, _coordinator(job)
    shards, takes_slots = len(job.pservers), config.ft and config.sync
    tasks, step = trainer.find_op("get_task") is not None, trainer.blocks["step"]
    find = [Operator("find_coordinator")] if tasks else []
    _start(trainer, _register(config, "trainer"), Operator("wait_pservers", (), {"count": shards}), *find)
    slots = {"slots": config.trainers, "on_trainer_loss": config.on_trainer_loss}
    _daemon(trainer, config, *([Operator("etcd_claim_slots", (), slots)] if takes_slots else []))
    if takes_slots:
        step.append_op("etcd_release_slots")
    for index, program in enumerate(job.pservers):
        _start(program, _register(config, "pserver", index=index))
        _daemon(program, config)
    put_job = Operator("etcd_put_job", (), {"pservers": shards})
    _start(coordinator, *([_register(config, "coordinator")] if tasks else []), put_job)
    if not tasks:
        coordinator.block("serve").append_op("await_job")
    _daemon(coordinator, config)
    order_blocks(coordinator, "init", "serve")


def _coordinator(job: Programs) -> Program:
    assert job.coordinator is not None
    return job.coordinator


def _register(config: JobConfig, role: str, **attrs: Any) -> Operator:
    return Operator("etcd_register", (), {"role": role, **({} if config.ft else {"lease": False}), **attrs})


def _start(program: Program, *ops: Operator) -> None:
    program.block("init").ops[:0] = ops
    order_blocks(program, "init")


def _daemon(program: Program, config: JobConfig, *claim: Operator) -> None:
    """Puts the daemon's ops before those that are there."""
    daemon = program.block("daemon", interval=config.daemon_interval)
    keep = [Operator("etcd_keep_alive", (), {"progress_timeout": PROGRESS_PART * config.chunk_timeout})]
    daemon.ops[:0] = [*keep * config.ft, Operator("etcd_state_watch"), *claim]
    order_blocks(program, *(n for n in program.blocks if n != "daemon"))


def insert_checkpoints(job: Programs, config: JobConfig) -> None:
    """Gives every pserver a block `checkpoint`, which saves all that it owns: at the end, and with `ft` every
    `checkpoint_every` steps and `checkpoint_seconds`. A pserver that starts loads the newest committed one."""
    for program in job.pservers:
        owned = program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)
        program.block("checkpoint").append_op("save_check_point", *owned, keep=config.keep_checkpoints)
        serve = program.blocks["serve"].ops[-1]
        serve.attrs["checkpoint_block"] = "checkpoint"
        if config.ft:
            serve.attrs.update(
                checkpoint_every=config.checkpoint_every,
                **({"checkpoint_passes": True} if config.passes_on_demand else {}),
                recovery=True,
                recovery_timeout=config.recovery_timeout,
                on_barrier_timeout=config.on_barrier_timeout,
            )
            program.blocks["init"].append_op("load_check_point")
            if config.checkpoint_seconds:
                seconds = float(config.checkpoint_seconds)
                program.blocks["daemon"].append_op("checkpoint_notify", seconds=seconds)
        order_blocks(program, *(n for n in program.blocks if n != "daemon"))
