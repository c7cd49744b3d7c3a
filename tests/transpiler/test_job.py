"""A job on disk: what is saved is what is loaded; what is damaged, missing or foreign is a clear error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.transpiler.job import Job
from graphft.transpiler.layout import all_slices, assemble
from tests.support.programs_by_hand import linear


def job_of(**options: object) -> Job:
    data = graphft.arrays(chunk_size=8, x=torch.arange(6400.0).reshape(32, 200), y=torch.zeros(32, 1))
    return graphft.transpile(
        linear(),
        data=data,
        **{"batch_size": 4, "trainers": 2, "pservers": 2, "ft": True, "slice_unit": 64, "min_block": 64, **options},
    )


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of()


@pytest.fixture
def saved(job: Job, tmp_path: Path) -> Path:
    job.save(tmp_path / "job")
    return tmp_path / "job"


def test_round_trip(job: Job, saved: Path) -> None:
    loaded = Job.load(saved)
    assert loaded.programs == job.programs
    assert (loaded.config, loaded.hash) == (job.config, job.hash)
    for name, program in job.programs.by_name().items():
        values = loaded.programs.by_name()[name].values
        assert values.keys() == program.values.keys()
        assert all(torch.equal(values[n], v) for n, v in program.values.items())
    assert loaded.diff() == job.diff()
    assert [s.after for s in loaded.passes] == [s.after for s in job.passes]
    assert loaded.passes[-1].programs == job.programs
    loaded.verify()
    assert sorted(p.name for p in saved.iterdir()) == ["data", "job.json", "programs", "source"]
    assert sorted(p.name for p in (saved / "data").iterdir()) == ["x.npy", "y.npy"]


def test_saving_the_same_job_again_changes_nothing(saved: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    job_of().save(saved)
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before
    assert [p.name for p in saved.parent.iterdir()] == ["job"]


def test_another_folder_is_left_alone(job: Job, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(GraphftError, match="holds no job") as caught:
        job.save(tmp_path / "mine")
    assert caught.value.rule == "job-directory"
    with pytest.raises(GraphftError, match="holds another job"):
        job_of(seed=1).save(saved)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "job"):
        with pytest.raises(GraphftError):
            job.save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "job", "mine"]


def test_wrong_folders(job: Job, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="is no folder") as caught:
        Job.load(tmp_path / "nothing")
    assert caught.value.rule == "job-directory"
    with pytest.raises(GraphftError, match="it has no job"):
        Job.load(tmp_path)
    (saved / "job.json").write_text("{")
    with pytest.raises(GraphftError, match="damaged"):
        Job.load(saved)
    (saved / "job.json").write_text("{}")
    with pytest.raises(GraphftError, match="another format"):
        Job.load(saved)


def test_changed_programs_and_options_are_noticed(saved: Path) -> None:
    (saved / "programs/trainer/values.safetensors").rename(saved / "aside")
    with pytest.raises(GraphftError, match=r"values\.safetensors"):
        Job.load(saved)
    (saved / "aside").rename(saved / "programs/trainer/values.safetensors")
    record = json.loads((saved / "job.json").read_text())
    (saved / "job.json").write_text(json.dumps(record | {"config": record["config"] | {"unknown": 1}}))
    with pytest.raises(GraphftError, match="unknown"):
        Job.load(saved)
    (saved / "job.json").write_text(json.dumps(record))
    text = saved / "programs" / "pserver0" / "program.gft"
    text.write_text(text.read_text().replace("momentum = 0.9", "momentum = 0.8"))
    with pytest.raises(GraphftError, match="its files are of job"):
        Job.load(saved)


def test_hash_says_what_job_it_is(job: Job) -> None:
    assert job_of(name="other", etcd_endpoints="a:1,b:2", exact=False).hash == job.hash
    others = [
        job_of(seed=1),
        job_of(batch_size=8),
        job_of(trainers=1),
        job_of(ft=False),
        job_of(epochs=2),
        job_of(sync=False),
        job_of(checkpoint_every=3),
    ]
    assert len({j.hash for j in [job, *others]}) == 8


def test_a_script_whose_lines_have_moved_makes_the_same_job() -> None:
    """The lines stand in what a program assumes of its sizes, for people."""
    made = []
    for line in ("train.py:11 in forward", "renamed.py:99 in forward"):
        program = linear()
        program.attrs["assume"] = (("batch != 1", line),)
        data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
        made.append(graphft.transpile(program, data=data, batch_size=4, ft=True))
    assert made[0].programs != made[1].programs
    assert made[0].hash == made[1].hash
    program.attrs["assume"] = (("batch != 2", line),)
    assert graphft.transpile(program, data=data, batch_size=4, ft=True).hash != made[0].hash


def test_the_model_is_assembled_from_what_shards_hold(job: Job) -> None:
    shards = [job.pserver_program(i).values for i in range(2)]
    whole = assemble(job.trainer_program(), shards)
    assert all(torch.equal(whole[n], job.source.values[n]) for n in ("w", "b"))
    for wrong in (shards[:1], [{"w@slice0": torch.zeros(128, dtype=torch.float64)}, shards[1]]):
        with pytest.raises(GraphftError, match=r"^error\[assemble\]"):
            assemble(job.trainer_program(), wrong)


FEATURES = 256


class Named(nn.Module):
    """One parameter of each name, with so many elements."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        torch.manual_seed(0)
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x[:n] * getattr(self, name)).sum() for name, n in self.sizes.items()), torch.zeros(()))


def job_of_model(model: nn.Module) -> Job:
    program = graphft.build(model, lambda m, x: m(x), {"x": (FEATURES,)})
    graphft.minimize(program, graphft.SGD(lr=0.1, momentum=0.9))
    data = graphft.arrays(chunk_size=FEATURES, x=torch.zeros(2 * FEATURES))
    return graphft.transpile(program, data=data, batch_size=FEATURES, pservers=2, ft=True, slice_unit=64, min_block=64)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Named({"block": 256, "block0": 64, "w": 256})
        self.slice = Named({"slice1": 256, "step": 256, "momentum": 64})
        self.register_buffer("block_block0", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.block_block0 += 1
        return self.block(x) + self.slice(x)


def test_a_checkpoint_holds_everything_whatever_its_name() -> None:
    model = Blocks()
    job = job_of_model(model)
    programs = [job.pserver_program(index) for index in range(2)]
    saved = [program.blocks["checkpoint"].ops[0].reads for program in programs]
    state = [name for names in saved for name in names if name.endswith("@momentum_buffer")]
    assert len(state) == len(all_slices(job.trainer_program())) - 1, "but of the buffer"
    held = [{name: program.values[name] for name in names} for program, names in zip(programs, saved, strict=True)]
    whole = assemble(job.trainer_program(), held)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("other", ["w@slice0", "w@GRAD"])
def test_names_that_would_be_taken_for_others_are_refused(other: str) -> None:
    with pytest.raises(GraphftError, match=r"^error\[model\]"):
        job_of_model(Named({"w": 256, other: 64}))
