"""What a Trainer takes, and what it refuses, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft import GraphftError
from graphft.callbacks import CSVLogger
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.driver.checks import check_place, check_role
from graphft.runtime.driver.making import make
from graphft.runtime.driver.retries import traceback_in
from graphft.runtime.driver.state import check_state
from tests.driver import epochs


def given(**options: Any) -> dict[str, Any]:
    return {"chunks": epochs.chunks(), "batch_size": 8, **options}


@dataclass
class FailureConfig:
    max_failures: int = 0
    fail_fast: bool = False


@dataclass
class CheckpointConfig:
    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None


@dataclass
class ScalingConfig:
    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"


@dataclass
class RunConfig:
    name: str | None = None
    storage_path: str | None = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: list[Any] = field(default_factory=list)


def test_a_program_becomes_a_job_whose_passes_are_on_demand() -> None:
    made = make(epochs.program(), {"trainer": {"CPU": 2}}, given(num_workers=3, pservers=2, seed=5, max_epochs=7))
    config = made.job.config
    assert (config.trainers, config.pservers, config.passes, config.seed) == (3, 2, 8, 5)
    assert (config.ft, config.sync, config.passes_on_demand) == (True, True, True)
    assert made.launch(quiet=True).resources == {"trainer": {"CPU": 2}}
    text = str(made.job.trainer_program())
    assert text.index("etcd_await_pass") < text.index("etcd_enqueue_todo")
    assert "report_metrics(%loss, %accuracy)" in text


def test_a_job_keeps_its_options() -> None:
    job = graphft.transpile(epochs.program(), trainers=2, passes=5, ft=True, **given())
    made = make(job, None, {})
    assert made.job.config == job.config.replace(passes_on_demand=True, passes=6)


def test_ray_trains_configurations() -> None:
    run = RunConfig("run", "/shared/runs", FailureConfig(5), CheckpointConfig(2))
    scaling = ScalingConfig(4, resources_per_worker={"CPU": 2})
    made = make(epochs.program(), None, given(scaling_config=scaling, run_config=run))
    config = made.job.config
    assert (config.trainers, config.name, config.keep_checkpoints, made.max_retries) == (4, "run", 2, 5)
    assert config.storage == "file:///shared/runs/run"
    assert made.resources == {"trainer": {"CPU": 2}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainers": 2}, "no option trainers.*num_workers"),
        ({"passes": 2}, "no option passes"),
        ({"sync": False}, "no option sync"),
        ({"ft": False}, "no option ft"),
        ({"wombat": 1}, "has no option wombat\\n.*it has .*data"),
        ({"scaling_config": ScalingConfig(placement_strategy="SPREAD")}, "placement_strategy='SPREAD'"),
        ({"run_config": RunConfig(callbacks=[1])}, "RunConfig has callbacks"),
        ({"run_config": RunConfig("a", failure_config=FailureConfig(fail_fast=True))}, "fail_fast"),
        ({"run_config": RunConfig(storage_path="/x")}, "storage_path and no name"),
        ({"num_workers": 2, "scaling_config": ScalingConfig(2)}, "num_workers is given twice"),
        ({"num_workers": 0}, "num_workers is 0, expected"),
        ({"max_epochs": "5"}, "max_epochs is '5', expected"),
        ({"max_retries": "3"}, "max_retries is '3', expected"),
        ({"max_epochs": 10**6}, "max_epochs is 1000000, expected 100000 or fewer"),
        ({"resources": {"worker": {"CPU": 1}}}, "resources has worker="),
        ({"resources": {"trainer": 2}}, "resources has trainer=2"),
        ({"etcd": "host:2379"}, "no option etcd.*etcd_endpoints"),
        ({"fresh": True}, "no option fresh.*--fresh"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphftError) as caught:
        make(epochs.program(), None, given(**options))
    assert caught.match(f"(?s){message}")


def test_other_mistakes(tmp_path: Path) -> None:
    job = graphft.transpile(epochs.program(), sync=False, ft=True, **given())
    for program, options, message in [
        (epochs.model(), given(), "needs a program, got Sequential"),
        (epochs.program(), {"batch_size": 8}, "needs data="),
        (job, {}, "the job is async"),
        (job, {"num_workers": 2}, "num_workers is given with a job"),
    ]:
        with pytest.raises(GraphftError, match=message):
            make(program, None, options)
    for mistake, message in [
        ({"callbacks": [object()]}, "is no callback"),
        ({"callbacks": print}, "expected a list"),
        ({"validation": epochs.program()}, "validation is a Program, expected"),
        ({"engine": "nowhere"}, "there is no engine 'nowhere'"),
    ]:
        with pytest.raises(GraphftError, match=message):
            epochs.trainer(tmp_path / "job", **mistake)
    assert not (tmp_path / "job").exists()
    trainer = epochs.trainer(tmp_path / "job", callbacks=None)
    for call in ({"max_retries": -2}, {"max_retries": 1.5}, {"checkpoint": "always"}, {"checkpoint": 0}, {"epochs": 0}):
        with pytest.raises(GraphftError, match=r"error\[option\]"):
            trainer.train(**call)
    with pytest.raises(GraphftError, match="nothing to validate with"):
        trainer.validate()
    with pytest.raises(GraphftError, match="a int, and nothing to validate with"):
        trainer.validate(3)  # type: ignore[arg-type]
    assert not (tmp_path / "job" / "etcd").exists(), "nothing was started"


def test_a_rank_of_torchrun_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(GraphftError, match="RANK is 0"):
        epochs.trainer(tmp_path / "job")


def test_a_trainer_of_another_run_says_so_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where all epochs are done, nothing else would: it never trains."""
    monkeypatch.chdir(tmp_path)
    options = epochs.OPTIONS | {"num_workers": 2, "chunks": epochs.chunks()}
    graphft.Trainer(epochs.program(), **options)
    assert capfd.readouterr().err == ""
    graphft.Trainer(epochs.program(), **options | {"batch_size": 4})
    assert "jobs/epochs/runs/1 differs in: batch_size 8 -> 4; new run in jobs/epochs/runs/2\n" in capfd.readouterr().err


def test_a_state_that_is_not_finite_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state = epochs.model().state_dict()
    state["0.bias"] = torch.full_like(state["0.bias"], torch.nan)
    check_state(epochs.program(), state)
    assert "parameter 0.bias of program" in caplog.text
    assert "is not finite in the state that is loaded" in caplog.text


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    trainer = epochs.trainer(tmp_path / "job")
    model, optimizer = epochs.model(), torch.optim.Adam(epochs.model().parameters())
    for state, message in [
        (model, "a state is expected, got a Sequential"),
        ({"0.weight": torch.zeros(16, 6)}, "0.bias is missing"),
        ({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "has state, param_groups, expected tens"),
        ({"model": model.state_dict(), "optimizer": 5}, "optimizer's state is 5, expected tensors"),
        ({"model": model.state_dict(), "optimizer": {"0.weight": {"exp_avg": 1}}}, "has 0.weight, expected tensors"),
        (model.state_dict(), "has no checkpoint yet(?s:.*)init_from="),
    ]:
        with pytest.raises(GraphftError, match=message):
            trainer.load_state_dict(state)
    assert trainer.epoch == 0


def test_validation_says_what_it_needs() -> None:
    with pytest.raises(GraphftError, match="needs data, and perhaps a program; got a Sequential"):
        graphft.Validation(epochs.model(), epochs.chunks())  # type: ignore[arg-type]
    with pytest.raises(GraphftError, match=r"has aten\._native_batch_norm_legit: it is captured in train mode"):
        graphft.Validation(epochs.program(), epochs.chunks())
    with pytest.raises(GraphftError, match="has input x, and the data no such column"):
        graphft.Validation(
            epochs.validation().program, graphft.arrays(z=epochs.data()["x"], y=epochs.data()["y"], chunk_size=8)
        )


def test_the_last_traceback_of_a_log_and_what_it_came_of() -> None:
    first = ["Traceback (most recent call last):", "  old", "ValueError: old", "[trainer 0] more"]
    cause = ["Traceback (most recent call last):", "  a", "KeyError: 1", ""]
    chain = ["The above exception was the direct cause of the following exception:", ""]
    last = ["Traceback (most recent call last):", "  b", "ValueError: new"]
    assert traceback_in([*first, *cause, *chain, *last]) == "\n".join([*cause, *chain, *last])
    assert traceback_in([*first, *last]) == "\n".join(last)
    assert traceback_in(["nothing"]) == ""


def test_the_traceback_of_an_error_is_preferred_to_a_later_one() -> None:
    """What an exit handler prints is not what has ended the worker."""
    true = ["Traceback (most recent call last):", "  a", "RuntimeError: the true cause"]
    later = ["some line", "Traceback (most recent call last):", "  b", "KeyError: 'handled'"]
    assert traceback_in([*true, *later], "RuntimeError: the true cause") == "\n".join(true)
    assert traceback_in([*true, *later], "ValueError: elsewhere") == "\n".join(later[1:])


def test_callbacks_that_nobody_would_call() -> None:
    class Keras:
        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None: ...
        def on_epoch_end(self) -> None: ...

    with pytest.raises(GraphftError, match="has on_epoch_end, which nobody would call"):
        Callbacks([Keras()])
    with pytest.raises(GraphftError, match="it is a class"):
        Callbacks([Keras])


def test_callbacks_that_could_not_be_called() -> None:
    class Few:
        def on_epoch(self, epoch: int) -> None: ...

    class Any_:
        def on_epoch(self, *arguments: object) -> None: ...
        def on_end(self, why: str = "") -> None: ...

    class Awaited:
        async def on_end(self) -> None: ...

    with pytest.raises(GraphftError, match=r"on_epoch of .* cannot be called: it is given two arguments"):
        Callbacks([Few()])
    with pytest.raises(GraphftError, match=r"on_end of .* is a coroutine, which nobody would await"):
        Callbacks([Awaited()])
    Callbacks([Any_()])


def test_places_and_roles_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="there is no role 'worker', expected one of trainer, pserver, coordinator"):
        check_role("worker")
    with pytest.raises(GraphftError, match="is where the run keeps its own checkpoints"):
        check_place(tmp_path / "checkpoints" / "mine", tmp_path)
    check_place(tmp_path / "best", tmp_path)
    check_place("s3://bucket/checkpoints", tmp_path)
    check_place("s3://bucket/run/best", tmp_path, "s3://bucket/run")
    with pytest.raises(GraphftError, match="keeps its own checkpoints"):
        check_place("s3://bucket/run/checkpoints", tmp_path, "s3://bucket/run")


def test_a_metric_with_the_name_of_something_else() -> None:
    program = epochs.program()
    program.attrs["extras"] = ("step",)
    with pytest.raises(GraphftError, match="returns 'step', which names something else"):
        make(program, None, given())
    job = graphft.transpile(epochs.program(), name="named", **given())
    job.trainer_program().attrs["extras"] = ("step",)
    with pytest.raises(GraphftError, match="returns 'step', which names something else"):
        job.run(callbacks=[CSVLogger()])
    assert not Path("jobs", "named").exists()
