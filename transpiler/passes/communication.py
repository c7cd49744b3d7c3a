"""Connects trainers and pservers: receives, sends and barriers there, buckets and `listen_and_serv` here; what is sent
is checked, and metrics go along."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from graphft.capture.loss_fn import reported
from graphft.ir import Block, Kind, Operator, Ref, Type
from graphft.ir.dependence import last_writes
from graphft.optim.grad_scaler import UPDATE
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import SKIPPED_STEPS, Bucket, buckets_of, gradient_of, pushed_as
from graphft.transpiler.programs import Programs, order_blocks


def insert_communication(job: Programs, config: JobConfig) -> None:
    """Receives each bucket right before the first op that touches one of its tensors, and sends it right behind the op
    that produces the last of its gradients (or updates of buffers). `fetch_barrier` stands behind the last receive,
    `send_barrier` behind the last send. A pserver lays out its buckets, and serves."""
    buckets, shards = buckets_of(job.trainer), len(job.pservers)
    waits = {} if config.sync else {"push_timeout": config.push_timeout, "max_skipped": config.max_skipped}
    _insert_transfers(
        job.trainer.blocks["step"],
        buckets,
        Operator("fetch_barrier", (), {"shards": shards}),
        Operator("send_barrier", (), {"shards": shards, **waits}),
    )
    for shard, program in enumerate(job.pservers):
        init = program.block("init")
        for b in buckets:
            if b.shard == shard:
                init.append_op("bucket", *(Ref(s.name) for s in b.slices), index=b.index, reduce=b.reduce)
        program.block("serve").append_op(
            "listen_and_serv",
            shard=shard,
            shards=shards,
            sync=config.sync,
            slots=config.trainers,
            total_steps=config.total_steps,
            max_staleness=config.max_staleness,
            schedule_block="schedule" if "schedule" in program.blocks else "",
            reduce_block="reduce" if "reduce" in program.blocks else "",
            optimize_blocks=tuple(n for n in program.blocks if n.startswith("optimize.")),
        )
        order_blocks(program, "init", "serve")


def _insert_transfers(block: Block, buckets: tuple[Bucket, ...], fetch: Operator, end: Operator) -> None:
    before: dict[int, list[Operator]] = defaultdict(list)
    behind: dict[int, list[Operator]] = defaultdict(list)
    last_write = last_writes(block)
    receives = sorted(((_first_use(block, b), b) for b in buckets), key=lambda p: p[0])
    for at, b in receives:
        before[at].append(_transfer(block, "recv", b))
    before[receives[-1][0]].append(fetch)
    for b in buckets:
        op = _transfer(block, "send", b)
        behind[max(*(last_write.get(name, -1) for name in op.reads), receives[-1][0])].append(op)
    ops = []
    for i, op in enumerate(block.ops):
        ops += [*before[i], op, *behind[i]]
    block.ops = [*ops, end]


def _transfer(block: Block, type: str, bucket: Bucket) -> Operator:
    """Returns the `recv` into a bucket's parameters and buffers, or the `send` of its gradients and updated buffers."""
    variables = [block.program.variables[s.variable] for s in bucket.slices]
    operands = tuple(Ref(pushed_as(v) if type == "send" else v.name) for v in variables)
    attrs = {"shard": bucket.shard, "bucket": bucket.index, "slices": tuple((s.start, s.end) for s in bucket.slices)}
    refresh = type == "recv" and any(v.kind is Kind.BUFFER for v in variables)
    return Operator(type, operands, attrs | ({"refresh": True} if refresh else {}))


def _first_use(block: Block, bucket: Bucket) -> int:
    """Returns the index of the first op that reads or changes a tensor of the bucket; 0 if none does."""
    names = {s.variable for s in bucket.slices}
    return next((i for i, op in enumerate(block.ops) if names.intersection((*op.reads, *op.writes))), 0)


def check_finite(job: Programs, config: JobConfig) -> None:
    """Checks the loss right behind the op that makes it, and the gradients as they are sent; `send_barrier` says what
    becomes of a contribution that is not finite. "skip": a pserver counts these in the state `%skipped_steps`, and
    lowers the loss scale that it holds."""
    if config.on_nonfinite == "warn":
        return
    step, loss = job.trainer.blocks["step"], str(job.trainer.attrs["loss"])
    gradients = {gradient_of(v) for v in job.trainer.of_kind(Kind.PARAM)}
    for op in step.ops:
        if op.type == "send" and gradients.intersection(op.reads):
            op.attrs["check"] = True
        elif op.type == "send_barrier":
            op.attrs["on_nonfinite"] = config.on_nonfinite
    made = max(i for i, op in enumerate(step.ops) if loss in op.writes)
    step.ops.insert(made + 1, Operator("check_finite", (Ref(loss),)))
    for program in job.pservers if config.on_nonfinite == "skip" else ():
        zero = torch.zeros((), dtype=torch.int64)
        count = program.variable(SKIPPED_STEPS, Type("int64", ()), Kind.STATE, zero)
        skip = program.block("skip")
        skip.append_op("increment", count.ref)
        if (update := program.find_op(UPDATE)) is not None:
            skip.ops.append(replace(update, attrs=update.attrs | {"found_inf": True}))
        program.blocks["serve"].ops[-1].attrs["skip_block"] = "skip"
        order_blocks(program, "init", "serve", "schedule", "reduce", "skip")


def report_metrics(job: Programs, config: JobConfig) -> None:
    """Gives loss and metrics to the contribution: shard 0 writes a row for each step that it applies."""
    results, step = reported(job.trainer), job.trainer.blocks["step"]
    at = next(i for i, op in enumerate(step.ops) if op.type == "send_barrier")
    step.ops.insert(at, Operator("report_metrics", tuple(map(Ref, results))))
    job.pservers[0].blocks["serve"].ops[-1].attrs["metrics"] = ("loss", *results[1:])
