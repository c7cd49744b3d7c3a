"""A job predicts with the model's forward pass, in eval mode, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from graphft.runtime.launcher.run_folder import open_run
from graphft.transpiler.job import Job
from graphft.transpiler.prediction import load_prediction, prediction_of, tell_untrained, with_weights
from tests.support import zoo

INPUTS = {"x": (None, 4), "y": ((None,), torch.int64)}
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def make_job(model: nn.Module | None = None, predict: Any = None, loss: Any = loss_fn, **options: Any) -> Job:
    program = graphft.build(model or make_model(), loss, INPUTS, allow_unused=True)
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=X, y=torch.zeros(32).long(), chunk_size=16)
    return graphft.transpile(program, data=data, predict=predict, **{"batch_size": 8, "name": "j", **options})


def run(program: Program, **feed: Tensor) -> dict[str, Any]:
    return graphft.Executor().run(program, feed, program.attrs["extras"])


@pytest.mark.parametrize("case", ["convnet", "tied"])
def test_by_default_it_is_what_the_model_returns_in_the_loss(case: str) -> None:
    found = getattr(zoo, case)()
    program = prediction_of(graphft.build(found.model, found.loss_fn, found.inputs).origin)
    program = with_weights(program, found.model.state_dict())
    assert not [v for v in program.of_kind(Kind.INPUT) if v.name in ("y", "labels")], "labels are not needed"
    batch, returned = found.batch(5), list[Any]()
    found.model.eval().register_forward_hook(lambda _m, _g, result: returned.append(result))
    found.loss_fn(found.model, **batch)  # with gradients: without, torch has another kernel for a transformer
    given = {v.name: batch[v.name] for v in program.of_kind(Kind.INPUT)}
    assert torch.equal(run(program, **given)["output"], returned[0])


def test_a_function_says_what_is_predicted_and_of_which_inputs(tmp_path: Path) -> None:
    model = make_model()
    job = make_job(model, lambda model, x: {"p": model(x).softmax(1), "best": model(x).argmax(1)})
    job.save(tmp_path / "job")
    program = load_prediction(tmp_path / "job")
    assert not program.values, "they come from the trained model"
    found = run(with_weights(program, model.state_dict()), x=X)
    with torch.no_grad():
        want = model.eval()(X)
    assert torch.equal(found["p"], want.softmax(1))
    assert torch.equal(found["best"], want.argmax(1))


def test_it_is_no_part_of_what_the_run_is(tmp_path: Path) -> None:
    one, other = make_job(), make_job(predict=lambda model, x: model(x).argmax(1))
    assert (one.hash, one.fingerprint) == (other.hash, other.fingerprint)
    one.save(tmp_path / "job")
    assert open_run(other, str(tmp_path / "job")).path == tmp_path / "job"
    (name,) = load_prediction(tmp_path / "job").attrs["extras"]
    assert load_prediction(tmp_path / "job").variables[name].dtype == "int64", "that of the script, which was changed"


class Scaled(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.inner, self.trains = make_model(), trains
        self.register_buffer("scale", torch.full((3,), 7.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.trains:
            self.scale.mul_(0.5)
        return self.inner(x) * self.scale


def test_constants_travel_with_it(tmp_path: Path) -> None:
    model = Scaled(trains=False)
    make_job(model).save(tmp_path / "job")
    with torch.no_grad():
        want = model.eval()(X)
    program = load_prediction(tmp_path / "job")
    assert list(program.values) == ["scale"]
    assert torch.equal(run(with_weights(program, model.state_dict()), x=X)["output"], want)


def test_a_buffer_that_is_not_saved_is_told(caplog: pytest.LogCaptureFixture) -> None:
    program = graphft.build(Scaled(trains=True), loss_fn, INPUTS)
    tell_untrained(prediction_of(program.origin), program)
    assert "buffer scale is not saved with the model (persistent=False)" in caplog.text


@pytest.mark.parametrize(
    "predict",
    [
        lambda model, z: model(z),
        lambda model, x: model(x).mean(),
        lambda model, x: model(x) @ model(x).t(),
        lambda model, x: {"a": model(x), "b": 3},
        lambda model, x: 3,
        3,
    ],
)
def test_what_cannot_be_predicted(predict: Any) -> None:
    with pytest.raises(GraphftError, match=r"(?s)^error\[predict\].*help: "):
        make_job(predict=predict)


def _calling(calls: int) -> Job:
    """A job whose loss calls the model so often."""
    if not calls:
        return make_job(loss=lambda m, x, y: F.cross_entropy(m[3](m[0](x)), y))
    return make_job(loss=lambda m, x, y: sum(loss_fn(m, k * x, y) for k in range(calls)))


@pytest.mark.parametrize("calls", [0, 2])
def test_a_job_that_can_predict_nothing_trains_all_the_same(tmp_path: Path, calls: int) -> None:
    _calling(calls).save(tmp_path / "job")
    with pytest.raises(GraphftError) as caught:
        load_prediction(tmp_path / "job")
    assert caught.value.rule == "predict"
    assert "job.save_prediction(" in caught.value.help


def test_constants_of_one_name_are_each_programs_own() -> None:
    low, high = torch.zeros(3), torch.full((3,), 5.0)
    job = make_job(predict=lambda model, x: model(x) * 0 + high, loss=lambda m, x, y: loss_fn(m, x, y) + low.sum())
    assert job.prediction is not None
    (found,) = run(job.prediction, x=X).values()
    assert found.eq(5).all()


def test_a_run_that_is_there_is_given_one(tmp_path: Path) -> None:
    _calling(2).save(tmp_path / "job")
    job = make_job(predict=lambda model, x: model(x))
    job.save_prediction(tmp_path / "job")
    assert load_prediction(tmp_path / "job").attrs["extras"] == ("output",)
    other = make_job(nn.Linear(4, 3), predict=lambda model, x: model(x))
    with pytest.raises(GraphftError, match="holds a run of another model"):
        other.save_prediction(tmp_path / "job")


def test_weights_that_do_not_fit() -> None:
    program = prediction_of(graphft.build(make_model(), loss_fn, INPUTS).origin)
    program.values = {}  # as it is saved
    state = make_model().state_dict()
    del state["0.weight"]
    with pytest.raises(GraphftError, match=r"0\.weight is missing; 3\.bias is float64\[3\], expected float32\[3\]"):
        with_weights(program, state | {"3.bias": torch.zeros(3).double()})


def test_what_the_loss_does_to_a_result_in_place_is_not_predicted() -> None:
    def clamped(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        scores.clamp_(0.0, 0.01)
        return F.cross_entropy(scores, y)

    model = make_model()
    program = prediction_of(graphft.build(model, clamped, INPUTS).origin)
    (found,) = run(with_weights(program, model.state_dict()), x=X).values()
    assert torch.equal(found, model.eval()(X))
