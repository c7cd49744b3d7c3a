"""A Trainer takes options, or refuses them before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphft
from graphft import GraphftError
from graphft.callbacks import CSVLogger
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.driver.options import check_place, make_job
from graphft.transpiler.evaluation import evaluation_of
from tests.driver import epochs


def given(**options: Any) -> dict[str, Any]:
    return {"data": epochs.chunks(), "batch_size": 8, **options}


def test_a_program_becomes_a_job_whose_passes_are_on_demand() -> None:
    job = make_job(epochs.program(), given(num_workers=3, pservers=2, seed=5, max_epochs=7))
    config = job.config
    assert (config.trainers, config.pservers, config.epochs, config.seed) == (3, 2, 8, 5)
    assert (config.ft, config.sync, config.passes_on_demand) == (True, True, True)
    text = str(job.trainer_program())
    assert text.index("etcd_await_pass") < text.index("etcd_enqueue_todo")
    assert "report_metrics(%loss, %accuracy)" in text


@pytest.mark.parametrize(
    "options",
    [
        *({"trainers": 2}, {"epochs": 2}, {"sync": False}, {"ft": False}, {"wombat": 1}, {"scaling_config": 2}),
        *({"num_workers": 0}, {"max_epochs": "5"}, {"max_epochs": 10**6}, {"etcd": "host:2379"}, {"fresh": True}),
        *({"max_retries": "3"}, {"callbacks": [3]}, {"callbacks": print}, {"validation": 3}),
        *({"resources": {"worker": {"CPU": 1}}}, {"resources": {"trainer": 2}}, {"engine": "nowhere"}),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(GraphftError) as caught:
        epochs.trainer(tmp_path / "job", **options)
    assert caught.value.rule in ("option", "engine")
    assert not (tmp_path / "job").exists()


def test_other_mistakes(tmp_path: Path) -> None:
    job = graphft.transpile(epochs.program(), sync=False, ft=True, **given())
    for program, options in ((epochs.model(), given()), *((job, {}), (job, {"num_workers": 2}))):
        with pytest.raises(GraphftError, match=r"^error\[option\]"):
            make_job(program, options)  # type: ignore[arg-type]
    trainer = epochs.trainer(tmp_path / "job", callbacks=None)
    for call in ({"max_retries": -2}, {"max_retries": 1.5}, {"checkpoint": "always"}, {"checkpoint": 0}, {"epochs": 0}):
        with pytest.raises(GraphftError, match=r"error\[option\]"):
            trainer.train(**call)
    for validation in (None, 3):
        with pytest.raises(GraphftError, match="to validate with"):
            trainer.validate(validation)  # type: ignore[arg-type]
    assert not (tmp_path / "job" / "etcd").exists(), "nothing was started"


def test_a_rank_of_torchrun_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(GraphftError, match="RANK is 0"):
        epochs.trainer(tmp_path / "job")


def test_a_trainer_of_another_run_says_so_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = epochs.OPTIONS | {"num_workers": 2, "data": epochs.chunks()}
    graphft.Trainer(epochs.program(), **options)
    assert capfd.readouterr().err == ""
    graphft.Trainer(epochs.program(), **options | {"batch_size": 4})
    assert "jobs/epochs/runs/1 differs in: batch_size 8 -> 4; new run in jobs/epochs/runs/2\n" in capfd.readouterr().err


def test_validation_says_what_it_needs() -> None:
    with pytest.raises(GraphftError, match="expected a Program"):
        graphft.Validation(epochs.model(), epochs.chunks())  # type: ignore[arg-type]
    with pytest.raises(GraphftError, match=r"has aten\._native_batch_norm_legit: it is captured in train mode"):
        evaluation_of(epochs.program(), graphft.Validation(epochs.program(), epochs.chunks()))


def test_callbacks_that_could_not_be_called() -> None:
    class Keras:
        def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None: ...
        def on_epoch_end(self) -> None: ...

    class Few:
        def on_epoch(self, epoch: int) -> None: ...

    class Any_:
        def on_epoch(self, *arguments: object) -> None: ...
        def on_end(self, why: str = "") -> None: ...

    for wrong in (Keras(), Any_, Few()):
        with pytest.raises(GraphftError, match="is no callback"):
            Callbacks([wrong])
    Callbacks([Any_()])


def test_places_and_roles_that_cannot_be(tmp_path: Path) -> None:
    trainer = epochs.trainer(tmp_path / "job")
    for role, number in (("worker", 9), ("trainer", 999)):
        with pytest.raises(GraphftError, match="there is no role"):
            trainer.signal(role, 0, number)
    with pytest.raises(GraphftError, match="is where the run keeps its own checkpoints"):
        trainer.save(tmp_path / "job" / "checkpoints" / "mine")
    check_place(tmp_path / "best", tmp_path, str(tmp_path))
    check_place("s3://bucket/run/best", tmp_path, "s3://bucket/run")
    with pytest.raises(GraphftError, match="keeps its own checkpoints"):
        check_place("s3://bucket/run/checkpoints", tmp_path, "s3://bucket/run")


def test_a_metric_with_the_name_of_something_else() -> None:
    program = epochs.program()
    program.attrs["extras"] = ("step",)
    with pytest.raises(GraphftError, match="returns 'step', which names something else"):
        make_job(program, given())
    job = graphft.transpile(epochs.program(), name="named", **given())
    job.trainer_program().attrs["extras"] = ("step",)
    with pytest.raises(GraphftError, match="returns 'step', which names something else"):
        job.run(callbacks=[CSVLogger()])
    assert not Path("jobs", "named").exists()
