"""The verifier's rules across the programs of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from graphft.ir import Block, Kind, Operator, Program, Ref, Type, backup_name, grad_name, refs
from graphft.ir.diagnostics import Diagnostic, job_rule
from graphft.ir.registry import attr, given_attrs, writes_of
from graphft.transpiler.layout import Slice, all_slices, evolving, gradient_of, slices_of
from graphft.transpiler.programs import Programs

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

Found = Iterator[Diagnostic]
Jobs = Mapping[str, Program]


def _bad(rule: str, message: str, block: Block | None = None, index: int | None = None) -> Diagnostic:
    return Diagnostic(rule, message, "transpile the program again; by hand, make both sides agree", block, index)


def _trainer(programs: Jobs) -> Program | None:
    return programs.get("trainer")


def _pservers(programs: Jobs) -> list[Program]:
    return [p for name, p in programs.items() if name.startswith("pserver")]


def _ops(program: Program | None, *types: str) -> Iterator[tuple[Block, int, Operator]]:
    for block in program.blocks.values() if program is not None else ():
        for i, op in enumerate(block.ops):
            if op.type in types:
                yield block, i, op


# -- slices -----------------------------------------------------------------------------------------------------


@job_rule("slice-cover", "the slices of a parameter or buffer cover it exactly once")
def _slice_cover(programs: Jobs) -> Found:
    for v in evolving(programs["trainer"]) if "trainer" in programs else ():
        at = 0
        for s in slices_of(v):
            if s.start != at or s.end <= s.start:
                what = f"misses elements {at} to {s.start}" if s.start > at else f"covers element {s.start} twice"
                yield _bad("slice-cover", f"%{v.name}: slice {s.index} is ({s.start}, {s.end}), which {what}")
                break
            at = s.end
        else:
            if at != v.type.numel:
                yield _bad("slice-cover", f"%{v.name} has {v.type.numel} elements, its slices end at {at}")


@job_rule("slice-owner", "each slice lives on the pserver that the trainer's program names, with its kind and type")
def _slice_owner(programs: Jobs) -> Found:
    trainer = _trainer(programs)
    if trainer is None:
        return
    expected = {s.name: s for s in all_slices(trainer)}
    for shard, program in enumerate(_pservers(programs)):
        for v in program.of_kind(Kind.PARAM, Kind.BUFFER):
            if v.name not in expected or expected[v.name].shard != shard:
                yield _bad("slice-owner", f"{program.name} owns %{v.name}, which is no slice of its own")
    for s in expected.values():
        variable, owner = trainer.variables[s.variable], programs.get(f"pserver{s.shard}")
        owned = owner.variables.get(s.name) if owner is not None else None
        if owned is None:
            yield _bad("slice-owner", f"%{s.name} lives on pserver {s.shard}, whose program does not have it")
        elif (owned.kind, owned.type) != (variable.kind, Type(variable.dtype, (s.numel,))):
            yield _bad(
                "slice-owner",
                f"%{s.name} is {owned.kind.value} {owned.type} on pserver {s.shard}, expected "
                f"{variable.kind.value} {variable.dtype}[{s.numel}]",
            )


@job_rule("slice-gradient", "the gradient of a slice is an input of its pserver, with the slice's type")
def _slice_gradient(programs: Jobs) -> Found:
    for program in _pservers(programs):
        for v in program.of_kind(Kind.PARAM, Kind.BUFFER):
            grad = program.variables.get(grad_name(v.name))
            if grad is None or grad.kind is not Kind.INPUT or grad.type != v.type:
                found = "is missing" if grad is None else f"is {grad.kind.value} {grad.type}"
                yield _bad("slice-gradient", f"%{grad_name(v.name)} of {program.name} {found}, expected input {v.type}")


@job_rule("slice-backup", "delays are compensated on async shards, with the slice's own gradient and backup, an input")
def _slice_backup(programs: Jobs) -> Found:
    for program in programs.values():
        serves = [not op.attrs["sync"] for _, _, op in _ops(program, "listen_and_serv")]
        for block, i, op in _ops(program, "dc_asgd"):
            grad, slice_, backup_of = [r.name for r in refs(op.args)][:3]
            backup = program.variables.get(backup_name(slice_))
            if serves != [True] or program.variables[slice_].kind is not Kind.PARAM:
                yield _bad("slice-backup", f"%{slice_} of {program.name} is no parameter of an async shard", block, i)
            elif (grad, backup_of) != (grad_name(slice_), backup_name(slice_)):
                yield _bad("slice-backup", f"%{slice_} is compensated with %{grad} and %{backup_of}", block, i)
            elif backup is None or backup.kind is not Kind.INPUT:
                yield _bad("slice-backup", f"%{backup_name(slice_)} of {program.name} is no input", block, i)


@job_rule("optimize-block", "each slice is evolved by exactly one optimize block, which listen_and_serv runs")
def _optimize_block(programs: Jobs) -> Found:
    for program in _pservers(programs):
        served = [name for _, _, op in _ops(program, "listen_and_serv") for name in op.attrs["optimize_blocks"]]
        writers = Counter(
            name
            for block in map(program.blocks.get, served)
            if block is not None
            for op in block.ops
            for name in set(writes_of(op))
        )
        for name in served:
            if name not in program.blocks:
                yield _bad("optimize-block", f"listen_and_serv of {program.name} runs block {name}, which is not there")
        for v in program.of_kind(Kind.PARAM, Kind.BUFFER):
            if writers[v.name] != 1:
                yield _bad(
                    "optimize-block",
                    f"%{v.name} of {program.name} is written by {writers[v.name]} ops of "
                    "its optimize blocks, expected 1",
                )


@job_rule("saved-state", "a checkpoint holds every parameter, buffer and optimizer state of its shard")
def _saved_state(programs: Jobs) -> Found:
    for program in _pservers(programs):
        for block, i, op in _ops(program, "save_check_point"):
            missing = [v.name for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE) if v.name not in op.reads]
            if missing:
                yield _bad("saved-state", f"the checkpoint of {program.name} leaves %{missing[0]} out", block, i)


# -- transfers --------------------------------------------------------------------------------------------------


@job_rule("sent-bucket", "every bucket that is sent is one that its pserver has, with the same slices, once")
def _sent_bucket(programs: Jobs) -> Found:
    yield from _transfers(programs, "send", "sent-bucket")


@job_rule("pulled-bucket", "every bucket that is pulled is one that its pserver has, with the same slices, once")
def _pulled_bucket(programs: Jobs) -> Found:
    yield from _transfers(programs, "recv", "pulled-bucket")


def _transfers(programs: Jobs, type: str, rule: str) -> Found:
    trainer = _trainer(programs)
    if trainer is None:
        return
    owned = {
        (shard, op.attrs["index"]): (program, op)
        for shard, program in enumerate(_pservers(programs))
        for _, _, op in _ops(program, "bucket")
    }
    moved: Counter[tuple[int, int]] = Counter()
    for block, i, op in _ops(trainer, type):
        key = op.attrs["shard"], op.attrs["bucket"]
        moved[key] += 1
        if key not in owned:
            yield _bad(rule, f"{type} moves bucket {key[1]} of shard {key[0]}, which no pserver has", block, i)
            continue
        here, there = _layout(trainer, op), _owned_layout(*owned[key])
        if here != there:
            yield _bad(
                rule,
                f"{type} moves bucket {key[1]} of shard {key[0]} as {_listed(here)}, but the pserver "
                f"has {_listed(there)}",
                block,
                i,
            )
    for key in owned:
        if moved[key] != 1:
            yield _bad(rule, f"bucket {key[1]} of pserver {key[0]} is moved by {moved[key]} {type} ops, expected 1")


Layout = list[tuple[str, str, int]]
"""Slice, dtype and number of elements of what a bucket holds, in order."""


def _layout(trainer: Program, op: Operator) -> Layout:
    names: dict[tuple[str, int, int], Slice] = {}
    for v in evolving(trainer):
        operand = gradient_of(v) if op.type == "send" and v.kind is Kind.PARAM else v.name
        names.update({(operand, s.start, s.end): s for s in slices_of(v)})
    layout = []
    for ref, (start, end) in zip(op.args, op.attrs["slices"], strict=True):
        s = names.get((ref.name, start, end))
        layout.append(
            (s.name if s is not None else f"{ref.name}[{start}:{end}]", trainer.variables[ref.name].dtype, end - start)
        )
    return layout


def _owned_layout(program: Program, op: Operator) -> Layout:
    return [(name, program.variables[name].dtype, program.variables[name].type.numel or 0) for name in op.reads]


def _listed(layout: Layout) -> str:
    return ", ".join(f"%{name}: {dtype}[{numel}]" for name, dtype, numel in layout) or "nothing"


_COUNTS = {
    "send_barrier": "shards",
    "fetch_barrier": "shards",
    "wait_pservers": "count",
    "etcd_put_job": "pservers",
    "listen_and_serv": "shards",
}


@job_rule("barrier-count", "barriers and waits count the job's pservers, and a step has one barrier of each kind")
def _barrier_count(programs: Jobs) -> Found:
    shards = len(_pservers(programs))
    for program in programs.values() if shards else ():
        for block, i, op in _ops(program, *_COUNTS):
            counted = op.attrs[_COUNTS[op.type]]
            if counted != shards:
                yield _bad("barrier-count", f"{op.type} counts {counted} pservers, the job has {shards}", block, i)
    for type in ("fetch_barrier", "send_barrier") if "trainer" in programs else ():
        count = sum(1 for _ in _ops(programs["trainer"], type))
        if count != 1:
            yield _bad("barrier-count", f"a step has {count} {type} ops, expected 1")


@job_rule("slot-count", "every count of slots (logical trainers) is the same")
def _slot_count(programs: Jobs) -> Found:
    counted = [
        (block, i, op) for p in programs.values() for block, i, op in _ops(p, "listen_and_serv", "etcd_claim_slots")
    ]
    for block, i, op in counted:
        slots, first = op.attrs["slots"], counted[0][2]
        if slots != first.attrs["slots"]:
            yield _bad(
                "slot-count", f"{op.type} counts {slots} slots, {first.type} counts {first.attrs['slots']}", block, i
            )


@job_rule("serve-agree", "pservers serve their own shard, and agree on everything else")
def _serve_agree(programs: Jobs) -> Found:
    first: dict[str, object] | None = None
    own = ("shard", "optimize_blocks", "schedule_block", "reduce_block", "checkpoint_block", "metrics")
    for shard, program in enumerate(_pservers(programs)):
        ops = list(_ops(program, "listen_and_serv"))
        if len(ops) != 1:
            yield _bad("serve-agree", f"{program.name} has {len(ops)} listen_and_serv ops, expected 1")
            continue
        block, i, op = ops[0]
        if op.attrs["shard"] != shard:
            yield _bad("serve-agree", f"{program.name} serves shard {op.attrs['shard']}, expected {shard}", block, i)
        options = {k: v for k, v in given_attrs(op).items() if k not in own}
        first = options if first is None else first
        for k in sorted(options.keys() | first.keys()):
            if options.get(k) != first.get(k):
                yield _bad(
                    "serve-agree", f"{program.name} has {k} = {options.get(k)}, pserver0 has {first.get(k)}", block, i
                )


@job_rule("norm-order", "the shards agree on the order of a global norm's partial sums, which has each of them once")
def _norm_order(programs: Jobs) -> Found:
    blocks = {shard: p.blocks["reduce"] for shard, p in enumerate(_pservers(programs)) if "reduce" in p.blocks}
    orders = {shard: block.attrs["order"] for shard, block in blocks.items() if "order" in block.attrs}
    for shard, order in orders.items():
        block = blocks[shard]
        if order != next(iter(orders.values())):
            yield _bad("norm-order", f"{block.program.name} orders the partial sums unlike the others", block)
        units = Counter(u for owner, start, count in order if owner == shard for u in range(start, start + count))
        partials = block.attrs.get("partials")
        numel = block.program.variables[partials.name].type.numel if isinstance(partials, Ref) else None
        if numel is None or units != Counter(range(numel)):
            yield _bad(
                "norm-order",
                f"the order of {block.program.name} has {len(units)} of its partial sums, "
                f"expected each of {numel} once",
                block,
            )


@job_rule("finite-check", "the loss and every gradient are checked, or nothing is; shards have a skip block to skip by")
def _finite_check(programs: Jobs) -> Found:
    trainer = _trainer(programs)
    barriers = [attr(op, "on_nonfinite") for _, _, op in _ops(trainer, "send_barrier")]
    if trainer is None or len(barriers) != 1:
        return
    (wanted,) = barriers
    gradients = {gradient_of(v) for v in trainer.of_kind(Kind.PARAM)}
    for block, i, op in _ops(trainer, "send"):
        expected = wanted != "warn" and not gradients.isdisjoint(op.reads)
        if attr(op, "check") != expected:
            yield _bad("finite-check", f"send has check = {not expected}, on_nonfinite is {wanted!r}", block, i)
    losses = sum(1 for _ in _ops(trainer, "check_finite"))
    if losses != (wanted != "warn"):
        yield _bad("finite-check", f"a step has {losses} check_finite ops, on_nonfinite is {wanted!r}")
    for program in _pservers(programs):
        for block, i, op in _ops(program, "listen_and_serv"):
            name = attr(op, "skip_block")
            if (name in program.blocks) != (wanted == "skip"):
                yield _bad("finite-check", f"skip_block is {name!r}, on_nonfinite is {wanted!r}", block, i)


_OWN_CLAIMS = ("etcd_get_chunk", "etcd_complete_chunk", "etcd_enqueue_todo", "etcd_enqueue_timeout")
_ASKS = {"find_coordinator": "init", "get_task": "step", "finish_task": "step", "fail_task": "failed"}
_ASKS |= {"renew_tasks": "daemon"}
_SERVES = ("acquire_coordinator_lock", "load_tasks", "publish_coordinator", "serve_tasks")


@job_rule("dispatch", "trainers claim chunks themselves, or all of them ask a coordinator that serves tasks, in order")
def _dispatch(programs: Jobs) -> Found:
    trainer, coordinator = _trainer(programs), programs.get("coordinator")
    asked = [op.type for _, _, op in _ops(trainer, *_ASKS)]
    served = [op.type for _, _, op in _ops(coordinator, *_SERVES)]
    if not asked and not served:
        return
    for type, name in _ASKS.items() if trainer is not None else ():
        places = [block.name for block, _, op in _ops(trainer, type)]
        if places != [name]:
            yield _bad("dispatch", f"trainer has {type} in {places or 'no block'}, expected once, in block {name}")
    for block, i, op in _ops(trainer, *_OWN_CLAIMS):
        yield _bad("dispatch", f"trainer has {op.type}, but a coordinator gives out its chunks", block, i)
    if coordinator is not None and served != list(_SERVES):
        yield _bad("dispatch", f"coordinator has {', '.join(served) or 'none'}, expected {', '.join(_SERVES)}")
    times = {op.type: attr(op, "timeout") for p in (trainer, coordinator) for _, _, op in _ops(p, *_TIMED)}
    if len(set(times.values())) > 1:
        yield _bad("dispatch", f"tasks are renewed and taken away by different timeouts: {times}")


_TIMED = ("renew_tasks", "serve_tasks")


# -- against the configuration ------------------------------------------------------------------------------------


def check_config(programs: Programs, config: JobConfig) -> Found:
    """[config-agree]: the programs are of a job of these options. Needs the configuration, so it is no job rule."""
    if len(programs.pservers) != config.pservers:
        yield _bad(
            "config-agree",
            f"the job has {len(programs.pservers)} pserver programs, its configuration says {config.pservers}",
        )
    wanted = {
        "sync": config.sync,
        "slots": config.trainers,
        "total_steps": config.total_steps,
        "checkpoint_passes": config.passes_on_demand,
    }
    for program in programs.pservers:
        for block, i, op in _ops(program, "listen_and_serv"):
            for name, value in wanted.items():
                if attr(op, name) != value:
                    yield _bad(
                        "config-agree",
                        f"listen_and_serv has {name} = {attr(op, name)}, the configuration says {value}",
                        block,
                        i,
                    )
        yield from _compensated(program, config)
    if (programs.trainer.find_op("get_task") is not None) != (config.dispatch == "coordinator"):
        yield _bad(
            "config-agree", f"{programs.trainer.name} gets its chunks another way than dispatch={config.dispatch!r}"
        )
    if (programs.trainer.find_op("etcd_await_pass") is not None) != config.passes_on_demand:
        yield _bad(
            "config-agree",
            f"{programs.trainer.name} begins passes otherwise than passes_on_demand={config.passes_on_demand}",
        )
    yield from _accumulated(programs.trainer, config)


def _compensated(program: Program, config: JobConfig) -> Found:
    wanted = program.of_kind(Kind.PARAM) if config.mode == "dc_asgd" else []
    found = Counter(op.reads[1] for _, _, op in _ops(program, "dc_asgd"))
    if found != Counter(v.name for v in wanted):
        yield _bad(
            "config-agree",
            f"{program.name} compensates {len(found)} of its parameters' gradients, expected "
            f"{len(wanted)}, once each: the mode is {config.mode}",
        )


def _accumulated(trainer: Program, config: JobConfig) -> Found:
    wanted = [config.local_steps] if config.local else []
    found = [op.attrs["count"] for _, _, op in _ops(trainer, "local_steps")]
    if found != wanted:
        yield _bad(
            "config-agree",
            f"{trainer.name} has units of {found or 'no'} local steps, expected "
            f"{wanted or 'none'}: the mode is {config.mode}, local_steps {config.local_steps}",
        )
