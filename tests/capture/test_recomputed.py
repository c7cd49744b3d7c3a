"""Code that runs while gradients are computed reads the trained module: checkpoints, hooks, autograd functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from tests.support.eager import INPUTS, assert_trains_like_torch, batches, classify


def block(*more: nn.Module, inplace: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), *more, nn.ReLU(inplace), nn.Linear(16, 3))


class Net(nn.Module):
    """Linear 8-16, and a block whose call a test gives."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], b: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.code = nn.Linear(8, 16), b or block(), forward
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def assert_no_constant_of(program: Program, model: nn.Module) -> None:
    """No constant is a copy of a parameter, or of a buffer that changes."""
    for const in program.of_kind(Kind.CONST):
        for v in program.of_kind(Kind.PARAM, Kind.BUFFER):
            assert not torch.equal(program.values[const.name], program.values[v.name]), (const.name, v.name)


def recomputed(reentrant: bool, **options: Any) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: checkpoint(net.b, net.a(x), use_reentrant=reentrant, **options)


def nested(net: Net, x: Tensor) -> Tensor:
    inner = lambda h: checkpoint(net.b, torch.tanh(h), use_reentrant=False)  # noqa: E731
    return checkpoint(inner, net.a(x), use_reentrant=False)


def under_autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(net.b, net.a(x), use_reentrant=False).float()


def selective() -> nn.Module:
    """Makes a net of code that is pickled by value, and refers to torch.ops."""

    def forward(net: Net, x: Tensor) -> Tensor:
        kept = [torch.ops.aten.addmm.default]
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept)
        return checkpoint(net.b, net.a(x), use_reentrant=False, context_fn=contexts)

    return Net(forward)


class Scaled(torch.autograd.Function):
    """Backward reads the module that forward was given, not what it saved. Two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        return x * layer.weight.mean(), x + 1

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g * ctx.layer.weight.mean() + h, None


class Reentered(torch.autograd.Function):
    """Backward runs a trained module again, under autograd, as checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: nn.Module) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.part(x)
        torch.autograd.backward(y, g)
        return x.grad, None


def scaled(net: Net, x: Tensor) -> Tensor:
    a, b = Scaled.apply(net.a(x), net.a)
    return net.b(a * b)


def hooked(net: Net, x: Tensor) -> Tensor:
    """Hooks on an activation, which read a weight, and count in a buffer."""
    h = net.a(x)

    def hook(g: Tensor) -> Tensor:
        net.seen.add_(1)
        return g * net.b[0].weight.abs().mean() * net.seen

    h.register_hook(hook)
    return net.b(h)


def with_module_hook() -> nn.Module:
    net = Net(lambda net, x: net.b(net.a(x)))

    def hook(module: Any, gi: Any, go: Any) -> Any:
        net.seen.add_(1)
        return (gi[0] * module.weight.abs().mean() * net.seen,)

    net.b[0].register_full_backward_hook(hook)
    return net


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_trains_60_steps_like_torch(reentrant: bool) -> None:
    torch.manual_seed(0)
    net = Net(recomputed(reentrant), block(nn.Dropout(0.5)))
    assert_no_constant_of(assert_trains_like_torch(net, classify, INPUTS, batches(60)), net)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name)
        for name, make in {
            "nested": lambda: Net(nested, block(nn.Dropout(0.3))),
            "autocast": lambda: Net(under_autocast),
            "in place": lambda: Net(recomputed(False), block(inplace=True)),
            "batch norm": lambda: Net(recomputed(False), block(nn.BatchNorm1d(16))),
            "selective": selective,
            "function": lambda: Net(scaled),
            "re-entered": lambda: Net(lambda net, x: Reentered.apply(net.a(x), net.b)),
            "hook": lambda: Net(hooked),
        }.items()
    ],
)
@pytest.mark.parametrize("capture", [True, False])
def test_what_backward_runs_is_of_this_step(make: Callable[[], nn.Module], capture: bool) -> None:
    torch.manual_seed(0)
    net = make()
    assert_no_constant_of(assert_trains_like_torch(net, classify, INPUTS, batches(), capture=capture), net)


def test_a_module_hook_is_of_this_step() -> None:
    """It closes over its own module: a copy would call the hook of the original."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(with_module_hook())
    program = assert_trains_like_torch(nets[0], classify, INPUTS, batches(), twin=nets[1])
    assert nets[1].seen == 6
    assert program.variables["seen"].kind is Kind.BUFFER


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_checkpointing_of_transformers(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 32, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    feeds = [{"ids": torch.randint(32, (4, 8))} for _ in range(4)]
    loss_fn = lambda model, ids: model(input_ids=ids, labels=ids).loss  # noqa: E731
    program = assert_trains_like_torch(model, loss_fn, {"ids": ((None, 8), torch.int64)}, feeds)
    assert_no_constant_of(program, model)


# -- random numbers -------------------------------------------------------------------------------------------


def forked(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        noise = torch.rand_like(x)
    return net.b(net.a(x + noise) + torch.rand(16))


def restored(net: Net, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(16)
    torch.set_rng_state(state)
    return net.b(net.a(x) + first - 2 * torch.rand(16))


def seeded(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return net.b(F.dropout(net.a(x), 0.5))


@pytest.mark.parametrize("forward", [forked, restored, seeded])
def test_the_state_of_the_generator_is_part_of_a_step(forward: Any) -> None:
    torch.manual_seed(0)
    assert_trains_like_torch(Net(forward), classify, INPUTS, batches())


@pytest.mark.parametrize("kind", [nn.RNN, pytest.param(nn.LSTM, marks=pytest.mark.slow)])
def test_dropout_between_recurrent_layers(kind: Any) -> None:
    """An LSTM's bits differ: eager torch runs oneDNN's."""
    torch.manual_seed(0)
    model = kind(8, 4, num_layers=3, dropout=0.5, batch_first=True, bidirectional=True)
    loss_fn = lambda model, x: model(x)[0].square().mean()  # noqa: E731
    feeds = [{"x": torch.randn(3, 6, 8)} for _ in range(4)]
    assert_trains_like_torch(model, loss_fn, {"x": (None, 6, 8)}, feeds, exact=kind is not nn.LSTM)


# -- what is left to capture=False ----------------------------------------------------------------------------


class Packed(nn.Module):
    """Sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.r, self.h = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        return self.h(self.r(packed)[1][0][-1])


@torch.jit.script
def branch(x: Tensor) -> Tensor:
    return x * 2 if bool(x.sum() > 0) else x


def test_packed_sequences_are_refused_with_the_way_out() -> None:
    torch.manual_seed(0)
    model, inputs = Packed(), {"x": (None, 6, 4), "n": ((None,), torch.int64)}
    feeds = [{"x": torch.randn(8, 6, 4), "n": torch.randint(1, 7, (8,))} for _ in range(4)]
    loss_fn = lambda model, **given: model(**given).square().mean()  # noqa: E731
    with pytest.raises(GraphftError, match="packed") as caught:
        graphft.build(model, loss_fn, inputs)
    assert caught.value.rule == "capture"
    assert "capture=False" in caught.value.help
    assert_trains_like_torch(model, loss_fn, inputs, feeds, capture=False)


@pytest.mark.parametrize("capture", [True, False])
def test_parts_of_torch_jit_are_refused(capture: bool) -> None:
    module = Net(lambda net, x: net.b(net.a(x)), torch.jit.script(block()))
    function = Net(lambda net, x: branch(net.b(net.a(x))))
    for model, rule in ((module, "model"), (function, "capture")):
        with pytest.raises(GraphftError, match=r"torch\.jit|ScriptFunction") as caught:
            graphft.build(model, classify, INPUTS, capture=capture)
        assert caught.value.rule == rule
