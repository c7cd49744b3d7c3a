"""Capture: a torch model and its loss become a program with forward, backward and buffer updates as ops.

    def loss_fn(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y)

    program = graphft.build(model, loss_fn, inputs={"x": (None, 8), "y": ((None,), torch.int64)})

The loss must be the *mean over the samples of the batch*: gradients of several batches are averaged by their number
of samples. The model is captured in the mode (train or eval) that it is in, and is not changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import compute_required_storage_length
from torch.nn.utils.stateless import _reparametrize_module

from graphft.capture.eager_program import emit_eager
from graphft.capture.guards import SCRIPTED, WITHOUT_CAPTURE, assumptions, captured, precision_watched, refuse_outside
from graphft.capture.loss_fn import LossFn, check_names, input_type, loss_and_extras, with_targets
from graphft.capture.module_step import (
    check_buffer,
    evaluating,
    parameter_written,
    refuse_gradients,
    tensors_of,
    unchanged,
)
from graphft.capture.tracing import Recorder, Traced, emit, settle, storage, trace
from graphft.data import python_states
from graphft.errors import GraphftError, UsageError, shown_plainly
from graphft.ir import Kind, Program, Type, grad_name
from graphft.ir.symbolic import Symbols

log = logging.getLogger("graphft")


@shown_plainly
def build(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Mapping[str, Sequence[Any]],
    *,
    targets: Sequence[str] | None = None,
    name: str = "program",
    seed: int = 0,
    allow_unused: bool = False,
    training: bool = True,
    capture: bool = True,
    example: Mapping[str, Tensor] | None = None,
) -> Program:
    """Captures one training step: block `step` computes `loss`, every gradient `<parameter>@GRAD`, buffer updates.

    `inputs` gives name -> a shape `(None, 8)` (float32), or a pair of shape and dtype.
    `loss_fn(model, **inputs)` gives the scalar loss, or a pair of it and a dict of further tensors by name: to fetch
    from an `Executor`, and if they are one float, metrics that a job records beside the loss.

    With `targets`, `loss_fn(model(*other inputs), *targets)` is the loss instead:

        build(model, nn.CrossEntropyLoss(), {"x": (None, 8), "y": ((None,), torch.int64)}, targets=["y"])

    `seed` is recorded for the random numbers of a job. A parameter that the loss does not depend on is an error,
    or with `allow_unused` treated like a frozen one. With `training=False`, the forward pass alone is captured, of the
    model in eval mode: for `graphft.Validation`.

    With `capture=False`, the step is one op, `eager_step`, that runs `loss_fn` and the model themselves under torch's
    autograd, whatever their Python code does: control flow that depends on data, packed sequences, hooks. Module and
    loss are pickled into the program. They run once here, on a made-up batch (floats are normal, integers 1), or on
    the batch `example`.

    Raises GraphftError: [inputs] for what is wrong with `inputs`, [model], [loss], [no-gradient], [outside] when the
    loss would train what is not the model's, [dimension] when the code fixes the size of a named dimension, and
    [capture] with the user's line for all that cannot be captured.
    """
    if not isinstance(model, nn.Module):
        raise _bad_model(f"must be a torch.nn.Module, got {type(model).__name__}", "put the parameters into a module")
    if not isinstance(inputs, Mapping):
        raise GraphftError(
            f"inputs must be a dict of name to shape, got {type(inputs).__name__}",
            rule="inputs",
            help="write inputs={'x': (None, 8), 'y': ((None,), torch.int64)}",
        )
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise UsageError(
            f"torch's default dtype is {dtype}, which the job's processes do not have",
            rule="dtype",
            help="torch.set_default_dtype(torch.float32) before build(); model.double() and inputs of dtype float64 "
            "compute in it, and what loss_fn makes takes dtype=",
        )
    if example is not None and capture:
        raise UsageError("example= has no effect", rule="option", help="it is for build(..., capture=False)")
    specs = {n: input_type(n, spec) for n, spec in inputs.items()}
    if targets is None:
        check_names(loss_fn, list(specs))
    state = _State(model, specs, training, capture)
    call = loss_fn if targets is None else with_targets(loss_fn, specs, targets)
    program = Program(name, {"device": state.device.type, "loss": "loss", "seed": seed})
    for n, t in specs.items():
        program.variable(n, t, Kind.INPUT)
    if capture:
        _capture(program, model, call, state, specs, allow_unused, training)
    else:
        written = emit_eager(program, model, call, specs, training, example)
        for n in state.tensors:
            trained = n in state.trainable and training
            kind = Kind.PARAM if trained else Kind.BUFFER if n in written else Kind.FROZEN
            _declare(program, state, n, kind if n in state.saved or kind is not Kind.FROZEN else Kind.CONST)
    program.origin = Origin(
        model,
        loss_fn,
        dict(inputs),
        tuple(targets) if targets is not None else None,
        program.clone(),
        training,
        capture,
        tuple(module.training for module in model.modules()),
        example,
    )
    if training and not model.training:
        log.warning(
            "the model is captured in eval mode, without dropout and updates of batch norm's statistics; if it is to "
            "train as usual, call model.train() before build()"
        )
    return program


def _capture(
    program: Program,
    model: nn.Module,
    call: LossFn,
    state: _State,
    specs: Mapping[str, Type],
    allow_unused: bool,
    training: bool,
) -> None:
    """Traces the step, and writes it into the program."""
    symbols = Symbols(d for t in [*specs.values(), *state.types.values()] for d in t.shape or () if isinstance(d, int))
    step = _Step(model, call, state, list(specs), training)
    drawn = python_states()
    with captured(symbols), unchanged(model), contextlib.nullcontext() if training else evaluating(model):
        fakes = [
            symbols.mode.from_tensor(t.detach().contiguous(), static_shapes=True).requires_grad_(
                training and n in state.trainable
            )
            for n, t in state.tensors.items()
        ]
        with torch.device(state.device):
            feeds = [symbols.tensor(t) for t in specs.values()]
        traced = trace(step, [*fakes, *feeds], symbols, step.recorder)
    if drawn != python_states():
        log.warning(
            "the model or loss_fn draws from Python's random or numpy.random while it is captured: the program holds "
            "these numbers. Draw with torch, whose draws are ops; or %s",
            WITHOUT_CAPTURE,
        )
    unused = [n for n in state.trainable if n not in step.gradients]
    if unused and training and not allow_unused:
        raise GraphftError(
            f"the loss does not depend on parameter {', '.join(unused)}",
            rule="no-gradient",
            help="use it, freeze it with requires_grad_(False), or build with allow_unused=True",
        )
    if step.extras:
        program.attrs["extras"] = tuple(step.extras)
    if assume := assumptions(symbols):
        program.attrs["assume"] = assume
    _emit(program, traced, step, state, list(specs))


@dataclass
class Origin:
    """Holds what a program was captured from, in this process."""

    model: nn.Module
    loss_fn: LossFn
    inputs: Mapping[str, Any]
    targets: tuple[str, ...] | None
    program: Program
    """As it was built."""
    training: bool
    capture: bool
    modes: tuple[bool, ...]
    """Says of each of the model's modules, in order, if it was in train mode."""
    example: Mapping[str, Tensor] | None
    checked: bool = False
    """True when the program has been compared with the module, in two steps."""

    def evaluation(self, name: str, loss_fn: LossFn | None = None, more: Mapping[str, Any] | None = None) -> Program:
        """Captures the model in eval mode, with another `loss_fn` and `more` inputs, if these are given."""
        return self._build(name, loss_fn or self.loss_fn, {**self.inputs, **(more or {})}, self.targets)

    def forward(self, name: str, call: LossFn, inputs: Sequence[str]) -> Program:
        """Captures what `call(model, **inputs)` computes in eval mode, of these inputs only."""
        return self._build(name, call, {n: self.inputs[n] for n in inputs}, None)

    def _build(self, name: str, call: LossFn, inputs: Mapping[str, Any], targets: Sequence[str] | None) -> Program:
        options = {"capture": self.capture, "example": self.example}
        return build(self.model, call, inputs, targets=targets, name=name, training=False, **options)  # type: ignore[arg-type]

    def whole_loss_fn(self) -> LossFn:
        """Returns the function of the model and all inputs by name, whether or not there are `targets`."""
        if self.targets is None:
            return self.loss_fn
        return with_targets(self.loss_fn, {n: input_type(n, spec) for n, spec in self.inputs.items()}, self.targets)


# -- the model's tensors --------------------------------------------------------------------------------------


class _State:
    """The model's parameters and buffers, each once, under the first of its names."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Type], training: bool, capture: bool) -> None:
        saved = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        self.tensors = tensors_of(model)
        self.parameters = [n for n, _ in model.named_parameters()]
        self.trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        names = {id(t): n for n, t in self.tensors.items()}
        self.saved = {names[id(t)] for t in saved.values() if id(t) in names}
        self.tied: dict[str, tuple[str, ...]] = {}
        for other, t in saved.items():
            if names.get(id(t), other) != other:
                self.tied[names[id(t)]] = (*self.tied.get(names[id(t)], ()), other)
        _check_class(model)
        self._check(inputs, training, capture)
        self.types = {n: Type(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items()}
        self.device = next((t.device for t in self.tensors.values()), torch.device("cpu"))

    def _check(self, inputs: Mapping[str, Type], training: bool, capture: bool) -> None:
        for n, t in self.tensors.items():
            if isinstance(t, (nn.UninitializedParameter, nn.UninitializedBuffer)) or t.device.type == "meta":
                raise _bad_model(f"has no shape or no data yet for {n}", "run it once on real data, on a real device")
            if n in inputs or n == "loss":
                raise _bad_model(f"has a tensor '{n}', which also names an input or the loss", "rename the input")
        if training and not self.trainable:
            raise _bad_model("has no trainable parameter", "leave requires_grad of some parameter true")
        hooked = [
            n
            for n in self.trainable
            if self.tensors[n]._backward_hooks or getattr(self.tensors[n], "_post_accumulate_grad_hooks", None)
        ]
        if capture and hooked:
            raise _bad_model(
                f"has a gradient hook on parameter {hooked[0]}, which a captured program would leave out",
                f"remove the hook; clipping and the like are options of minimize; or {WITHOUT_CAPTURE}",
            )
        devices = {str(t.device) for t in self.tensors.values()}
        if len(devices) > 1:
            raise _bad_model(f"is spread over devices {', '.join(sorted(devices))}", "move it to one device")
        if training:
            self._refuse_shared_memory()

    def _refuse_shared_memory(self) -> None:
        """Raises GraphftError[model] for two tensors that overlap, if one of them is trained."""
        before, end = "", 0
        for start, n in sorted((t.data_ptr(), n) for n, t in self.tensors.items() if t.numel()):
            if start < end and not {n, before}.isdisjoint(self.trainable):
                raise _bad_model(
                    f"has {before} and {n} in one memory, which torch trains as one, and a program as two tensors",
                    "assign the parameter itself (decoder.weight = encoder.weight, without .data), or a clone() of it",
                )
            t = self.tensors[n]
            span = start + t.itemsize * compute_required_storage_length(t.shape, t.stride(), 0)
            before, end = (n, span) if span > end else (before, end)


def _check_class(model: nn.Module) -> None:
    if hasattr(model, "_orig_mod"):
        raise _bad_model("has been through torch.compile", "capture the model that was given to torch.compile")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        help = "capture its .module: transpile(trainers=...) says how many compute"
        raise _bad_model(f"is wrapped in {type(model).__name__}", help)
    if taken := [n for n, _ in (*model.named_parameters(), *model.named_buffers()) if "@" in n]:
        raise _bad_model(f"has {taken[0]!r}", "a name with @ stands for a gradient, a slice or a state: rename it")
    if scripted := [n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        raise _bad_model(f"has a part of torch.jit, {scripted[0] or 'itself'}", SCRIPTED)


def _bad_model(what: str, help: str) -> GraphftError:
    return GraphftError(f"the model {what}", rule="model", help=help)


# -- the step -------------------------------------------------------------------------------------------------


class _Step:
    """The traced function: parameters, buffers and inputs in; loss, extras and gradients out.

    After the trace, `extras` and `gradients` say which results there are, in order behind the loss.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, state: _State, inputs: Sequence[str], training: bool) -> None:
        self.model, self.loss_fn, self.state, self.inputs, self.training = model, loss_fn, state, inputs, training
        self.recorder = Recorder()
        self.extras: list[str] = []
        self.gradients: list[str] = []

    def __call__(self, *values: Tensor) -> list[Tensor]:
        tensors = dict(zip(self.state.tensors, values, strict=False))
        feeds = dict(zip(self.inputs, values[len(tensors) :], strict=True))
        given = dict(tensors)
        trainable = {n: tensors[n] for n in self.state.trainable if self.training}
        # Backward as well: hooks, autograd functions and checkpoints read the module while it runs.
        with _reparametrize_module(self.model, given, tie_weights=True):
            device = next((value.device for value in values), torch.device("cpu"))
            with precision_watched(device), torch.set_grad_enabled(self.training):
                result = self.loss_fn(self.model, **feeds)
            refuse_gradients(trainable.values())
            loss, extras = loss_and_extras(result, {*self.inputs, *self.state.tensors}, self.training)
            self.extras = list(extras)
            if self.training:
                refuse_outside(loss, self.state.tensors, self.recorder.line_of)
                loss.backward()
        gradients = [t.grad for t in trainable.values()]
        with torch.no_grad():
            for n, t in tensors.items():  # a buffer that was assigned to, instead of changed in place
                if given[n] is not t:
                    check_buffer(n, t, given[n])
                    t.copy_(given[n])
            return self._results(values, loss, extras, trainable, gradients)

    def _results(
        self,
        values: Sequence[Tensor],
        loss: Tensor,
        extras: Mapping[str, Tensor],
        trainable: Mapping[str, Tensor],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor]:
        """Every result as a tensor of its own, gradients in their parameter's layout (as autograd leaves them)."""
        taken = {storage(t) for t in (*values, loss)}
        results = [loss]
        for extra in extras.values():
            results.append(extra.clone() if storage(extra) in taken else extra)
            taken.add(storage(extra))
        for (name, parameter), gradient in zip(trainable.items(), gradients, strict=True):
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise GraphftError(
                        f"the gradient of {name} is sparse",
                        rule="capture",
                        help="build the embedding with sparse=False",
                    )
                results.append(settle(gradient, parameter, taken))
                self.gradients.append(name)
        return results


def _emit(program: Program, traced: Traced, step: _Step, state: _State, inputs: Sequence[str]) -> None:
    """Declares the variables and writes the block."""
    names = ["loss", *step.extras, *map(grad_name, step.gradients)]
    results = {node: n for node, n in zip(traced.results, names, strict=True) if node is not None}
    _refuse_aliases(traced, state)
    parameters = [n for n in state.tensors if n in step.gradients]
    for n in parameters:
        _declare(program, state, n, Kind.PARAM)
    written = emit(traced, program.block("step"), [*state.tensors, *inputs], results)
    read = {name for op in program.blocks["step"].ops for name in op.reads}
    for n in state.tensors:
        if n in parameters and n not in written:
            continue
        if n in state.parameters and n in written:
            raise parameter_written(n)
        if n not in state.saved and n not in read:
            continue
        kind = Kind.BUFFER if n in written else Kind.FROZEN if n in state.saved else Kind.CONST
        _declare(program, state, n, kind)


def _refuse_aliases(traced: Traced, state: _State) -> None:
    """Raises GraphftError[outside] for a constant that lies in the memory of a parameter that is trained."""
    owners = {storage(state.tensors[n]): n for n in state.trainable}
    for node in traced.module.graph.nodes:
        value = getattr(traced.module, node.target) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and (name := owners.get(storage(value))):
            line = next((user.meta["loc"] for user in node.users if user.meta.get("loc")), "the model")
            raise GraphftError(
                f"{line} uses a second name of parameter {name} (a list, a closure, a view made before), which does "
                "not follow its training: the program would hold it as a constant",
                rule="outside",
                help=f"use the attribute of the model that loss_fn is given; or {WITHOUT_CAPTURE}",
            )


def _declare(program: Program, state: _State, name: str, kind: Kind) -> None:
    attrs: dict[str, Any] = {"tied": state.tied[name]} if name in state.tied else {}
    if kind is Kind.BUFFER and name not in state.saved:
        attrs["persistent"] = False
    program.variable(
        name,
        state.types[name],
        kind,
        state.tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format),
        **attrs,
    )
