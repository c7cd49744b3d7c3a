"""float16 autocast with a gradient scaler, beside the same loop of plain torch: scales, skipped steps and weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind, Program
from graphft.ir.parser import parse
from graphft.transpiler.job import Job
from tests.support.eager import INPUTS, batches, classify
from tests.support.inprocess import InProcess

BATCHES = batches(24)
COLUMNS = {n: torch.cat([b[n] for b in BATCHES]) for n in ("x", "y")}
SKIPS = {"on_nonfinite": "skip", "slice_unit": 64, "min_block": 64, "bucket_bytes": 1024}


def in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x), y)


def loss_in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A scale of 65,536 is infinite in float16 already."""
    with torch.autocast("cpu", torch.float16):
        return (model(x)[:, 0] - y.half()).square().mean()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def program(
    loss_fn: Callable[..., Any] = in_half,
    scaler: graphft.GradScaler | None = graphft.GradScaler(),  # noqa: B008
    clip: Any = None,
    optimizer: Any = graphft.Adam(lr=0.01),  # noqa: B008
    model: nn.Module | None = None,
    **options: Any,
) -> Program:
    made = graphft.build(model or network(), loss_fn, INPUTS, **options)
    graphft.minimize(made, optimizer, clip, grad_scaler=scaler)
    return made


def job(source: Program, **options: Any) -> Job:
    data = graphft.arrays(chunk_size=8, **COLUMNS)
    return graphft.transpile(source, data=data, batch_size=8, **{**SKIPS, **options})


def batch_of(work: Any) -> dict[str, Tensor]:
    return {n: c[8 * work.chunk : 8 * work.chunk + work.samples] for n, c in COLUMNS.items()}


class Scales(InProcess):
    """Notes the scale before each step."""

    def __init__(self, job: Job) -> None:
        self.scales: list[float] = []
        super().__init__(job, self._batch)

    def _batch(self, work: Any) -> dict[str, Tensor]:
        (scale,) = (s.scope["loss_scale"] for s in self.shards.shards if "loss_scale" in s.scope)
        self.scales.append(scale.item())
        return batch_of(work)


def in_torch(
    job: Job, model: nn.Module, loss_fn: Callable[..., Any], scaler: graphft.GradScaler, max_norm: float
) -> tuple[list[float], list[int]]:
    """Trains the model. Returns the scale before each step, and the steps that were skipped."""
    optimizer, scales, skipped = torch.optim.Adam(model.parameters(), 0.01, fused=True), list[float](), list[int]()
    theirs = torch.amp.GradScaler("cpu", **vars(scaler))
    for step in range(job.config.total_steps):
        scales.append(theirs.get_scale())
        optimizer.zero_grad()
        theirs.scale(loss_fn(model, **batch_of(job.config.plan.locate(step, 0)))).backward()
        theirs.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), max_norm)
        theirs.step(optimizer)
        theirs.update()
        if theirs.get_scale() < scales[-1]:
            skipped.append(step)
    return scales, skipped


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "one-op"])
@pytest.mark.parametrize(
    ("loss_fn", "scaler"),
    [
        (in_half, graphft.GradScaler()),
        (in_half, graphft.GradScaler(2.0**40, growth_interval=3)),
        (in_half, graphft.GradScaler(1000.0, 3.0, 0.3, 2)),
        (loss_in_half, graphft.GradScaler(growth_interval=5)),
    ],
    ids=["usual", "overflows", "odd-factors", "loss-in-half"],
)
def test_a_job_scales_skips_and_trains_as_torch(
    loss_fn: Callable[..., Any], scaler: graphft.GradScaler, capture: bool
) -> None:
    """With one slot, the bits of torch."""
    made, eager = program(loss_fn, scaler, graphft.ClipByValue(0.01), capture=capture), network()
    run = Scales(job(made, epochs=2, pservers=2))
    run.run()
    scales, skipped = in_torch(run.job, eager, loss_fn, scaler, 0.01)
    assert run.scales == scales
    assert run.skipped == skipped
    assert len(set(scales)) > 1 or not skipped
    assert bool(skipped) == (scaler.init_scale > 1e5 or scaler.growth_factor == 3 or loss_fn is loss_in_half)
    model = run.model()
    assert model.keys() == eager.state_dict().keys(), "the scale is no part of the model"
    assert not [n for n, value in eager.state_dict().items() if not torch.equal(model[n], value)]


def test_without_the_scale_small_gradients_are_lost_and_with_it_they_are_not(caplog: pytest.LogCaptureFixture) -> None:
    def tiny(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return in_half(model, x, y) * 1e-7

    trained = {}
    for scaler in (None, graphft.GradScaler(2.0**20)):
        made = program(tiny, scaler, optimizer=graphft.SGD(lr=1e6))
        run = InProcess(job(made), batch_of)
        run.run(4)
        trained[scaler] = [n for n, value in run.model().items() if not torch.equal(value, made.values[n])]
    unscaled, scaled = trained.values()
    assert len(unscaled) < len(scaled) == 6
    assert caplog.text.count("small gradients become 0") == 1


class Doubled(nn.Linear):
    """Its weight goes through float32 before it comes to float16."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Twice.apply(self.weight), self.bias)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "one-op"])
def test_float16_without_a_scaler_is_told(capture: bool, caplog: pytest.LogCaptureFixture) -> None:
    for model in (network(), Doubled(8, 3, bias=False)):
        program(in_half, None, model=model, capture=capture)
        assert "backward computes in float16 without a gradient scaler" in caplog.text
        caplog.clear()
    with caplog.at_level(logging.WARNING):
        program(in_half, capture=capture)
        program(classify, None, capture=capture)
        program(frozen_in_half, None, capture=capture)
    assert not caplog.text


def frozen_in_half(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        seen = x.half().float()
    return F.cross_entropy(model(seen), y)


def test_slots_and_shards_do_not_show() -> None:
    """A step is left out if one slot overflows; the bits do not depend on the number of shards."""
    made = program(scaler=graphft.GradScaler(2.0**30, growth_interval=4), clip=graphft.ClipByGlobalNorm(0.5))
    runs = [Scales(job(made, trainers=3, pservers=n, epochs=2)) for n in (1, 2, 3)]
    for run in runs:
        run.run()
    assert runs[0].skipped
    for run in runs[1:]:
        assert (run.scales, run.skipped) == (runs[0].scales, runs[0].skipped)
        assert all(torch.equal(value, run.model()[n]) for n, value in runs[0].model().items())


def test_a_gradient_that_another_one_is_computed_from_is_scaled_back_once() -> None:
    """The gradient of `b` is that of `a`, copied."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def loss_fn(model: Sum, x: Tensor, y: Tensor) -> Tensor:
        return ((model.a + model.b) * x).mean()

    found = []
    for scaler in (None, graphft.GradScaler(8.0)):
        made = program(loss_fn, scaler, optimizer=graphft.SGD(lr=1.0), model=Sum())
        run = InProcess(job(made), batch_of)
        run.run(1)
        found.append(run.model())
    assert all(torch.equal(found[0][n], found[1][n]) for n in "ab")
    assert torch.equal(found[0]["a"], found[0]["b"])


def test_a_program_by_hand_and_its_text() -> None:
    made = program(classify)
    assert parse(str(made)) == made
    assert {v.name: v.kind for v in made.variables.values() if "loss_scale" in v.name} == {
        "loss_scale": Kind.BUFFER,
        "loss_scale@growth_tracker": Kind.STATE,
    }
    by_hand = Program("by hand")
    x = by_hand.variable("x", graphft.Type("float32", ("batch", 8)), Kind.INPUT)
    w = by_hand.variable("w", graphft.Type("float32", (8,)), Kind.PARAM, torch.ones(8))
    loss = by_hand.block().append_op("aten.mean", by_hand.block().append_op("aten.mul.Tensor", x, w))
    graphft.append_backward(loss)
    graphft.minimize(by_hand, graphft.SGD(lr=0.1), grad_scaler=graphft.GradScaler())
    assert f"%{loss.name}@GRAD: float32[] = aten._to_copy(%loss_scale)" in str(by_hand)


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"init_scale": float("nan")},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"init_scale": "2"},
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        graphft.GradScaler(**options)


def test_what_cannot_be_scaled_is_refused_and_changes_nothing() -> None:
    def ones(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = classify(model, x, y)
        return loss, {"one": torch.ones_like(loss, memory_format=torch.preserve_format)}

    def half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x.half()).float().mean()

    theirs: Any = torch.amp.GradScaler("cpu")
    for model, loss_fn, scaler, expected in (
        (network(), ones, graphft.GradScaler(), "made by 2 ops"),
        (network().half(), half, graphft.GradScaler(), "is for parameters of float32, %0.weight is float16"),
        (network(), classify, theirs, "a graphft.GradScaler is expected, got torch.amp.grad_scaler.GradScaler"),
    ):
        made = graphft.build(model, loss_fn, INPUTS)
        before = copy.deepcopy(str(made))
        with pytest.raises(UsageError, match=expected):
            graphft.minimize(made, graphft.SGD(lr=0.1), grad_scaler=scaler)
        assert str(made) == before


@pytest.mark.parametrize(
    "options", [{"on_nonfinite": "stop"}, {"on_nonfinite": "warn"}, {"sync": False}, {"sync": False, "mode": "geo_sgd"}]
)
def test_a_job_that_does_not_skip_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the program has a gradient scaler") as caught:
        job(program(classify), **options)
    assert 'on_nonfinite="skip"' in str(caught.value.help)


def test_an_executor_refuses_the_step() -> None:
    with pytest.raises(GraphftError, match="an executor cannot leave a step out"):
        graphft.Executor().run(program(classify), BATCHES[0])
