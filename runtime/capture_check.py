"""A captured program is compared with the module it was captured from, by running both.

Code that ran once, when it was captured, may depend on more than a program knows: on numbers from other generators, on
a counter, on tensors that it reads under another name.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from graphft.capture.guards import WITHOUT_CAPTURE, dtype_help
from graphft.capture.locations import error_line
from graphft.capture.model import Origin
from graphft.capture.module_step import ModuleStep, evaluating, tensors_of, unchanged
from graphft.data import DataSpec
from graphft.disk.tensor_file import same_bits
from graphft.errors import GraphftError, describe
from graphft.ir import GRAD, Kind, Program, Type, grad_name
from graphft.ir.literals import evaluate, names_in
from graphft.ir.registry import writes_of
from graphft.ops.context import Context
from graphft.runtime.data import CHANGED, open_reader
from graphft.runtime.execute.lowering import lower

log = logging.getLogger("graphft")

STEPS = 2
RECORDS = 4
CLOSE = 1e-3
"""Relative differences below it are those of one sum."""
Values = Mapping[str, Tensor]


def check_capture(program: Program, feeds: Sequence[Values]) -> bool:
    """Compares the program that `build` made with its module, in a step of each of these batches, one after the other.

    Loss, results beside it, gradients and buffers must have equal bits, or differ by no more than sqrt(eps) of the
    largest element. Parameters and buffers are moved a little away from those of the capture. With `capture=False`,
    each step runs twice, and must give the same bits. The model and torch's generator are as before.

    Returns True if all bits were equal, and for a program that was not built in this process. Raises
    GraphftError[capture-check] at a difference, with the first tensor; and if the module fails itself.
    """
    origin = program.origin
    if origin is None or not feeds or _is_another(origin):
        return True
    if any(v.name not in feeds[0] for v in origin.program.of_kind(Kind.INPUT)):
        return True  # a part of the program, with fewer inputs: what predicts does without the labels
    with contextlib.ExitStack() as stack:
        values = stack.enter_context(unchanged(origin.model))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for module, mode in zip(origin.model.modules(), origin.modes, strict=False):
            module.training = mode
        trained = {v.name for v in origin.program.of_kind(Kind.PARAM)}
        for name, parameter in origin.model.named_parameters() if origin.training else ():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(name in trained)
        if not origin.training:
            stack.enter_context(evaluating(origin.model))
        exact = _Comparison(origin, values).run(feeds)
    if exact is None:
        log.warning("the program is not compared with its module: the loss of the first batch is not finite")
    origin.checked = exact is not None and len(feeds) >= STEPS
    return bool(exact)


def _is_another(origin: Origin) -> bool:
    """True if the module's tensors are no longer of the program's types: it was converted, or freed, since."""
    now, types = tensors_of(origin.model), origin.program.variables
    return any(
        n in types and (t.is_meta or Type(str(t.dtype).removeprefix("torch."), tuple(t.shape)) != types[n].type)
        for n, t in now.items()
    )


def check_on_data(program: Program, data: DataSpec, batch_size: int, seed: int, *, told: bool = False) -> None:
    """Calls `check_capture` with the first batches of the data, of half the size where that may vary.

    Warns of a loss that is no mean over the records, unless it was `told` before. Batches that cannot be read are
    passed over: the job's own readers tell of them.
    """
    if program.origin is None or _is_another(program.origin):
        return
    columns, size = [v.name for v in program.origin.program.of_kind(Kind.INPUT)], _size(program, batch_size)
    try:
        reader = open_reader(data, "", seed)
        batches = [reader.batch(0, 0, i, size) for i in range(STEPS) if i * size < data.chunks[0].records]
    except GraphftError as error:
        if error.rule == CHANGED:
            raise
        log.info("the program is not compared with its module: %s", error.message)
        return
    feeds = [{name: batch[name] for name in columns} for batch in batches]
    feeds = [f for f in feeds if len(f[columns[0]]) == size] or feeds[:1]
    check_capture(program, [*feeds, *feeds][:STEPS])
    if not told:
        _tell_of_loss(program.origin, feeds[0])


def _size(program: Program, batch_size: int) -> int:
    """Returns half of `batch_size`, or all of it if the program takes no such batch."""
    leading = {v.shape[0] if v.shape else 1 for v in program.of_kind(Kind.INPUT)}
    half = max(min(2, batch_size), -(-batch_size // 2))
    dims = {name: half for name in leading if isinstance(name, str)}
    known = [condition for condition, _ in program.attrs.get("assume", ()) if names_in(condition) <= dims.keys()]
    fits = len(dims) == len(leading) == 1 and len(known) == len(program.attrs.get("assume", ()))
    return half if fits and all(evaluate(condition, dims) for condition in known) else batch_size


class _Comparison:
    """Computes steps of one program and of its module, and compares them."""

    def __init__(self, origin: Origin, values: Values) -> None:
        self.origin, self.program, self.model = origin, origin.program, values
        self.step = ModuleStep(origin.model, origin.whole_loss_fn(), origin.training, origin.training)
        self.block = self.program.blocks["step"]
        gradients = [grad_name(v.name) for v in self.program.of_kind(Kind.PARAM)] if origin.training else []
        made = dict.fromkeys(n for op in self.block.ops for n in writes_of(op) if n in gradients)  # in their order
        self.results = ["loss", *self.program.attrs.get("extras", ()), *made]
        self.device = next((t.device for t in self.model.values()), torch.device("cpu"))
        self.replay = lower(self.block, fetch=self.results, device=self.device)
        self.context = Context(device=str(self.device))
        self.constants = {v.name: self.program.values[v.name].to(self.device) for v in self.program.of_kind(Kind.CONST)}

    def run(self, feeds: Sequence[Values]) -> bool | None:
        """Returns whether all bits were equal; None if no step could be compared."""
        for moved in (True, False):  # values that are a little off may be what the model cannot take
            try:
                return self._run(feeds, moved)
            except _NotComparable as error:
                problem = error
        cause = problem.__cause__
        if cause is None:
            return None
        if isinstance(cause, GraphftError):
            raise cause
        where = error_line(cause)
        raise GraphftError(
            f"{where}{': ' * bool(where)}the model or the loss fails on a batch of the data: {describe(cause)}",
            rule="capture-check",
            help=dtype_help(str(cause)) or "see the error above: plain torch would raise it, too",
        ) from cause

    def _run(self, feeds: Sequence[Values], moved: bool) -> bool:
        generator, exact = torch.Generator().manual_seed(0), True
        values = dict(self.model)
        for number, fed in enumerate(feeds):
            feed = {n: t.to(self.device) for n, t in fed.items()}
            if moved:
                values = self._moved(values, generator)
            seed = torch.randint(1 << 31, (), generator=generator).item()
            expected = self._module(values, feed, seed)
            found = self._program(values, feed, seed)
            if not self.origin.capture:
                self._compare(self._program(values, feed, seed), found, number, feed, values, seed, twice=True)
            exact &= self._compare(found, expected, number, feed, values, seed)
            values = {n: expected.get(n, t) for n, t in values.items()}
        return exact

    def _moved(self, values: Values, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns copies in which each float is moved by at most 5 %, and by 0.01 more where it is trained or written.

        So no zero stays in these. Signs, infinities and integers stay: buffers may be variances, masks or indices.
        """
        changing = {v.name for v in self.program.of_kind(Kind.PARAM, Kind.BUFFER)}
        moved = {}
        for name, value in values.items():
            moved[name] = value.clone()
            if value.is_floating_point() and value.dtype.itemsize > 1:
                noise = torch.rand(value.shape, generator=generator).mul_(2).sub_(1).to(value.device, value.dtype)
                moved[name] += value.where(value.isfinite(), 0) * noise * 0.05
                if name in changing:
                    moved[name] += noise.abs() * 0.01
        return moved

    def _module(self, values: Values, feed: Values, seed: int | float) -> dict[str, Tensor]:
        """Runs the module. Raises _NotComparable if it fails, or its loss is not finite."""
        torch.manual_seed(int(seed))
        try:
            results, changed = self.step.run(values, {n: t.clone() for n, t in feed.items()})
        except Exception as error:
            raise _NotComparable from error
        if kept := [n for n, t in results.items() if isinstance(t, FakeTensor)]:
            raise GraphftError(
                f"the module's {kept[0]} is computed from a tensor without data, which its code has kept since it was "
                "captured: a cache (functools.lru_cache, a dict, a list)",
                rule="capture-check",
                help="fill such a cache before build(): run the model once on real data in a new process",
            )
        if not results["loss"].isfinite():
            raise _NotComparable
        unused = {g for v in self.program.variables.values() if (g := grad_name(v.name)) not in self.results}
        return {n: t for n, t in results.items() if n not in unused or t.any()} | changed

    def _program(self, values: Values, feed: Values, seed: int | float) -> dict[str, Tensor]:
        torch.manual_seed(int(seed))
        scope = self._scope(values, feed)
        found = dict(zip(self.results, self.replay(self.context, scope), strict=True))
        return found | {v.name: scope[v.name] for v in self.program.of_kind(Kind.BUFFER)}

    def _scope(self, values: Values, feed: Values) -> dict[str, Any]:
        """Returns what the program loads: copies of the buffers, which alone it changes, and of the batch."""
        buffers = {v.name for v in self.program.of_kind(Kind.BUFFER)}
        contiguous = {n: t.contiguous() for n, t in values.items()}
        own = {n: t.clone() if n in buffers else t for n, t in contiguous.items()}
        return {**self.constants, **own, **{n: t.clone() for n, t in feed.items()}}

    def _compare(
        self, found: Values, expected: Values, number: int, feed: Values, values: Values, seed: Any, twice: bool = False
    ) -> bool:
        """Returns whether the bits are equal. Raises GraphftError[capture-check] for more than rounding."""
        buffers = {v.name: values[v.name] for v in self.program.of_kind(Kind.BUFFER)}
        expected = {**buffers, **expected}
        names = [*self.results, *buffers, *(n for n in expected if n not in found)]
        others = [n for n in names if n not in found or not same_bits(found[n], expected[n])]
        largest = max((_largest(t) for n, t in expected.items() if n.endswith(GRAD)), default=0.0)
        wrong = [n for n in others if twice or n not in found or differs(found[n], expected[n], largest)]
        if not wrong:
            return not others
        name = wrong[0]
        if twice:
            raise GraphftError(
                "the module's step is not a function of its batch, parameters, buffers and torch's generators: "
                f"{name} is {_shown(found, name)} and then, of the same, {_shown(expected, name)}",
                rule="capture-check",
                help="draw with torch's default generator, keep in buffers what lasts from step to step; check=False "
                "leaves this comparison out, and what is recovered then has other bits",
            )
        raise GraphftError(
            f"the program computes something else than the module, in step {number + 1} of a comparison: {name} is "
            f"{_shown(found, name)}, the module's {_shown(expected, name)}",
            rule="capture-check",
            help="forward and loss_fn run once, when they are captured: what they take from elsewhere (Python's or "
            "NumPy's random numbers, a counter, a plain attribute, a tensor under a second name) is a constant then. "
            f"Draw with torch, keep it in a buffer; or {WITHOUT_CAPTURE}",
        )


class _NotComparable(Exception):
    """The module fails on these values (the cause), or gives no finite loss."""


def differs(found: Tensor, expected: Tensor, scale: float) -> bool:
    """True if the tensors differ by more than rounding: by more than sqrt(eps) of the largest element.

    What is zero but for rounding (the gradient of a bias before batch norm) is compared with 10 sqrt(eps) of `scale`.
    """
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return True
    if not expected.is_floating_point() and not expected.is_complex():
        return not torch.equal(found, expected)
    limit = math.sqrt(torch.finfo(expected.dtype).eps)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (t.detach().cpu().to(wide) for t in (found, expected))
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return True
    return bool(((a - b)[finite].abs() > limit * max(_largest(expected), 10 * limit * scale)).any())


def _largest(value: Tensor) -> float:
    finite = value[value.isfinite()].abs()
    return float(finite.max()) if finite.numel() and finite.dtype != torch.bool else 0.0


def _shown(values: Values, name: str) -> str:
    value = values.get(name)
    if value is None:
        return "not changed"
    if value.numel() == 1:
        return f"{value.item():.8g}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} of norm {value.double().norm().item():.8g}"


# -- the loss -----------------------------------------------------------------------------------------------------


def _tell_of_loss(origin: Origin, feed: Mapping[str, Tensor]) -> None:
    """Warns of a loss that grows with each copy of a batch by the same amount: a sum. A module may fail on these."""
    if any(not v.shape or isinstance(v.shape[0], int) for v in (origin.program.variables[n] for n in feed)):
        return
    few = {name: value[:RECORDS] for name, value in feed.items()}
    step = ModuleStep(origin.model, origin.whole_loss_fn(), training=False, seeds=False)

    def loss(batch: Mapping[str, Tensor]) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return step.run({}, batch)[0]["loss"].double().item()

    with unchanged(origin.model):
        try:
            once, twice, thrice = (loss({n: torch.cat([t] * k) for n, t in few.items()}) for k in (1, 2, 3))
        except Exception:  # the module is compared with the program on whole batches, which tells of it
            return
    more = twice - once
    if abs(more) > CLOSE * abs(once) and abs(thrice - twice - more) < CLOSE * abs(more):
        log.warning(_SUM)


_SUM = (
    "the loss is a sum over the batch; expected the mean over its samples: its gradients are batch_size times as "
    "large, and smaller where the last batch is; write reduction='mean', .mean(), or divide by x.shape[0]"
)
