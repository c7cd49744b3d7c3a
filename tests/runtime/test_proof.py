"""Start checks of roles, against what the first one of their kind recorded in a real etcd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.roles.start_check import Proof
from graphft.runtime.roles.trainer.step_check import ATTEMPTS, StepTrial, TrialComm, moved
from graphft.transpiler import Job
from tests.runtime.trainers import Stage, stage
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear

ROOT = Path(__file__).parents[2]
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
    return graphft.transpile(
        program, data=data, batch_size=4, trainers=2, pservers=2, ft=True, slice_unit=64, min_block=64, **options
    )


@pytest.fixture
def scene(etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> Iterator[Stage]:
    with stage(etcd_server, keys, job_of(), tmp_path) as made:
        yield made


@pytest.fixture(params=list(MODES))
def moded(request: pytest.FixtureRequest, etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> Iterator[Stage]:
    with stage(etcd_server, keys, job_of(**MODES[request.param]), tmp_path) as made:
        yield made


def pserver(scene: Stage, index: int = 0) -> Any:
    made = Pserver(scene.job, scene.folder, Patient(scene.server.endpoints), index)
    scene.stack.callback(made.transport.close)
    scene.stack.callback(made.close)
    scene.stack.callback(made.server.saver.close)
    return made


def recorded(scene: Stage, name: str = "trainer") -> Proof:
    kv = scene.etcd.get(scene.keys.proof(name))
    assert kv is not None
    return msgspec.json.decode(kv.value, type=Proof)


def change(scene: Stage, name: str = "trainer", **fields: Any) -> None:
    """What the first one recorded is something else."""
    proof = msgspec.structs.replace(recorded(scene, name), **fields)
    scene.etcd.put(scene.keys.proof(name), msgspec.json.encode(proof))


# -- trainers ---------------------------------------------------------------------------------------------------------


def test_the_first_trainer_records_and_the_next_compares(moded: Stage) -> None:
    """In every mode; with random numbers, metrics and the trainer's own scope as they were."""
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


def test_without_exact_it_is_only_warned(scene: Stage, caplog: pytest.LogCaptureFixture) -> None:
    job = scene.job
    scene.job = Job(job.source, job.config.replace(exact=False), job.programs, job.run_id)
    scene.trainer(0).check_start()
    change(scene, result="other")
    scene.trainer(1).check_start()
    assert "computes other bits than trainer 0-" in caplog.text


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


class Away:
    """Zeros, while the file `marker` is not there."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.marker.exists():
            raise OSError("storage is away")
        return torch.zeros(100), torch.zeros(1)


def test_a_batch_that_cannot_be_read_holds_no_trainer_up(
    scene: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue finds out what is wrong with it."""
    marker = tmp_path / "away"
    data = graphft.dataset(f"{__file__}:Away", {"marker": str(marker)}, chunk_size=8)
    scene.job = Job(scene.job.source, scene.job.config.replace(data=data), scene.job.programs, scene.job.run_id)
    trainer = scene.trainer(0)
    marker.touch()
    trainer.check_start()
    assert "goes on without a start check" in caplog.text
    assert "storage is away" in caplog.text
    assert [event.kind for _, event in read_events(scene.etcd, scene.keys)] == ["unproved"]
    assert not scene.etcd.range(scene.keys.proof("")).kvs


def attempts(scene: Stage, count: int) -> None:
    scene.etcd.put(scene.keys.attempts(f"1@{socket.gethostname()}"), str(count).encode())


def test_a_batch_that_ends_a_trainer_again_and_again_is_given_up(scene: Stage) -> None:
    attempts(scene, ATTEMPTS)
    scene.trainer(1).check_start()
    assert scene.etcd.get(scene.keys.proof("trainer")) is None
    assert [event.kind for _, event in read_events(scene.etcd, scene.keys)] == ["unproved"]
    attempts(scene, ATTEMPTS - 1)
    scene.trainer(1).check_start()
    assert {kv.key for kv in scene.etcd.range(scene.keys.proof("")).kvs} == {scene.keys.proof("trainer")}


def test_what_somebody_has_computed_is_never_given_up(scene: Stage) -> None:
    """Found under attack: two trainers that were killed by others switched the check off for good."""
    scene.trainer(0).check_start()
    attempts(scene, ATTEMPTS + 1)
    change(scene, result="other")
    with pytest.raises(GraphftError) as caught:
        scene.trainer(1).check_start()
    assert caught.value.rule == "determinism"


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 2]), (True, [4])])
def test_the_shortest_batch_is_tried_as_well(
    etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path, drop_last: bool, sizes: list[int]
) -> None:
    """Libraries choose other kernels for it; here the last chunk leaves a batch of 2."""
    data = graphft.arrays(chunk_size=8, x=torch.linspace(-1, 1, 1400).reshape(14, 100), y=torch.zeros(14, 1))
    job = job_of()
    config = job.config.replace(data=data, drop_last=drop_last)
    with stage(etcd_server, keys, Job(job.source, config, job.programs, job.run_id), tmp_path) as scene:
        trainer = scene.trainer(0)
        trial = StepTrial(trainer.member, trainer.blocks, trainer.prefetcher)
        assert trial._sizes(trainer.prefetcher.get(trial.key)) == sizes


def test_zeros_prove_nothing_so_the_values_are_moved(etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> None:
    """Found under attack: of weights that are zero, a product has the same bits on every machine."""
    job = job_of()
    shards = [job.pserver_program(i) for i in range(2)]
    for program in [*shards, job.trainer_program()]:
        program.values.update({n: torch.zeros_like(v) for n, v in program.values.items() if v.is_floating_point()})
    with stage(etcd_server, keys, job, tmp_path) as scene:
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


# -- shards -----------------------------------------------------------------------------------------------------------


def test_each_shard_has_a_record_of_its_own(moded: Stage) -> None:
    shard = pserver(moded)
    before = {n: v.clone() for n, v in shard.ctx.scope.items()}
    shard.check_start()
    pserver(moded).check_start()
    pserver(moded, 1).check_start()
    assert recorded(moded, "pserver/0").by == f"pserver {shard.member.id}"
    assert recorded(moded, "pserver/0").result != recorded(moded, "pserver/1").result
    assert before.keys() == shard.ctx.scope.keys()
    assert all(torch.equal(v, shard.ctx.scope[n]) for n, v in before.items())


def test_a_shard_with_other_bits_is_refused(scene: Stage) -> None:
    pserver(scene).check_start()
    change(scene, "pserver/0", result="other")
    with pytest.raises(GraphftError) as caught:
        pserver(scene).check_start()
    assert caught.value.rule == "determinism"


# -- settings ---------------------------------------------------------------------------------------------------------


def bits(code: str, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ONEDNN_", "MKL_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    return result.stdout


@pytest.mark.slow
def test_onednn_uses_what_the_job_says_whatever_the_environment_does() -> None:
    """One trainer with ONEDNN_MAX_CPU_ISA=AVX2 ended a GELU model with other bits."""
    code = """if True:
        import torch
        import graphft
        from graphft.runtime.execute.determinism import enforce
        from graphft.transpiler import JobConfig
        data = graphft.arrays(chunk_size=1, x=torch.zeros(1))
        enforce(JobConfig("job", data, 1, onednn_isa={isa!r}))
        torch.manual_seed(0)
        x, layer = torch.randn(16, 256), torch.nn.Linear(256, 256)
        torch.nn.functional.gelu(layer(x)).square().mean().backward()
        print(layer.weight.grad.double().norm().item().hex())
    """
    mine = bits(code.format(isa=""))
    assert bits(code.format(isa=""), ONEDNN_MAX_CPU_ISA="AVX2") == mine
    narrow = bits(code.format(isa="AVX2"))
    if narrow == mine:
        pytest.skip("this CPU gives the same bits with AVX2 as with all it has")
