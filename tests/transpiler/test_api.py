"""What `transpile` refuses: each a clear error with a remedy, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.data import DataSpec
from graphft.devices import found
from graphft.errors import GraphftError
from graphft.ir import Kind, Program, Ref, Type
from graphft.transpiler import Job
from tests.support.programs_by_hand import linear

DATA = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))


def transpile(program: Program | None = None, chunks: Any = DATA, **options: Any) -> Job:
    return graphft.transpile(linear() if program is None else program, chunks=chunks, **{"batch_size": 4, **options})


def test_what_users_call_them_and_what_the_design_does_is_the_same() -> None:
    named = graphft.transpile(linear(), data=DATA, batch_size=4, epochs=3)
    assert named.config.passes == 3
    assert named.hash == transpile(passes=3).hash


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainer": 2}, "transpile has no option trainer\nhelp: did you mean trainers or on_trainer_loss?"),
        ({"data": DATA}, "data and chunks are both given"),
        ({"epochs": 2, "passes": 2}, "epochs and passes are both given"),
        ({"epochs": 0}, "epochs is 0, expected a number, 1 or more\nhelp: correct epochs"),
        ({"epochs": 2.5}, "epochs is 2.5, expected a number, 1 or more\nhelp: correct epochs"),
        ({"max_epochs": 2}, "transpile has no option max_epochs\nhelp: epochs= says how many"),
        ({"num_workers": 2}, "transpile has no option num_workers\nhelp: trainers= says how many work at a time"),
        ({"program": torch.nn.Linear(2, 2)}, "transpile needs a program, got a Linear\nhelp: program = graphft.build("),
        ({"chunks": None}, "transpile needs data= to train on"),
        ({"trainers": 0}, "trainers is 0, expected at least 1"),
        ({"pservers": -1}, "pservers is -1, expected at least 1"),
        ({"trainers": 2.0}, "trainers is 2.0, expected a value of type int"),
        ({"trainers": True}, "trainers is True, expected a value of type int"),
        ({"sync": 1}, "sync is 1, expected a value of type bool"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"passes": 0}, "passes is 0"),
        ({"on_trainer_loss": "panic"}, "on_trainer_loss is 'panic', expected 'takeover' or 'wait'"),
        ({"on_barrier_timeout": "wait"}, "on_barrier_timeout is 'wait', expected 'rollback' or 'proceed'"),
        ({"sync": False, "on_trainer_loss": "wait"}, "in async mode no trainer is waited for"),
        ({"sync": False, "pservers": 113}, "pservers is 113, expected at most 112 in async mode"),
        ({"mode": "dc_asgd"}, "a sync step has no stale gradients\nhelp: transpile with sync=False, mode='dc_asgd'"),
        ({"sync": False, "mode": "hogwild"}, "mode is 'hogwild', expected 'async' or 'dc_asgd'"),
        ({"sync": False, "mode": "dc_asgd", "dc_lambda": 0}, "dc_lambda is 0, expected a positive number"),
        ({"sync": False, "mode": "dc_asgd", "dc_decay": 1.0}, "dc_decay is 1.0, expected at least 0 and below 1"),
        (
            {"sync": False, "local_steps": 2},
            "mode 'async' pushes after every batch\nhelp: transpile with sync=False and ",
        ),
        ({"local_steps": 2}, "local_steps is 2, but sync is True"),
        ({"mode": "geo_sgd", "local_steps": 2}, "mode is 'geo_sgd', but sync is True"),
        ({"sync": False, "mode": "half_async"}, "local_steps is 1: nothing is accumulated\nhelp: give local_steps=4"),
        ({"sync": False, "mode": "geo_sgd", "local_steps": 0}, "local_steps is 0, expected at least 1"),
        ({"sync": False, "mode": "geo_sgd", "local_steps": 3}, "the longest chunk has 2 batches\nhelp: give a larger"),
        ({"recovery_timeout": 0}, "recovery_timeout is 0, expected a positive number of seconds"),
        ({"slice_unit": 100}, "slice_unit is 100, expected a multiple of 64"),
        ({"name": "a/b"}, "name is 'a/b', expected 1 to 64 letters"),
        ({"etcd_endpoints": []}, "etcd_endpoints is ()"),
        ({"chunks": [1, 2]}, "data is a list, expected what graphft.arrays"),
        ({"batch_size": 64}, "the data has 32 records, fewer than one batch of 64"),
        ({"batch_size": 16}, "the longest chunk has 8 records, fewer than one batch of 16"),
        ({"device": "cuda:99"}, "the program is to compute on cuda:99, which "),
        ({"device": "gpu"}, "the program is to compute on gpu, which "),
        ({"device": "meta"}, "does not support: tensors there have no data\nhelp: here it can compute on cpu"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphftError) as caught:
        transpile(**options)
    assert message in str(caught.value)
    assert caught.value.help
    assert caught.value.rule


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": torch.zeros(32, 200)}, "input %y is not in the data, whose columns are x"),
        (
            {"x": torch.zeros(32, 200), "y": torch.zeros(32, 1).double()},
            (
                "input %y is float32[batch, 1], but the data's column is float64[batch, 1]\n"
                "help: convert the column to float32"
            ),
        ),
        (
            {"x": torch.zeros(32, 100), "y": torch.zeros(32, 1)},
            "input %x is float32[batch, 200], but the data's column is float32[batch, 100]",
        ),
        (
            {"x": torch.zeros(32, 200), "y": torch.zeros(32)},
            "input %y is float32[batch, 1], but the data's column is float32[batch]",
        ),
    ],
)
def test_columns(columns: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(GraphftError) as caught:
        transpile(chunks=graphft.arrays(chunk_size=8, **columns))
    assert message in str(caught.value)
    assert caught.value.rule == "columns"


def test_a_batch_that_the_program_was_not_captured_for() -> None:
    """Batch norm takes no batch of one sample: that would cost the chunk, at its last batch, and go on."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    program = graphft.build(
        model, lambda model, x: model(x).square().mean(), {"x": ((None, 3), torch.float32)}, name="normed"
    )
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(chunk_size=8, x=torch.zeros(17, 3))
    with pytest.raises(
        GraphftError, match=r"chunk 2 of the data has a batch of 1 samples, .*captured for batch != 1 only"
    ):
        transpile(program, data)
    assert transpile(program, data, drop_last=True).config.total_steps == 4
    assert transpile(program, graphft.arrays(chunk_size=8, x=torch.zeros(18, 3))).config.total_steps == 5


def test_columns_that_no_input_reads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Found by a user: a column of sample weights, with no input of that name, was left out without a word."""
    data = graphft.arrays(chunk_size=8, id=torch.arange(32), x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    transpile(chunks=data)
    assert "the data's column id is read by no input of the program: name it among the inputs of build()" in caplog.text
    step = transpile(chunks=data).trainer_program().blocks["step"]
    assert step.ops[1].attrs["columns"] == ("x", "y")


def test_a_storage_of_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(GraphftError, match="no file system has URLs that begin with s4://") as caught:
        transpile(storage="s4://bucket/job", ft=True)
    assert caught.value.rule == "storage-url"
    transpile(storage="s3://bucket/job", ft=True)


def test_an_integer_column_of_files_is_told_how(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("x,y\n" + "1,2\n" * 32)
    data = graphft.files(str(tmp_path / "f.csv"), "csv", {"x": ["x"] * 200, "y": ["y"]}, {"x": "int64"}, 8)
    with pytest.raises(GraphftError, match="input %x is float32") as caught:
        transpile(chunks=data)
    assert """convert the column to float32 (files(..., dtypes={'x': 'float32'}))""" in caught.value.help


def fixed_batch(size: int) -> Program:
    program = linear()
    for v in program.variables.values():
        v.type = Type(v.dtype, tuple(size if d == "batch" else d for d in v.shape))
    return program


def test_a_fixed_batch_must_be_the_batch_size() -> None:
    with pytest.raises(GraphftError, match="takes batches of 3, batch_size is 4"):
        transpile(fixed_batch(3))
    with pytest.raises(GraphftError, match="a chunk's last batch is shorter"):
        transpile(fixed_batch(3), batch_size=3)
    assert transpile(fixed_batch(3), batch_size=3, drop_last=True).config.total_steps == 8
    assert transpile(fixed_batch(4)).config.total_steps == 8


def test_not_minimized() -> None:
    with pytest.raises(GraphftError, match="has no optimizer") as caught:
        transpile(linear(minimized=False))
    assert caught.value.rule == "not-minimized"
    assert "minimize" in caught.value.help


def test_transpiled_already() -> None:
    with pytest.raises(GraphftError, match="is a trainer's already") as caught:
        transpile(transpile().trainer_program())
    assert caught.value.rule == "transpiled"


def test_parameter_without_gradient() -> None:
    program = linear(minimized=False)
    program.variable("unused", Type("float32", (3,)), Kind.PARAM, torch.zeros(3))
    step = program.blocks["step"]
    lr = step.append_op("aten.full", (), 0.1)
    for name in ("w", "b"):
        step.append_op("sgd", Ref(name), Ref(f"{name}@GRAD"), lr)
    with pytest.raises(GraphftError, match="%unused is a parameter, but no optimizer op updates it") as caught:
        transpile(program)
    assert caught.value.rule == "no-optimizer"


def test_parameter_without_value() -> None:
    program = linear()
    del program.values["w"]
    with pytest.raises(GraphftError) as caught:
        transpile(program)
    assert caught.value.rule == "missing-value"


def test_other_blocks_and_no_step() -> None:
    program = linear()
    program.block("eval").append_op("aten.neg", Ref("w"))
    with pytest.raises(GraphftError, match="has a block eval"):
        transpile(program)
    with pytest.raises(GraphftError, match="has no block step"):
        transpile(Program("empty"))


def test_a_device_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(GraphftError) as caught:
        transpile(device="cuda:99")
    assert caught.value.rule == "device"
    assert f"here it can compute on {', '.join(found())}: transpile(..., device=" in caught.value.help
    assert found()[0] == "cpu"
    with pytest.raises(GraphftError, match="compute on cuda:99, which "):
        graphft.Executor("cuda:99")


@pytest.mark.parametrize("options", [{}, {"sync": False}, {"ft": True}])
def test_no_pserver_is_idle(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    job = transpile(pservers=5, **options)
    assert job.config.pservers == len(job.programs.pservers) == 2
    assert all(any(b.startswith("optimize.") for b in p.blocks) for p in job.programs.pservers)
    (line,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "pservers is 5, but the parameters and buffers of program 'linear' make only 2 slices" in line
    assert job.hash == transpile(pservers=2, **options).hash
    assert len(transpile(pservers=5, min_block=64, slice_unit=64).programs.pservers) == 4


@pytest.mark.parametrize(("sync", "what"), [(True, "a step applies the batches of 4 slots"), (False, "4 of them work")])
def test_slots_without_chunks_are_told(sync: bool, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Found by a user: half of the trainers that he asked for did nothing, without a word."""
    transpile(trainers=4, sync=sync)
    assert "has only" not in caplog.text
    transpile(trainers=5, sync=sync)
    assert "trainers is 5, but the data has only 4 chunks: " + what in caplog.text
    assert "(chunk_size=7 makes a chunk for each)" in caplog.text


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_that_are_not_finite_at_first_are_told(
    requires_grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Found under attack: a frozen one, which no gradient shows, came through a whole job without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 1), torch.nn.Linear(1, 1))
    model.register_buffer("mask", torch.full((1,), float("-inf")))
    with torch.no_grad():
        model[0].bias.requires_grad_(requires_grad).fill_(float("nan"))
    program = graphft.build(model, lambda m, x, y: (m(x) - y).square().mean(), {"x": (None, 200), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    transpile(program)
    assert "parameter 0.bias of program" in caplog.text
    assert "is not finite before the first step" in caplog.text
    assert "mask" not in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_buffers_that_are_not_finite_at_first_are_told(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """Found under attack: the statistics of batch norm, from a damaged file."""
    model = torch.nn.Sequential(torch.nn.Linear(200, 1), torch.nn.BatchNorm1d(1))
    model[1].running_var.fill_(value)
    program = graphft.build(model, lambda m, x, y: (m(x) - y).square().mean(), {"x": (None, 200), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    transpile(program)
    assert "buffer 1.running_var of program" in caplog.text


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
    assert transpile(chunks=data).config.total_steps == 8
    assert transpile(chunks=data, passes=3).config.total_steps == 24
    assert transpile(chunks=data, drop_last=True).config.total_steps == 5
    assert transpile(chunks=data, trainers=2).config.total_steps in (5, 6)
    assert transpile(chunks=data, trainers=2, sync=False).config.total_steps == 8
    for mode in ("half_async", "geo_sgd"):  # units of 2 and 1, 2 and 1, 2 batches; without short ones 2, 2, 1
        assert transpile(chunks=data, sync=False, mode=mode, local_steps=2, passes=3).config.total_steps == 15
        assert transpile(chunks=data, sync=False, mode=mode, local_steps=2, drop_last=True).config.total_steps == 3
    assert transpile(chunks=data, sync=False, mode="geo_sgd").config.total_steps == 8


@pytest.mark.parametrize(
    ("lr", "first"),
    [
        (graphft.schedule.cosine(0.1, 3), 3),
        (graphft.schedule.linear_warmup(graphft.schedule.cosine(0.1, 3), 2), 3),
        (graphft.schedule.cosine(0.1, 160), None),
        (graphft.schedule.cosine(0.1, 159), None),
        (graphft.schedule.cosine(0.1, 3, min_lr=0.01), None),
        (lambda step: 0.0 * step, 0),
        (lambda step: 0.1 * (step % 4 == 0), None),
        (0.1, None),
    ],
)
def test_a_schedule_that_is_shorter_than_the_job_is_told(
    lr: Any, first: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's job of 900 steps had the schedule of 75: it was complete, and had learned as much."""
    program = linear(optimizer=graphft.SGD(lr=lr))
    assert transpile(program, passes=20).config.total_steps == 160
    told = [r.getMessage() for r in caplog.records if "learning rate" in r.getMessage()]
    wanted = (
        f"the learning rate %lr is 0 from step {first} on, and the job has 160 steps: the last {160 - (first or 0)} do"
    )
    assert [text[: len(wanted)] for text in told] == ([] if first is None else [wanted])


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ("loss", ""),
        ("val_accuracy", ""),
        ("macro_f1", ""),
        ("misclassification", ""),
        (graphft.Criterion("oddness", "min"), ""),
        ("oddness", "the highest oddness is taken for the best one; for the other way, give Criterion("),
        (graphft.EarlyStopping("neg_loss"), "the lowest neg_loss is taken for the best one; for the other way, give E"),
    ],
)
def test_which_way_of_a_metric_is_better_is_told_where_its_name_is_no_usual_one(
    best: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error rate of an unusual name: the worst model was kept, and nothing said so."""
    data = graphft.arrays(x=torch.ones(4, 2), chunk_size=2)
    graphft.Validation(data=data, **{"stop" if isinstance(best, graphft.EarlyStopping) else "best": best})
    assert caplog.text.count("is taken for the best one") == bool(told)
    assert told in caplog.text
