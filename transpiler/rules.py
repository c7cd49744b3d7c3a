"""The verifier's rules across the programs of a job. Each yields what it finds: a message, and a block and op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from graphft.ir import Block, Kind, Operator, Program, Ref, Type, backup_name, grad_name, refs
from graphft.ir.registry import attr, given_attrs, writes_of
from graphft.ir.verify import Diagnostic, job_rule
from graphft.transpiler.layout import evolving, gradient_of, pushed_as, slices_of
from graphft.transpiler.programs import Programs

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

Found = Iterator[tuple[Any, ...]]
_HELP = "transpile the program again; by hand, make both sides agree"


def _rule(id: str, description: str) -> Callable[[Callable[[Programs], Found]], None]:
    def add(check: Callable[[Programs], Found]) -> None:
        @job_rule(id, description)
        def found(named: Mapping[str, Program]) -> Iterator[Diagnostic]:
            if "trainer" not in named:
                return
            pservers = tuple(p for name, p in named.items() if name.startswith("pserver"))
            programs = Programs(named["trainer"], pservers, named.get("coordinator"), named.get("evaluation"))
            for message, *place in check(programs):
                yield Diagnostic(id, message, _HELP, *place)

    return add


def _ops(program: Program | None, *types: str) -> Iterator[tuple[Block, int, Operator]]:
    for block in program.blocks.values() if program is not None else ():
        for i, op in enumerate(block.ops):
            if op.type in types:
                yield block, i, op


# -- slices -----------------------------------------------------------------------------------------------------


@_rule("slice-cover", "the slices of a parameter or buffer cover it exactly once")
def _slice_cover(programs: Programs) -> Found:
    for v in evolving(programs.trainer):
        slices = slices_of(v)
        ends = [0, *(s.end for s in slices)]
        if [*(s.start for s in slices), v.type.numel] != ends or sorted(set(ends)) != ends:
            yield f"%{v.name} has {v.type.numel} elements, its slices are {[(s.start, s.end) for s in slices]}", None


@_rule("slice-owner", "each slice lives on the pserver that the trainer's program names, with its kind and type")
def _slice_owner(programs: Programs) -> Found:
    expected = {
        (s.shard, s.name): f"{v.kind.value} {Type(v.dtype, (s.numel,))}"
        for v in evolving(programs.trainer)
        for s in slices_of(v)
    }
    owned = {
        (shard, v.name): f"{v.kind.value} {v.type}"
        for shard, program in enumerate(programs.pservers)
        for v in evolving(program)
    }
    for shard, name in dict.fromkeys([*expected, *owned]):
        wanted, found = (of.get((shard, name), "none") for of in (expected, owned))
        if found != wanted:
            yield f"%{name} of pserver {shard} is {found}, expected {wanted}", None


@_rule("slice-gradient", "the gradient of a slice is an input of its pserver, with the slice's type")
def _slice_gradient(programs: Programs) -> Found:
    for program in programs.pservers:
        for v in evolving(program):
            grad = program.variables.get(grad_name(v.name))
            if grad is None or grad.kind is not Kind.INPUT or grad.type != v.type:
                found = "missing" if grad is None else f"{grad.kind.value} {grad.type}"
                yield f"%{grad_name(v.name)} of {program.name} is {found}, expected input {v.type}", None


@_rule("slice-backup", "delays are compensated on async shards, with the slice's own gradient and backup, an input")
def _slice_backup(programs: Programs) -> Found:
    for program in programs.pservers:
        serves = [not op.attrs["sync"] for _, _, op in _ops(program, "listen_and_serv")]
        for block, i, op in _ops(program, "dc_asgd"):
            grad, slice_, backup_of = [r.name for r in refs(op.args)][:3]
            backup = program.variables.get(backup_name(slice_))
            if serves != [True] or program.variables[slice_].kind is not Kind.PARAM:
                yield f"%{slice_} of {program.name} is no parameter of an async shard", block, i
            elif (grad, backup_of) != (grad_name(slice_), backup_name(slice_)):
                yield f"%{slice_} is compensated with %{grad} and %{backup_of}", block, i
            elif backup is None or backup.kind is not Kind.INPUT:
                yield f"%{backup_name(slice_)} of {program.name} is no input", block, i


@_rule("optimize-block", "each slice is evolved by exactly one optimize block, which listen_and_serv runs")
def _optimize_block(programs: Programs) -> Found:
    for program in programs.pservers:
        served = [name for _, _, op in _ops(program, "listen_and_serv") for name in op.attrs["optimize_blocks"]]
        if lacking := [name for name in served if name not in program.blocks]:
            yield f"listen_and_serv of {program.name} runs block {lacking[0]}, which is not there", None
        ops = [op for name in served if name in program.blocks for op in program.blocks[name].ops]
        writers = Counter(name for op in ops for name in set(writes_of(op)))
        for v in evolving(program):
            if writers[v.name] != 1:
                yield f"%{v.name} of {program.name} is written by {writers[v.name]} ops that are run, expected 1", None


@_rule("saved-state", "a checkpoint holds every parameter, buffer and optimizer state of its shard")
def _saved_state(programs: Programs) -> Found:
    for program in programs.pservers:
        for block, i, op in _ops(program, "save_check_point"):
            missing = [v.name for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE) if v.name not in op.reads]
            if missing:
                yield f"the checkpoint of {program.name} leaves %{missing[0]} out", block, i


# -- transfers --------------------------------------------------------------------------------------------------


@_rule("moved-bucket", "every bucket of a pserver is sent once and pulled once, with the slices that the pserver has")
def _moved_bucket(programs: Programs) -> Found:
    trainer = programs.trainer
    owned = {
        (shard, op.attrs["index"]): op.reads
        for shard, program in enumerate(programs.pservers)
        for _, _, op in _ops(program, "bucket")
    }
    for type in ("send", "recv"):
        moved: Counter[tuple[int, int]] = Counter()
        names = {
            (pushed_as(v) if type == "send" else v.name, s.start, s.end): s.name
            for v in evolving(trainer)
            for s in slices_of(v)
        }
        for block, i, op in _ops(trainer, type):
            key = shard, bucket = op.attrs["shard"], op.attrs["bucket"]
            moved[key] += 1
            ranges = zip(refs(op.args), op.attrs["slices"], strict=True)
            here = tuple(names.get((ref.name, *range), f"{ref.name}{range}") for ref, range in ranges)
            if here != owned.get(key):
                there = owned.get(key, "nothing")
                yield f"{type} moves bucket {bucket} of shard {shard} as {here}, its pserver has {there}", block, i
        for key in owned:
            if moved[key] != 1:
                yield f"bucket {key[1]} of pserver {key[0]} is moved by {moved[key]} {type} ops, expected 1", None


_COUNTS = {
    "send_barrier": "shards",
    "fetch_barrier": "shards",
    "wait_pservers": "count",
    "etcd_put_job": "pservers",
    "listen_and_serv": "shards",
}


@_rule("barrier-count", "barriers and waits count the job's pservers, and a step has one barrier of each kind")
def _barrier_count(programs: Programs) -> Found:
    shards = len(programs.pservers)
    for program in programs.by_name().values() if shards else ():
        for block, i, op in _ops(program, *_COUNTS):
            counted = op.attrs[_COUNTS[op.type]]
            if counted != shards:
                yield f"{op.type} counts {counted} pservers, the job has {shards}", block, i
    for type in ("fetch_barrier", "send_barrier"):
        if (count := len(list(_ops(programs.trainer, type)))) != 1:
            yield f"a step has {count} {type} ops, expected 1", None


@_rule("serve-agree", "pservers serve their own shard, and agree on everything else")
def _serve_agree(programs: Programs) -> Found:
    own = ("shard", "optimize_blocks", "schedule_block", "reduce_block", "checkpoint_block", "metrics")
    first: dict[str, object] | None = None
    for shard, program in enumerate(programs.pservers):
        ops = list(_ops(program, "listen_and_serv"))
        if len(ops) != 1:
            yield f"{program.name} has {len(ops)} listen_and_serv ops, expected 1", None
            continue
        ((block, i, op),) = ops
        if op.attrs["shard"] != shard:
            yield f"{program.name} serves shard {op.attrs['shard']}, expected {shard}", block, i
        options = {k: v for k, v in given_attrs(op).items() if k not in own}
        first = options if first is None else first
        if differing := [k for k in sorted(options.keys() | first.keys()) if options.get(k) != first.get(k)]:
            yield f"{program.name} and pserver0 differ in {', '.join(differing)}", block, i


@_rule("norm-order", "the shards agree on the order of a global norm's partial sums, which has each of them once")
def _norm_order(programs: Programs) -> Found:
    blocks = {shard: p.blocks["reduce"] for shard, p in enumerate(programs.pservers) if "reduce" in p.blocks}
    orders = {shard: block.attrs["order"] for shard, block in blocks.items() if "order" in block.attrs}
    for shard, order in orders.items():
        block = blocks[shard]
        if order != next(iter(orders.values())):
            yield f"{block.program.name} orders the partial sums unlike the others", block
        units = Counter(u for owner, start, count in order if owner == shard for u in range(start, start + count))
        partials = block.attrs.get("partials")
        numel = block.program.variables[partials.name].type.numel if isinstance(partials, Ref) else None
        if numel is None or units != Counter(range(numel)):
            yield f"the order of {block.program.name} has {len(units)} of its partial sums, expected {numel}", block


@_rule("finite-check", "the loss and every gradient are checked, or nothing is; shards have a skip block to skip by")
def _finite_check(programs: Programs) -> Found:
    trainer = programs.trainer
    barriers = [attr(op, "on_nonfinite") for _, _, op in _ops(trainer, "send_barrier")]
    if len(barriers) != 1:
        return
    (wanted,) = barriers
    gradients = {gradient_of(v) for v in trainer.of_kind(Kind.PARAM)}
    for block, i, op in _ops(trainer, "send"):
        expected = wanted != "warn" and not gradients.isdisjoint(op.reads)
        if attr(op, "check") != expected:
            yield f"send has check = {not expected}, on_nonfinite is {wanted!r}", block, i
    if (losses := len(list(_ops(trainer, "check_finite")))) != (wanted != "warn"):
        yield f"a step has {losses} check_finite ops, on_nonfinite is {wanted!r}", None
    for program in programs.pservers:
        for block, i, op in _ops(program, "listen_and_serv"):
            name = attr(op, "skip_block")
            if (name in program.blocks) != (wanted == "skip"):
                yield f"skip_block is {name!r}, on_nonfinite is {wanted!r}", block, i


@_rule("loss-scale", "the shard with the loss scale evolves it: in its optimize block, and otherwise in its skip block")
def _loss_scale(programs: Programs) -> Found:
    for block, i, _ in _ops(programs.trainer, "update_scale"):
        yield "a trainer evolves the loss scale, which is a shard's", block, i
    for program in programs.pservers:
        found = list(_ops(program, "update_scale"))
        for block, i, op in found:
            if attr(op, "found_inf") != (block.name == "skip"):
                yield f"update_scale in block {block.name} has found_inf = {attr(op, 'found_inf')}", block, i
        if len({str(op.args) for _, _, op in found}) > 1 or len(found) not in (0, 2):
            yield f"{program.name} has {len(found)} update_scale ops, expected 2 of the same scale, or none", None


_OWN_CLAIMS = ("etcd_get_chunk", "etcd_complete_chunk", "etcd_enqueue_todo", "etcd_enqueue_timeout")
_ASKS = {"find_coordinator": "init", "get_task": "step", "finish_task": "step", "fail_task": "failed"}
_ASKS |= {"renew_tasks": "daemon"}
_SERVES = ["acquire_coordinator_lock", "load_tasks", "publish_coordinator", "serve_tasks"]


@_rule("dispatch", "trainers claim chunks themselves, or all of them ask a coordinator that serves tasks, in order")
def _dispatch(programs: Programs) -> Found:
    trainer = programs.trainer
    asked = sorted((op.type, block.name) for block, _, op in _ops(trainer, *_ASKS))
    served = [op.type for _, _, op in _ops(programs.coordinator, *_SERVES)]
    if not asked and not served:
        return
    if asked != sorted(_ASKS.items()):
        yield f"trainer asks for tasks by {asked}, expected {sorted(_ASKS.items())}", None
    for block, i, op in _ops(trainer, *_OWN_CLAIMS):
        yield f"trainer has {op.type}, but a coordinator gives out its chunks", block, i
    if programs.coordinator is not None and served != _SERVES:
        yield f"coordinator has {', '.join(served) or 'none'}, expected {', '.join(_SERVES)}", None


# -- against the configuration ------------------------------------------------------------------------------------


def check_config(programs: Programs, config: JobConfig) -> Iterator[Diagnostic]:
    """[config-agree]: the programs are of a job of these options. Needs the configuration, so it is no job rule."""

    def differs(what: str, found: object, wanted: object, *place: Any) -> Iterator[Diagnostic]:
        if found != wanted:
            yield Diagnostic("config-agree", f"{what} is {found}, the options say {wanted}", _HELP, *place)

    yield from differs("the number of pservers", len(programs.pservers), config.pservers)
    wanted = {
        "sync": config.sync,
        "slots": config.trainers,
        "total_steps": config.total_steps,
        "checkpoint_passes": config.passes_on_demand,
    }
    for program in programs.pservers:
        for block, i, op in _ops(program, "listen_and_serv"):
            for name, value in wanted.items():
                yield from differs(name, attr(op, name), value, block, i)
        compensated = sorted(op.reads[1] for _, _, op in _ops(program, "dc_asgd"))
        parameters = sorted(v.name for v in program.of_kind(Kind.PARAM) if config.mode == "dc_asgd")
        yield from differs("what is compensated", compensated, parameters)
    trainer = programs.trainer
    for block, i, op in _ops(trainer, "etcd_claim_slots"):
        yield from differs("slots", op.attrs["slots"], config.trainers, block, i)
    dispatch = "etcd" if trainer.find_op("get_task") is None else "coordinator"
    yield from differs("dispatch", dispatch, config.dispatch)
    yield from differs("passes_on_demand", trainer.find_op("etcd_await_pass") is not None, config.passes_on_demand)
    units = [op.attrs["count"] for _, _, op in _ops(trainer, "local_steps")]
    yield from differs("local_steps", units, [config.local_steps] if config.local else [])
