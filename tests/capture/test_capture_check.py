"""A program is compared with its module: what a capture held as a constant is named, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from tests.support.eager import INPUTS, Net, classify

X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 3
BATCHES = [{"x": X, "y": Y}, {"x": -X, "y": Y}]


def build(net: nn.Module, loss_fn: Any = classify, **options: Any) -> graphft.Program:
    return graphft.build(net, loss_fn, INPUTS, **options)


def by_random(net: Net, h: Tensor) -> Tensor:
    return h * (1 + random.random())


def by_numpy(net: Net, h: Tensor) -> Tensor:
    return h * float(1 + np.random.rand())


def by_counter(net: Net, h: Tensor) -> Tensor:
    net.count += 1
    return h * (1 + net.count)


def by_average(net: Net, h: Tensor) -> Tensor:
    net.average = net.average * 0.9 + h.detach().abs().mean()
    return h + net.average


def by_alias(net: Net, h: Tensor) -> Tensor:
    return h + net.alias[0].detach().sum()


@pytest.mark.parametrize("code", [by_random, by_numpy, by_counter, by_average])
def test_a_difference_is_named(code: Any) -> None:
    torch.manual_seed(0)
    wrong = Net(code)
    state = {n: t.clone() for n, t in wrong.state_dict().items()}
    wrong.a.weight.grad = torch.ones(16, 8)
    attributes = (wrong.count, wrong.average, wrong.training)
    program, generator = build(wrong), torch.get_rng_state()
    executor = graphft.Executor(seed=0)
    for compare in (
        lambda: graphft.check_capture(program, BATCHES),
        lambda: [executor.run(program, batch) for batch in BATCHES],
    ):
        with pytest.raises(GraphftError) as caught:
            compare()
        assert caught.value.rule == "capture-check"
        assert "capture=False" in caught.value.help
        assert ": loss is " in caught.value.message
    assert torch.equal(torch.get_rng_state(), generator)
    assert not [n for n, t in wrong.state_dict().items() if not torch.equal(t, state[n])]
    assert wrong.a.weight.grad.eq(1).all()
    assert (wrong.count, wrong.average, wrong.training) == attributes
    graphft.Executor(check=False).run(program, BATCHES[0])


def test_transpile_compares_on_the_data() -> None:
    program = build(Net(by_counter))
    graphft.minimize(program, graphft.SGD(lr=0.1))
    options = {"data": graphft.arrays(x=X, y=Y, chunk_size=8), "batch_size": 4}
    with pytest.raises(GraphftError, match=r"^error\[capture-check\]"):
        graphft.transpile(program, **options)
    graphft.transpile(program, check=False, **options)


def test_a_step_of_the_module_must_repeat_itself() -> None:
    with pytest.raises(GraphftError) as caught:
        graphft.check_capture(build(Net(by_counter), capture=False), BATCHES)
    assert caught.value.rule == "capture-check"
    assert "check=False" in caught.value.help


@pytest.mark.parametrize("code", [by_random, by_numpy])
def test_without_capture_all_generators_follow_torchs(code: Any) -> None:
    program, losses = build(Net(code), capture=False), []
    for _ in range(2):
        before = random.getstate(), np.random.get_state()[1].tolist()
        executor = graphft.Executor(seed=3)
        losses.append([executor.run(program, batch, "loss")["loss"].item() for batch in (*BATCHES, *BATCHES)])
        assert before == (random.getstate(), np.random.get_state()[1].tolist())
        random.seed(5)
        np.random.seed(5)
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == 4


def test_a_second_name_of_a_parameter() -> None:
    with pytest.raises(GraphftError, match=r"in by_alias uses a second name of parameter b\.weight") as caught:
        build(Net(by_alias))
    assert caught.value.rule == "outside"


def test_what_the_module_refuses() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(model(x).log_softmax(1), y)

    with pytest.raises(GraphftError) as caught:
        graphft.check_capture(build(Net(), loss_fn), [{"x": X, "y": Y + 1}])
    assert caught.value.rule == "capture-check"
    assert "test_capture_check.py" in caught.value.message


def probabilities(net: Net, h: Tensor) -> Tensor:
    assert net.p.device.type == "cpu"
    return h + torch.distributions.Categorical(net.p, validate_args=False).entropy()


def counted(net: Net, h: Tensor) -> Tensor:
    net.n += 1
    return h / net.n.sqrt()


BUFFERS: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "none": (lambda net, h: h, {}),
    "probabilities": (probabilities, {"p": torch.full((16,), 1 / 16)}),
    "indices": (lambda net, h: h[:, net.order], {"order": torch.arange(15, -1, -1)}),
    "rounded": (lambda net, h: h[:, net.order.round().long()], {"order": torch.arange(15, -1, -1).float()}),
    "integers": (counted, {"n": torch.zeros((), dtype=torch.int64)}),
    "variances": (
        lambda net, h: (h - net.mean) / net.var.sqrt(),
        {"mean": torch.zeros(16), "var": torch.full((16,), 1e-6)},
    ),
    "a mask of infinities": (lambda net, h: h + net.mask.exp(), {"mask": torch.tensor([0.0, -torch.inf] * 8)}),
}


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_models_are_not_refused(name: str, dtype: torch.dtype) -> None:
    code, buffers = BUFFERS[name]
    torch.manual_seed(0)
    net = Net(code, **buffers).to(dtype)
    inputs = {**INPUTS, "x": ((None, 8), dtype)}
    feeds = [{"x": batch["x"].to(dtype), "y": Y} for batch in BATCHES]
    program = graphft.build(net, classify, inputs)
    exact = graphft.check_capture(program, feeds)
    assert exact or dtype is torch.bfloat16, "a program's dropout rounds its factor to bfloat16 later than torch's"
    program = graphft.build(net, lambda model, x, y: classify(model, x, y) * torch.nan, inputs)
    assert not graphft.check_capture(program, feeds), "nothing can be compared of a loss that is not finite"


@pytest.mark.parametrize("later", [lambda net: net.eval(), lambda net: net.double(), lambda net: net.to("meta")])
def test_what_becomes_of_the_model_later_is_no_matter(later: Callable[[Net], Any]) -> None:
    torch.manual_seed(0)
    net = Net()
    program = build(net)
    later(net)
    modes = [m.training for m in net.modules()]
    assert graphft.check_capture(program, BATCHES)
    assert [m.training for m in net.modules()] == modes
    graphft.Executor().run(program, BATCHES[0])


def test_a_constant_that_equals_a_parameter_shows_where_the_parameter_is_another() -> None:
    """NumPy's view of a parameter follows its training, and a program's constant does not: at first they are equal."""
    net = Net(lambda net, h: h * (1 + torch.from_numpy(net.view).sum()))
    net.view = nn.init.zeros_(net.b.bias).detach().numpy()
    with pytest.raises(GraphftError, match=r"^error\[capture-check\]"):
        graphft.check_capture(build(net), BATCHES)


def test_a_cache_that_the_capture_filled_is_named() -> None:
    cache: dict[str, Tensor] = {}

    def cached(net: Net, h: Tensor) -> Tensor:
        return h + cache.setdefault("mean", h.detach().mean())

    with pytest.raises(GraphftError, match="a tensor without data") as caught:
        graphft.check_capture(build(Net(cached)), BATCHES)
    assert caught.value.rule in ("capture-check", "constant-written")
