"""Programs whose step is one op that runs the user's module: `build(..., capture=False)`.

    %loss, %fc.weight@GRAD = eager_step(%module@CODE, (%x, %y), (%fc.weight,), (), (%bn.running_mean,)) {source = "..."}

`%module@CODE` holds the pickled module and loss, without the values of parameters and buffers: these are operands.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from graphft.capture.guards import leaves, nodes
from graphft.capture.locations import error_line, line_of
from graphft.capture.loss_fn import LossFn, shown
from graphft.capture.module_pickle import Packed, copy_of, pack, source_digest
from graphft.capture.module_step import ModuleStep, tensors_of
from graphft.data import python_states
from graphft.errors import GraphftError, describe
from graphft.ir import Dim, Kind, Operator, Program, Ref, Type, grad_name
from graphft.ir.literals import dtype_of, evaluate, names_in

log = logging.getLogger("graphft")

CODE = "module@CODE"
"""The constant that holds the pickled module."""
HALF = "half"
"""Attribute of a program whose one op computes gradients in float16."""
_SIZES = (7, 11, 13, 17, 19, 23, 29, 31)
"""A made-up batch has these sizes, one for each named dimension."""


def emit_eager(
    program: Program,
    model: nn.Module,
    call: LossFn,
    inputs: Mapping[str, Type],
    training: bool,
    example: Mapping[str, Tensor] | None,
) -> set[str]:
    """Writes block `step` and declares all but the model's tensors. Returns the buffers that the step changes.

    Raises GraphftError[example] if the model or the loss fails on the batch, and [capture] for what cannot be pickled.
    """
    tensors = tensors_of(model)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and training]
    packed = Packed(model, call, training, tuple(inputs), tuple(trained))
    feeds, results, written, draws, half = _run_once(copy_of(packed), tensors, inputs, example)
    fixed = [n for n in tensors if n not in trained and n not in written]
    source = source_digest(packed)
    packed = replace(packed, fixed=tuple(fixed), written=tuple(written), results=tuple(results))
    code = pack(replace(packed, draws=draws, source=source))
    sizes = _sizes(inputs, feeds)
    extras = [n for n in results if n != "loss" and n not in map(grad_name, trained)]
    for name in ("loss", *extras):
        program.variable(name, _type(results[name], sizes))
    for name in trained:
        program.variable(grad_name(name), _type(tensors[name], {}))
    if half:
        program.attrs[HALF] = True
    if extras:
        program.attrs["extras"] = tuple(extras)
    program.variable(CODE, Type("uint8", tuple(code.shape)), Kind.CONST, code)
    groups = (inputs, trained, fixed, written) if training else (inputs, [*trained, *fixed, *written])
    where = call.__code__ if hasattr(call, "__code__") else None
    program.block("step").ops.append(
        Operator(
            "eager_step" if training else "eager_forward",
            (Ref(CODE), *(tuple(map(Ref, group)) for group in groups)),
            {"source": source},
            tuple(results),
            line_of(where.co_filename, where.co_firstlineno, where.co_name) if where is not None else "",
        )
    )
    return set(written)


def _run_once(
    packed: Packed, values: Mapping[str, Tensor], inputs: Mapping[str, Type], example: Mapping[str, Tensor] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], bool, bool]:
    """Runs a copy's step on the example, or on a made-up batch, and leaves torch's generator as it was.

    Returns the batch, the results by name, the names of the buffers that the step changes, whether it draws from
    Python's or NumPy's generator, and whether a gradient on the way is in float16.
    """
    draws, dtypes = False, set[torch.dtype]()

    def call(model: nn.Module, **given: Tensor) -> object:
        nonlocal draws
        before = python_states()
        result = packed.call(model, **given)
        draws = before != python_states()
        return result

    step = ModuleStep(packed.model, call, packed.training, seeds=packed.training)
    own = tensors_of(step.model)

    def look(loss: Tensor) -> None:
        dtypes.update(gradient.dtype for node in nodes(loss) for gradient in node._input_metadata)
        known = {id(t) for t in own.values()}
        reached = [leaf for leaf, _ in leaves(loss, lambda node: "") if isinstance(leaf, nn.Parameter)]
        outside = [leaf for leaf in reached if id(leaf) not in known]
        if outside and step.training:
            what = "the loss depends on a parameter, %s, that is none of the model's: it does not train"
            log.warning(what, shown(outside[0]))

    device = next((value.device for value in values.values()), torch.device("cpu"))
    feeds = _given(inputs, example) if example is not None else _made_up(inputs)
    feeds = {name: value.to(device) for name, value in feeds.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            results, changed = step.run(values, feeds, look)
    except GraphftError:
        raise
    except Exception as error:
        where = error_line(error)
        raise GraphftError(
            f"{where}{': ' * bool(where)}the model or the loss fails on a {'' if example else 'made-up '}batch: "
            f"{describe(error)}",
            rule="example",
            help="build(..., example={...}) gives a batch of real data to run it on, once",
        ) from error
    return feeds, results, list(changed), draws and packed.training, torch.float16 in dtypes


def _made_up(inputs: Mapping[str, Type]) -> dict[str, Tensor]:
    dims: dict[str, int] = {}
    for type in inputs.values():
        for dim in type.shape or ():
            for name in names_in(dim):
                dims.setdefault(name, _SIZES[len(dims) % len(_SIZES)])
    generator = torch.Generator().manual_seed(0)
    feeds = {}
    for name, type in inputs.items():
        shape, dtype = [evaluate(d, dims) for d in type.shape or ()], dtype_of(type)
        floats = dtype.is_floating_point or dtype.is_complex
        feeds[name] = torch.randn(shape, generator=generator).to(dtype) if floats else torch.ones(shape, dtype=dtype)
    return feeds


def _given(inputs: Mapping[str, Type], example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    feeds = {name: torch.as_tensor(example[name]) for name in inputs if name in example}
    for name, type in inputs.items():
        value = feeds.get(name)
        if value is None or value.dtype != dtype_of(type) or value.dim() != len(type.shape or ()):
            found = "is missing" if value is None else f"is {shown(value)}"
            raise GraphftError(
                f"example: {name} {found}, expected {type}", rule="example", help="give a batch as the data has them"
            )
    return feeds


def _sizes(inputs: Mapping[str, Type], feeds: Mapping[str, Tensor]) -> dict[int, Dim]:
    """Returns the named dimensions by their sizes in the batch."""
    sizes: dict[int, Dim] = {}
    for name, type in inputs.items():
        for dim, size in zip(type.shape or (), feeds[name].shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(size, dim)
    return sizes


def _type(value: Tensor, sizes: Mapping[int, Dim]) -> Type:
    return Type(str(value.dtype).removeprefix("torch."), tuple(sizes.get(d, d) for d in value.shape))
