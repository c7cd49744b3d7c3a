"""Every rule across the programs of a job, broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import graphft
from graphft.ir import Kind, Operator, Program, Ref, Type
from graphft.ir.verify import JOB_RULES, VerificationError
from graphft.transpiler.job import Job
from graphft.transpiler.programs import Programs, run_passes
from tests.support.programs_by_hand import linear


def transpiled(scaler: graphft.GradScaler | None = None, **options: object) -> Job:
    """Two shards, three slices, a global norm."""
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    program = linear(clip=graphft.ClipByGlobalNorm(1.0), scaler=scaler)
    return graphft.transpile(
        program, data=data, batch_size=4, trainers=2, pservers=2, ft=True, slice_unit=64, min_block=64, **options
    )


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    return {
        "sync": transpiled(),
        "scaled": transpiled(graphft.GradScaler(), on_nonfinite="skip"),
        "dc_asgd": transpiled(sync=False, mode="dc_asgd"),
        "geo_sgd": transpiled(sync=False, mode="geo_sgd", local_steps=2),
        "coordinator": transpiled(dispatch="coordinator"),
    }


def op_of(program: Program | None, type: str) -> Operator:
    assert program is not None
    op = program.find_op(type)
    assert op is not None
    return op


def change(type: str, *roles: str, **attrs: Any) -> Callable[[Programs], object]:
    return lambda p: [op_of(p.by_name()[role], type).attrs.update(attrs) for role in roles or ("trainer",)]


def remove(type: str, role: str = "trainer") -> Callable[[Programs], None]:
    def broken(p: Programs) -> None:
        for b in p.by_name()[role].blocks.values():
            b.ops = [op for op in b.ops if op.type != type]

    return broken


def repeat(type: str, role: str = "trainer") -> Callable[[Programs], None]:
    def broken(p: Programs) -> None:
        block = next(b for b in p.by_name()[role].blocks.values() if any(op.type == type for op in b.ops))
        at = next(i for i, op in enumerate(block.ops) if op.type == type)
        block.ops.insert(at, replace(block.ops[at]))

    return broken


def slices(*ranges: tuple[int, int, int], of: str = "w") -> Callable[[Programs], None]:
    return lambda p: p.trainer.variables[of].attrs.update(slices=ranges)


def kind(name: str, kind: Kind, role: str) -> Callable[[Programs], None]:
    return lambda p: setattr(p.by_name()[role].variables[name], "kind", kind)


def scale_on_trainer(p: Programs) -> None:
    p.trainer.variable("loss_scale@growth_tracker", Type("int32", ()), Kind.STATE)
    p.trainer.blocks["step"].ops.append(op_of(p.pservers[1], "update_scale"))


BREAKS: list[tuple[str, str, Callable[[Programs], object]]] = [
    ("sync", "slice-cover", slices((0, 64, 0), (128, 200, 1))),
    ("sync", "slice-cover", slices((0, 128, 0), (100, 200, 1))),
    ("sync", "slice-cover", slices((0, 128, 0), (128, 199, 1))),
    ("sync", "slice-owner", slices((0, 1, 0), of="b")),
    ("sync", "slice-owner", kind("b", Kind.BUFFER, "pserver1")),
    ("sync", "slice-owner", lambda p: p.pservers[0].variable("z", Type("float32", (1,)), Kind.PARAM)),
    ("sync", "slice-gradient", kind("b@GRAD", Kind.STATE, "pserver1")),
    ("sync", "optimize-block", change("listen_and_serv", "pserver1", optimize_blocks=("optimize.w@slice1",))),
    ("sync", "optimize-block", repeat("sgd", "pserver0")),
    (
        "sync",
        "optimize-block",
        change("listen_and_serv", "pserver1", optimize_blocks=("optimize.w@slice1", "optimize.b", "optimize.q")),
    ),
    ("sync", "saved-state", lambda p: setattr(op_of(p.pservers[0], "save_check_point"), "args", ())),
    ("sync", "moved-bucket", change("send", bucket=7)),
    ("sync", "moved-bucket", change("send", slices=((0, 127),))),
    ("sync", "moved-bucket", repeat("send")),
    ("sync", "moved-bucket", remove("recv")),
    ("sync", "moved-bucket", lambda p: setattr(op_of(p.pservers[1], "bucket"), "args", ())),
    ("sync", "barrier-count", change("send_barrier", shards=1)),
    ("sync", "barrier-count", change("wait_pservers", count=3)),
    ("sync", "barrier-count", change("etcd_put_job", "coordinator", pservers=3)),
    ("sync", "barrier-count", remove("fetch_barrier")),
    ("sync", "serve-agree", change("listen_and_serv", "pserver1", shard=0)),
    ("sync", "serve-agree", change("listen_and_serv", "pserver1", checkpoint_every=9)),
    ("sync", "serve-agree", remove("listen_and_serv", "pserver0")),
    ("sync", "norm-order", lambda p: p.pservers[1].blocks["reduce"].attrs.update(order=((1, 0, 3),))),
    (
        "sync",
        "norm-order",
        lambda p: [s.blocks["reduce"].attrs.update(order=((0, 0, 3), (1, 0, 3))) for s in p.pservers],
    ),
    ("sync", "finite-check", lambda p: op_of(p.trainer, "send").attrs.pop("check")),
    ("sync", "finite-check", remove("check_finite")),
    ("sync", "finite-check", change("send_barrier", on_nonfinite="skip")),
    ("scaled", "finite-check", change("listen_and_serv", "pserver0", "pserver1", skip_block="")),
    ("scaled", "loss-scale", lambda p: p.pservers[1].blocks["skip"].ops.pop()),
    ("scaled", "loss-scale", lambda p: p.pservers[1].blocks["skip"].ops[-1].attrs.pop("found_inf")),
    ("scaled", "loss-scale", lambda p: p.pservers[1].blocks["optimize.loss_scale"].ops[0].attrs.update(found_inf=True)),
    ("scaled", "loss-scale", scale_on_trainer),
    ("sync", "config-agree", change("listen_and_serv", "pserver0", "pserver1", total_steps=99)),
    ("sync", "config-agree", change("listen_and_serv", "pserver0", "pserver1", slots=4)),
    ("sync", "config-agree", change("etcd_claim_slots", slots=4)),
    ("sync", "config-agree", lambda p: p.trainer.block("pass").append_op("etcd_await_pass")),
    ("sync", "config-agree", change("listen_and_serv", "pserver0", "pserver1", checkpoint_passes=True)),
    ("sync", "dispatch", lambda p: p.coordinator.block("serve").append_op("serve_tasks")),  # type: ignore[union-attr]
    ("dc_asgd", "slice-backup", change("listen_and_serv", "pserver0", sync=True)),
    ("dc_asgd", "slice-backup", kind("w@slice0", Kind.BUFFER, "pserver0")),
    (
        "dc_asgd",
        "slice-backup",
        lambda p: setattr(p.pservers[1].blocks["reduce"].ops[1], "args", tuple(map(Ref, ("b@GRAD", "b", "b")))),
    ),
    ("dc_asgd", "slice-backup", kind("b@BACKUP", Kind.STATE, "pserver1")),
    ("dc_asgd", "config-agree", remove("dc_asgd", "pserver1")),
    ("dc_asgd", "config-agree", repeat("dc_asgd", "pserver0")),
    ("geo_sgd", "config-agree", change("local_steps", count=4)),
    *(
        ("coordinator", "dispatch", remove(op))
        for op in ("find_coordinator", "finish_task", "fail_task", "renew_tasks")
    ),
    ("coordinator", "dispatch", repeat("finish_task")),
    ("coordinator", "dispatch", lambda p: setattr(op_of(p.trainer, "get_task"), "type", "get_chunk")),
    ("coordinator", "dispatch", lambda p: p.trainer.block("pass").append_op("etcd_enqueue_todo")),
    ("coordinator", "dispatch", remove("acquire_coordinator_lock", "coordinator")),
    ("coordinator", "dispatch", lambda p: p.coordinator.blocks["serve"].ops.reverse()),  # type: ignore[union-attr]
]


@pytest.mark.parametrize("number", range(len(BREAKS)), ids=[f"{rule}-{job}" for job, rule, _ in BREAKS])
def test_broken(jobs: dict[str, Job], number: int) -> None:
    job, rule, break_it = BREAKS[number]
    programs = jobs[job].programs.clone()
    break_it(programs)
    with pytest.raises(VerificationError) as caught:
        replace(jobs[job], programs=programs).verify()
    assert rule in {d.rule for d in caught.value.diagnostics if d.help}, caught.value


@pytest.mark.parametrize(
    "options", [{"dispatch": "coordinator"}, {"pservers": 3}, {"sync": False, "mode": "geo_sgd", "local_steps": 2}]
)
def test_other_options_than_the_programs(jobs: dict[str, Job], options: dict[str, Any]) -> None:
    jobs["sync"].verify()
    with pytest.raises(VerificationError, match=r"^error\[config-agree\]"):
        replace(jobs["sync"], config=jobs["sync"].config.replace(**options)).verify()


def test_every_rule_is_broken_by_a_test() -> None:
    # Tests of the verifier may have registered rules of their own in this process.
    ours = {r.id for r in JOB_RULES if r.check.__module__.startswith("graphft.")}
    assert ours | {"config-agree"} == {rule for _, rule, _ in BREAKS}


def test_a_broken_pass_is_named_and_its_input_is_not_changed(jobs: dict[str, Job]) -> None:
    def is_careless(job: Programs, config: object) -> None:
        remove("aten.addmm")(job)

    job = jobs["sync"]
    before = str(job.source)
    with pytest.raises(VerificationError) as caught:
        run_passes(job.source, [is_careless], job.config)
    assert (caught.value.after, caught.value.rule) == ("is-careless", "read-before-write")
    assert str(job.source) == before
