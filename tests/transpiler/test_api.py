"""Before anything is made, `transpile` refuses, with a remedy, or tells what a script has changed since `minimize`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.data import DataSpec
from graphft.errors import GraphftError
from graphft.ir import Kind, Program, Type
from graphft.transpiler.job import Job
from tests.support.programs_by_hand import linear

DATA = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))


def transpile(program: Program | None = None, data: Any = DATA, **options: Any) -> Job:
    return graphft.transpile(linear() if program is None else program, data=data, **{"batch_size": 4, **options})


def refused(rule: str, program: Any = None, **options: Any) -> GraphftError:
    with pytest.raises(GraphftError) as caught:
        transpile(program, **options)
    assert (caught.value.rule, bool(caught.value.help)) == (rule, True)
    return caught.value


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        *({"epochs": 0}, {"epochs": 2.5}, {"max_epochs": 2}, {"program": torch.nn.Linear(2, 2)}, {"data": [1, 2]}),
        *({"trainers": 0}, {"trainers": 2.0}, {"trainers": True}, {"sync": 1}, {"on_trainer_loss": "panic"}),
        *({"sync": False, "on_trainer_loss": "wait"}, {"sync": False, "pservers": 113}, {"mode": "dc_asgd"}),
        *({"sync": False, "mode": "hogwild"}, {"sync": False, "mode": "dc_asgd", "dc_lambda": 0}, {"local_steps": 2}),
        *({"sync": False, "mode": "half_async"}, {"sync": False, "mode": "geo_sgd", "local_steps": 3}),
        *({"recovery_timeout": 0}, {"checkpoint_seconds": float("nan")}, {"slice_unit": 100}, {"max_discarded": 2}),
        *({"name": "a/b"}, {"name": "a\n"}, {"storage": "/shared"}, {"storage": "memory://a"}, {"etcd_endpoints": []}),
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert [*options][-1] in str(refused("option", **options))


def test_what_the_data_lacks_and_what_is_no_device() -> None:
    refused("short-chunks", batch_size=64)
    for option in ("device", "pserver_device"):
        for device in ("meta", "cudda", "cuda:x"):
            assert device in str(refused("device", **{option: device}))


def test_a_job_is_written_on_a_machine_without_its_devices(tmp_path: Path) -> None:
    transpile(device="cuda:99", pserver_device="cuda").save(tmp_path / "job")
    config = Job.load(tmp_path / "job").config
    assert (config.device, config.pserver_device) == ("cuda:99", "cuda")


def test_an_unknown_option_is_told_with_what_is_meant() -> None:
    for options, meant in (({"trainer": 2}, "trainers"), ({"num_workers": 2}, "trainers=")):
        assert meant in refused("option", **options).help


def test_columns() -> None:
    x, y = torch.zeros(32, 200), torch.zeros(32, 1)
    for columns in ({"x": x}, {"x": x, "y": y.double()}, {"x": x[:, :100], "y": y}, {"x": x, "y": y[:, 0]}):
        refused("columns", data=graphft.arrays(chunk_size=8, **columns))


def test_a_batch_that_the_program_was_not_captured_for() -> None:
    """Batch norm takes no batch of one sample."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    program = graphft.build(
        model, lambda model, x: model(x).square().mean(), {"x": ((None, 3), torch.float32)}, name="normed"
    )
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(chunk_size=8, x=torch.zeros(17, 3))
    with pytest.raises(GraphftError, match=r"chunk 2 of the data has a batch of 1 samples, .*captured for batch != 1 "):
        transpile(program, data)
    assert transpile(program, data, drop_last=True).config.total_steps == 4
    assert transpile(program, graphft.arrays(chunk_size=8, x=torch.zeros(18, 3))).config.total_steps == 5


def test_columns_that_no_input_reads_and_slots_without_chunks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    data = graphft.arrays(chunk_size=8, id=torch.arange(32), x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    step = transpile(data=data, trainers=4).trainer_program().blocks["step"]
    assert "no input of the program reads these columns of the data: id" in caplog.text
    assert step.ops[1].attrs["columns"] == ("x", "y")
    assert "has only" not in caplog.text
    transpile(trainers=5)
    assert "trainers is 5, but the data has only 4 chunks" in caplog.text


def fixed_batch(size: int) -> Program:
    program = linear()
    for v in program.variables.values():
        v.type = Type(v.dtype, tuple(size if d == "batch" else d for d in v.shape))
    return program


def test_a_fixed_batch_must_be_the_batch_size() -> None:
    for size in (4, 3):  # another one; the last batch of a chunk is shorter
        refused("batch-size", fixed_batch(3), batch_size=size)
    assert transpile(fixed_batch(3), batch_size=3, drop_last=True).config.total_steps == 8
    assert transpile(fixed_batch(4)).config.total_steps == 8


def test_programs_that_cannot_be_trained() -> None:
    refused("not-minimized", linear(minimized=False))
    refused("blocks", transpile().trainer_program())
    refused("blocks", Program("empty"))
    program = linear()
    program.variable("unused", Type("float32", (3,)), Kind.PARAM, torch.zeros(3))
    refused("no-optimizer", program)


def test_no_pserver_is_idle(caplog: pytest.LogCaptureFixture) -> None:
    job = transpile(pservers=5)
    assert job.config.pservers == len(job.programs.pservers) == 2
    assert all(any(b.startswith("optimize.") for b in p.blocks) for p in job.programs.pservers)
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "pservers is 5, but the parameters and buffers of program 'linear' make only 2 slices" in line
    assert job.hash == transpile(pservers=2).hash
    assert len(transpile(pservers=5, min_block=64, slice_unit=64).programs.pservers) == 4


def test_defaults_come_from_the_program() -> None:
    program = linear()
    program.name, program.attrs["seed"] = "my model (v2)", 11
    config = transpile(program, etcd_endpoints="a:1,b:2").config
    assert (config.name, config.seed, config.device) == ("my-model-v2-", 11, "cpu")
    assert config.etcd_endpoints == ("a:1", "b:2")
    assert config.torch_version == torch.__version__
    assert transpile(program, seed=3, name="x").config.seed == 3


def test_steps_follow_from_the_plan() -> None:
    data: DataSpec = graphft.arrays(chunk_size=10, x=torch.zeros(25, 200), y=torch.zeros(25, 1))  # 3, 3 and 2 batches
    assert transpile(data=data).config.total_steps == 8
    assert transpile(data=data, epochs=3).config.total_steps == 24
    assert transpile(data=data, drop_last=True).config.total_steps == 5
    assert transpile(data=data, trainers=2).config.total_steps in (5, 6)
    assert transpile(data=data, trainers=2, sync=False).config.total_steps == 8
    for mode in ("half_async", "geo_sgd"):  # units of 2 and 1, 2 and 1, 2 batches; without short ones 2, 2, 1
        assert transpile(data=data, sync=False, mode=mode, local_steps=2, epochs=3).config.total_steps == 15
        assert transpile(data=data, sync=False, mode=mode, local_steps=2, drop_last=True).config.total_steps == 3
    assert transpile(data=data, sync=False, mode="geo_sgd").config.total_steps == 8


@pytest.mark.parametrize(
    ("lr", "told"),
    [
        (graphft.schedule.cosine(0.1, 3), True),
        (graphft.schedule.cosine(0.1, 159), False),
        (lambda step: 0.1 * (step % 4 == 0), False),
    ],
)
def test_a_schedule_that_is_shorter_than_the_job_is_told(lr: Any, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert transpile(linear(optimizer=graphft.SGD(lr=lr)), epochs=20).config.total_steps == 160
    assert ("the learning rate %lr is 0 in the last 8 of the job's 160 steps" in caplog.text) == told


def test_a_metric_whose_name_does_not_tell_which_way_is_better_needs_a_mode() -> None:
    for name, mode in (("loss", "min"), ("val_accuracy", "max"), ("macro_f1", "max"), ("misclassification", "min")):
        assert graphft.Criterion(name).mode == mode
    assert graphft.Criterion("oddness", "min").mode == "min"
    for name in ("oddness", "neg_loss"):
        with pytest.raises(GraphftError, match="lowest or the highest") as caught:
            graphft.EarlyStopping(name)
        assert caught.value.rule == "option"


Change = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def program_of(change: Change) -> Program:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    program = graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 4)})
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    graphft.minimize(program, optimizer, model=model)
    program.kept = change(model, optimizer)  # type: ignore[attr-defined]
    return program


def told(program: Program, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    data = graphft.arrays(x=torch.zeros(8, 4), chunk_size=4)
    graphft.transpile(program, data=data, batch_size=4, **options)
    return "\n".join(
        r.getMessage()
        for r in caplog.records
        if " others than " in r.getMessage() or "changed after minimize" in r.getMessage()
    )


def zeros(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def test_weights_that_were_loaded_after_minimize_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert "build() copied, with which training begins: 0.weight, 0.bias" in told(program_of(zeros), caplog)


def test_weights_that_the_job_does_not_begin_with_anyway_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(zeros)
    assert told(program, caplog, init_from={n: v + 1 for n, v in graphft.state_dict(program).items()}) == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda _, o: o.param_groups[1].update(lr=0.02),
        lambda _, o: torch.optim.lr_scheduler.StepLR(o, 10),
        lambda _, o: o.load_state_dict({**o.state_dict(), "state": {0: {"momentum_buffer": torch.ones(1)}}}),
    ],
)
def test_an_optimizer_that_was_changed_after_minimize_is_told(change: Change, caplog: pytest.LogCaptureFixture) -> None:
    assert "options, groups, state or scheduler were changed" in told(program_of(change), caplog)


def test_what_was_loaded_into_the_program_or_copied_with_it_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    program = program_of(lambda *_: None)
    other = graphft.load_weights(program, {n: v + 1 for n, v in graphft.state_dict(program).items()})
    for as_it_was in (program, program.clone(), other.clone(), copy.deepcopy(program)):
        assert told(as_it_was, caplog) == ""


def test_weights_of_every_dtype_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 1)
    model.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj())
    model.register_buffer("scales", torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
    program = graphft.build(model, lambda model, x: model(x).square().mean(), {"x": (None, 4)})
    graphft.minimize(program, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    assert told(program, caplog) == ""
    model.scales = torch.tensor([2.0, float("nan")]).to(torch.float8_e4m3fn)
    assert "with which training begins: scales" in told(program, caplog)
