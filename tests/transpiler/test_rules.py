"""Every rule across the programs of a job, broken once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import graphft
from graphft.ir import Kind, Operator, Program, Ref, Type
from graphft.ir.diagnostics import VerificationError
from graphft.ir.verify import job_rules
from graphft.transpiler import Job, Programs
from tests.support.programs_by_hand import linear


def transpiled(**options: object) -> Job:
    """Two shards, three slices, a global norm."""
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    program = linear(clip=graphft.ClipByGlobalNorm(1.0))
    return graphft.transpile(
        program, chunks=data, batch_size=4, trainers=2, pservers=2, ft=True, slice_unit=64, min_block=64, **options
    )


@pytest.fixture(scope="module")
def sound() -> Job:
    return transpiled()


def op_of(program: Program, type: str, nth: int = 0) -> Operator:
    return [op for b in program.blocks.values() for op in b.ops if op.type == type][nth]


def remove(program: Program, type: str) -> None:
    for b in program.blocks.values():
        b.ops = [op for op in b.ops if op.type != type]


def repeat(program: Program, type: str) -> None:
    op = op_of(program, type)
    block = next(b for b in program.blocks.values() if any(o is op for o in b.ops))
    block.ops.insert(block.ops.index(op), replace(op, attrs=dict(op.attrs)))


def drop_operand(program: Program, type: str) -> None:
    op = op_of(program, type)
    op.args = op.args[:-1]
    if "slices" in op.attrs:
        op.attrs["slices"] = op.attrs["slices"][:-1]


Break = Callable[[Programs], object]
BREAKS: list[tuple[str, str, Break]] = [
    (
        "slice-cover",
        "misses elements 64 to 128",
        lambda p: p.trainer.variables["w"].attrs.update(slices=((0, 64, 0), (128, 200, 1))),
    ),
    (
        "slice-cover",
        "covers element 100 twice",
        lambda p: p.trainer.variables["w"].attrs.update(slices=((0, 128, 0), (100, 200, 1))),
    ),
    (
        "slice-cover",
        "its slices end at 199",
        lambda p: p.trainer.variables["w"].attrs.update(slices=((0, 128, 0), (128, 199, 1))),
    ),
    ("slice-owner", "%b lives on pserver 0", lambda p: p.trainer.variables["b"].attrs.update(slices=((0, 1, 0),))),
    ("slice-owner", "%b is buffer float32[1]", lambda p: setattr(p.pservers[1].variables["b"], "kind", Kind.BUFFER)),
    ("slice-owner", "is no slice of its own", lambda p: p.pservers[0].variable("z", Type("float32", (1,)), Kind.PARAM)),
    (
        "slice-gradient",
        "%b@GRAD of pserver1 is state float32[1]",
        lambda p: setattr(p.pservers[1].variables["b@GRAD"], "kind", Kind.STATE),
    ),
    (
        "optimize-block",
        "%b of pserver1 is written by 0 ops",
        lambda p: op_of(p.pservers[1], "listen_and_serv").attrs.update(optimize_blocks=("optimize.w@slice1",)),
    ),
    ("optimize-block", "%w@slice0 of pserver0 is written by 2 ops", lambda p: repeat(p.pservers[0], "sgd")),
    (
        "optimize-block",
        "runs block optimize.q",
        lambda p: op_of(p.pservers[1], "listen_and_serv").attrs.update(
            optimize_blocks=("optimize.w@slice1", "optimize.b", "optimize.q")
        ),
    ),
    ("saved-state", "leaves %global_step out", lambda p: drop_operand(p.pservers[0], "save_check_point")),
    ("sent-bucket", "which no pserver has", lambda p: op_of(p.trainer, "send").attrs.update(bucket=7)),
    ("sent-bucket", "moved by 2 send ops", lambda p: repeat(p.trainer, "send")),
    (
        "sent-bucket",
        "%w@GRAD[0:127]: float32[127], but the pserver has %w@slice0: float32[128]",
        lambda p: op_of(p.trainer, "send").attrs.update(slices=((0, 127),)),
    ),
    ("pulled-bucket", "moved by 0 recv ops", lambda p: remove(p.trainer, "recv")),
    ("pulled-bucket", "but the pserver has", lambda p: drop_operand(p.pservers[1], "bucket")),
    (
        "barrier-count",
        "send_barrier counts 1 pservers, the job has 2",
        lambda p: op_of(p.trainer, "send_barrier").attrs.update(shards=1),
    ),
    ("barrier-count", "wait_pservers counts 3", lambda p: op_of(p.trainer, "wait_pservers").attrs.update(count=3)),
    ("barrier-count", "etcd_put_job counts 3", lambda p: op_of(p.coordinator, "etcd_put_job").attrs.update(pservers=3)),
    ("barrier-count", "0 fetch_barrier ops", lambda p: remove(p.trainer, "fetch_barrier")),
    (
        "slot-count",
        "listen_and_serv counts 4 slots, etcd_claim_slots counts 2",
        lambda p: op_of(p.pservers[0], "listen_and_serv").attrs.update(slots=4),
    ),
    (
        "serve-agree",
        "serves shard 0, expected 1",
        lambda p: op_of(p.pservers[1], "listen_and_serv").attrs.update(shard=0),
    ),
    (
        "serve-agree",
        "checkpoint_every = 9, pserver0 has 50",
        lambda p: op_of(p.pservers[1], "listen_and_serv").attrs.update(checkpoint_every=9),
    ),
    ("serve-agree", "0 listen_and_serv ops", lambda p: remove(p.pservers[0], "listen_and_serv")),
    ("norm-order", "unlike the others", lambda p: p.pservers[1].blocks["reduce"].attrs.update(order=((1, 0, 3),))),
    (
        "norm-order",
        "has 3 of its partial sums, expected each of 2 once",
        lambda p: [s.blocks["reduce"].attrs.update(order=((0, 0, 3), (1, 0, 3))) for s in p.pservers],
    ),
    (
        "finite-check",
        "send has check = False, on_nonfinite is 'stop'",
        lambda p: op_of(p.trainer, "send").attrs.pop("check"),
    ),
    ("finite-check", "a step has 0 check_finite ops", lambda p: remove(p.trainer, "check_finite")),
    (
        "finite-check",
        "skip_block is '', on_nonfinite is 'skip'",
        lambda p: op_of(p.trainer, "send_barrier").attrs.update(on_nonfinite="skip"),
    ),
    (
        "config-agree",
        "total_steps = 99, the configuration says 4",
        lambda p: [op_of(s, "listen_and_serv").attrs.update(total_steps=99) for s in p.pservers],
    ),
    (
        "config-agree",
        "trainer begins passes otherwise than passes_on_demand=False",
        lambda p: p.trainer.blocks["pass"].append_op("etcd_await_pass"),
    ),
    (
        "config-agree",
        "checkpoint_passes = True, the configuration says False",
        lambda p: [op_of(s, "listen_and_serv").attrs.update(checkpoint_passes=True) for s in p.pservers],
    ),
]


@pytest.mark.parametrize(("rule", "message", "break_it"), BREAKS, ids=[rule for rule, _, _ in BREAKS])
def test_broken(sound: Job, rule: str, message: str, break_it: Break) -> None:
    programs = sound.programs.clone()
    break_it(programs)
    with pytest.raises(VerificationError) as caught:
        replace(sound, programs=programs).verify()
    found = [d for d in caught.value.diagnostics if d.rule == rule]
    assert found, caught.value
    assert any(message in d.message for d in found), [d.message for d in found]
    assert all(d.help for d in found)


COMPENSATED: list[tuple[str, str, Break]] = [
    (
        "slice-backup",
        "%w@slice0 of pserver0 is no parameter of an async shard",
        lambda p: op_of(p.pservers[0], "listen_and_serv").attrs.update(sync=True),
    ),
    (
        "slice-backup",
        "%w@slice0 of pserver0 is no parameter of an async shard",
        lambda p: setattr(p.pservers[0].variables["w@slice0"], "kind", Kind.BUFFER),
    ),
    (
        "slice-backup",
        "%b is compensated with %b@GRAD and %b",
        lambda p: setattr(p.pservers[1].blocks["reduce"].ops[1], "args", tuple(map(Ref, ("b@GRAD", "b", "b")))),
    ),
    (
        "slice-backup",
        "%b@BACKUP of pserver1 is no input",
        lambda p: setattr(p.pservers[1].variables["b@BACKUP"], "kind", Kind.STATE),
    ),
    (
        "config-agree",
        "pserver1 compensates 0 of its parameters' gradients, expected 2",
        lambda p: remove(p.pservers[1], "dc_asgd"),
    ),
    (
        "config-agree",
        "pserver0 compensates 1 of its parameters' gradients, expected 1, once",
        lambda p: repeat(p.pservers[0], "dc_asgd"),
    ),
]


@pytest.mark.parametrize(("rule", "message", "break_it"), COMPENSATED, ids=[rule for rule, _, _ in COMPENSATED])
def test_broken_compensation(rule: str, message: str, break_it: Break) -> None:
    test_broken(transpiled(sync=False, mode="dc_asgd"), rule, message, break_it)


def get_another_way(trainer: Program) -> None:
    op = op_of(trainer, "get_task")
    op.type = "get_chunk"


DISPATCHED: list[tuple[str, str, Break]] = [
    *(
        ("dispatch", f"trainer has {type} in no block", lambda p, type=type: remove(p.trainer, type))
        for type in ("find_coordinator", "finish_task", "fail_task", "renew_tasks")
    ),
    ("dispatch", "finish_task in ['step', 'step']", lambda p: repeat(p.trainer, "finish_task")),
    ("dispatch", "trainer has get_task in no block", lambda p: get_another_way(p.trainer)),
    (
        "dispatch",
        "trainer has etcd_enqueue_todo, but a coordinator",
        lambda p: p.trainer.block("pass").append_op("etcd_enqueue_todo"),
    ),
    ("dispatch", "coordinator has load_tasks, publish", lambda p: remove(p.coordinator, "acquire_coordinator_lock")),
    ("dispatch", "coordinator has none", lambda p: p.coordinator.blocks["serve"].ops.clear()),
    (
        "dispatch",
        "expected acquire_coordinator_lock, load_tasks",
        lambda p: p.coordinator.blocks["serve"].ops.reverse(),
    ),
    (
        "dispatch",
        "different timeouts: {'renew_tasks': 60.0, 'serve_tasks': 7.0}",
        lambda p: op_of(p.coordinator, "serve_tasks").attrs.update(timeout=7.0),
    ),
]


@pytest.mark.parametrize(("rule", "message", "break_it"), DISPATCHED, ids=[rule for rule, _, _ in DISPATCHED])
def test_broken_dispatch(rule: str, message: str, break_it: Break) -> None:
    test_broken(transpiled(dispatch="coordinator"), rule, message, break_it)


def test_dispatch_is_the_configurations(sound: Job) -> None:
    with pytest.raises(VerificationError, match="another way than dispatch='coordinator'"):
        replace(sound, config=sound.config.replace(dispatch="coordinator")).verify()


def test_a_coordinator_without_trainers_that_ask_it(sound: Job) -> None:
    def serve(p: Programs) -> None:
        for type in ("acquire_coordinator_lock", "load_tasks", "publish_coordinator", "serve_tasks"):
            p.coordinator.blocks["serve"].append_op(type)  # type: ignore[union-attr]

    test_broken(sound, "dispatch", "trainer has get_task in no block", serve)


def test_broken_local_accumulation() -> None:
    accumulating = {"sync": False, "mode": "geo_sgd", "local_steps": 2}
    for count, rule, message in (
        [4, "config-agree", "has units of [4] local steps, expected [2]"],
        [0, "local-block", "local_steps has count = 0"],
    ):
        test_broken(
            transpiled(**accumulating),
            rule,
            message,
            lambda p, n=count: op_of(p.trainer, "local_steps").attrs.update(count=n),
        )
    for name, message in (("locale", "block locale, which is not there"), ("step", "block step, which is its own")):
        test_broken(
            transpiled(**accumulating),
            "local-block",
            message,
            lambda p, n=name: op_of(p.trainer, "local_steps").attrs.update(block=n),
        )
    job = transpiled(**accumulating)
    job = replace(job, config=job.config.replace(mode="async", local_steps=1))
    with pytest.raises(VerificationError, match="expected none: the mode is async"):
        job.verify()


def test_sound(sound: Job) -> None:
    sound.verify()


def test_every_rule_is_broken_by_a_test() -> None:
    # Tests of the verifier may have registered rules of their own in this process.
    ours = {r.id for r in job_rules() if r.check.__module__.startswith("graphft.")}
    assert ours | {"config-agree"} == {rule for rule, _, _ in BREAKS + COMPENSATED + DISPATCHED}


def test_number_of_pservers_is_the_configurations(sound: Job) -> None:
    with pytest.raises(VerificationError, match="2 pserver programs, its configuration says 3"):
        replace(sound, config=sound.config.replace(pservers=3)).verify()


def test_a_broken_pass_is_named(sound: Job) -> None:
    class Careless:
        name = "careless"

        def run(self, job: Programs) -> Programs:
            job = job.clone()
            remove(job.trainer, "aten.addmm")
            return job

    from graphft.transpiler import run_passes

    with pytest.raises(VerificationError) as caught:
        run_passes(sound.source, [Careless()])
    assert "(after pass careless)" in str(caught.value)
    assert caught.value.rule == "read-before-write"
