"""Start checks of roles, against what the first one of their kind recorded in a real etcd."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
from graphft.runtime.roles.trainer.step_check import Proof, TrialComm, moved
from graphft.transpiler.job import Job
from tests.runtime.stubs import kinds
from tests.runtime.trainers import Stage, Staged
from tests.support.programs_by_hand import linear, linear_job

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync": False},
    "dc_asgd": {"sync": False, "mode": "dc_asgd"},
    "half_async": {"sync": False, "mode": "half_async", "local_steps": 2},
    "geo_sgd": {"sync": False, "mode": "geo_sgd", "local_steps": 2},
}


def job_of(scale: float = 1.0, **options: Any) -> Job:
    x = torch.linspace(-scale, scale, 1600).reshape(16, 100)
    data = graphft.arrays(chunk_size=8, x=x, y=torch.zeros(16, 1))
    program = linear(features=100, optimizer=graphft.Adam(lr=0.1), clip=graphft.ClipByGlobalNorm(0.5))
    return linear_job(program=program, data=data, pservers=2, **options)


@pytest.fixture
def scene(staged: Staged) -> Stage:
    return staged(job_of())


@pytest.fixture(params=list(MODES))
def moded(request: pytest.FixtureRequest, staged: Staged) -> Stage:
    return staged(job_of(**MODES[request.param]))


def recorded(scene: Stage, name: str = "trainer") -> Proof:
    kv = scene.etcd.get(scene.keys.proof(name))
    assert kv is not None
    return msgspec.json.decode(kv.value, type=Proof)


def change(scene: Stage, name: str = "trainer", **fields: Any) -> None:
    """The first one has recorded something else."""
    proof = msgspec.structs.replace(recorded(scene, name), **fields)
    scene.etcd.put(scene.keys.proof(name), msgspec.json.encode(proof))


# -- trainers ---------------------------------------------------------------------------------------------------------


def test_the_first_trainer_records_and_the_next_compares(moded: Stage) -> None:
    first, second = moded.trainer(0), moded.trainer(1)
    first.check_start()
    proof = recorded(moded)
    assert (proof.by, proof.what) == (f"trainer {first.member.id}", "batch 0 of chunk 0")
    assert set(proof.inputs) == {"values of column x", "values of column y", "initial values"}
    state, scope = torch.get_rng_state(), {n: v.clone() for n, v in second.ctx.scope.items()}
    second.check_start()
    assert torch.equal(state, torch.get_rng_state())
    assert scope.keys() == second.ctx.scope.keys()
    assert all(torch.equal(v.nan_to_num(), second.ctx.scope[n].nan_to_num()) for n, v in scope.items())
    assert recorded(moded) == proof
    assert second.state.samples == 0
    assert {kv.key for kv in moded.etcd.range(moded.keys.proof("")).kvs} == {moded.keys.proof("trainer")}


def test_a_trainer_with_other_bits_is_refused_with_the_settings_that_differ(scene: Stage) -> None:
    scene.trainer(0).check_start()
    change(scene, result="other", settings={"MKL_CBWR": "COMPATIBLE"})
    with pytest.raises(GraphftError) as caught:
        scene.trainer(1).check_start()
    assert caught.value.rule == "determinism"
    assert "MKL_CBWR: COMPATIBLE there, not set here" in caught.value.message


def test_a_trainer_with_other_data_is_told_so(scene: Stage) -> None:
    scene.trainer(0).check_start()
    other = job_of(scale=2.0)
    config = scene.job.config.replace(data=other.config.data)
    scene.job = Job(scene.job.source, config, scene.job.programs, scene.job.run_id)
    with pytest.raises(GraphftError, match="it is given other values of column x"):
        scene.trainer(1).check_start()


def test_a_record_of_another_run_is_replaced(scene: Stage) -> None:
    scene.trainer(0).check_start()
    change(scene, run="another", result="other")
    scene.trainer(1).check_start()
    assert recorded(scene).by.startswith("trainer 1-")


def test_a_batch_that_cannot_be_read_holds_no_trainer_up(scene: Stage, caplog: pytest.LogCaptureFixture) -> None:
    trainer = scene.trainer(0)
    trainer.prefetcher.get = Mock(side_effect=GraphftError("storage is away", rule="read"))
    trainer.check_start()
    assert "goes on without a start check" in caplog.text
    assert "storage is away" in caplog.text
    assert kinds(scene.etcd, scene.keys) == ["unproved"]
    assert not scene.etcd.range(scene.keys.proof("")).kvs


def test_zeros_prove_nothing_so_the_values_are_moved(staged: Staged) -> None:
    job = job_of()
    shards = [job.pserver_program(i) for i in range(2)]
    for program in [*shards, job.trainer_program()]:
        program.values.update({n: torch.zeros_like(v) for n, v in program.values.items() if v.is_floating_point()})
    scene = staged(job)
    comm = TrialComm(scene.trainer(0).job)
    values = torch.cat(
        [
            comm.values_of(op.attrs["shard"], op.attrs["bucket"])
            for op in job.trainer_program().blocks["step"].ops
            if op.type == "recv"
        ]
    )
    again = TrialComm(scene.trainer(1).job).values_of(0, 0)
    assert (values != 0).float().mean() > 0.9
    assert torch.equal(values[: len(again)], again), "the same for all"
    assert moved(torch.arange(3), torch.Generator()).tolist() == [0, 1, 2]


def test_a_batch_that_has_ended_the_process_before_is_given_up(scene: Stage) -> None:
    for recorded_before in (False, True):
        for index in (0, 1):
            record = WorkRecord(record_path(scene.folder, index))
            record.begin(Phase.PROVING, Place(0, 0, 0))
        trainers = [scene.trainer(0), scene.trainer(1)]
        if recorded_before:
            trainers[0].work_record.before = None
            trainers[0].check_start()
            change(scene, result="other")
            with pytest.raises(GraphftError):
                trainers[1].check_start()
        else:
            trainers[1].check_start()
            assert scene.etcd.get(scene.keys.proof("trainer")) is None
            assert kinds(scene.etcd, scene.keys) == ["unproved"]
