"""Slices of the variables that evolve, and buckets of slices, as the program's text says it.

    param %fc.weight: float32[256, 64] {buckets = ((0, 1), (0, 0)), slices = ((0, 8192, 0), (8192, 16384, 1))}

`slices` holds (start, end, shard) of flat elements, `buckets` (bucket, position in it) of each slice in turn; buckets
count from 0 on each shard. A slice is called `<variable>@slice<i>`, or `<variable>` when it is whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Kind, Program, Ref, Variable, grad_name

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Literal["weighted_mean", "mean", "first"]

EVOLVING = (Kind.PARAM, Kind.BUFFER)
"""Kinds of the variables that live on pservers (optimizer state follows its parameter)."""
ALL_NORMS = "sqnorm_all"
"""Input of a pserver's optimize blocks: the partial sums of squares of all shards, in canonical order."""
SKIPPED_STEPS = "skipped_steps"
"""State of each pserver: how many steps (async: batches, or units) were left out as not finite."""
RATE_SCALE = "rate_scale"
"""State of each pserver: what the learning rates of its schedule are multiplied by."""
VALIDATE = "validate"
"""Block of the evaluation's program that validates one batch."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, end) of a flattened variable, and the shard that owns them."""

    variable: str
    index: int
    start: int
    end: int
    shard: int
    whole: bool

    @property
    def name(self) -> str:
        """Its name on the pserver."""
        return self.variable if self.whole else f"{self.variable}@slice{self.index}"

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slices of one dtype that travel together between a trainer and shard `shard`, one after the other."""

    shard: int
    index: int
    dtype: str
    reduce: Reduce
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return sum(s.numel for s in self.slices)


def evolving(program: Program) -> list[Variable]:
    """The variables that live on pservers, in declaration order."""
    return program.of_kind(*EVOLVING)


def slices_of(variable: Variable) -> tuple[Slice, ...]:
    """The slices of a variable, by start. Raises ProgramError if it has not been sliced."""
    given = _attribute(variable, "slices", 3)
    whole = len(given) == 1
    return tuple(Slice(variable.name, i, start, end, shard, whole) for i, (start, end, shard) in enumerate(given))


def all_slices(program: Program) -> list[Slice]:
    """The slices of everything that evolves, in canonical order: variables as declared, then by start."""
    return [s for v in evolving(program) for s in slices_of(v)]


def buckets_of(program: Program) -> tuple[Bucket, ...]:
    """The buckets, by shard and index. Raises ProgramError if the program has not been laid out."""
    members: dict[tuple[int, int], list[tuple[int, Slice, Variable]]] = defaultdict(list)
    for v in evolving(program):
        for s, (bucket, position) in zip(slices_of(v), _attribute(v, "buckets", 2), strict=True):
            members[s.shard, bucket].append((position, s, v))
    buckets = []
    for (shard, index), found in sorted(members.items()):
        found.sort(key=lambda m: m[0])
        first = found[0][2]
        buckets.append(Bucket(shard, index, first.dtype, reduce_of(first), tuple(s for _, s, _ in found)))
    return tuple(buckets)


def reduce_of(variable: Variable) -> Reduce:
    """Returns the way to fold the slots' contributions to a variable into one (see op `bucket`)."""
    if variable.kind is Kind.PARAM:
        return "weighted_mean"
    return "mean" if is_float(variable) else "first"


def is_float(variable: Variable) -> bool:
    return variable.dtype.startswith(("float", "bfloat", "complex"))


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    import torch

    return int(getattr(torch, dtype).itemsize)


def gradient_of(parameter: Variable) -> str:
    """Returns the variable with a parameter's gradient: `<parameter>@GRAD`, or what its attribute `grad` names."""
    given = parameter.attrs.get("grad")
    return given.name if isinstance(given, Ref) else grad_name(parameter.name)


def pushed_as(variable: Variable) -> str:
    """Returns what a trainer sends of a variable: a parameter's gradient; a buffer itself."""
    return gradient_of(variable) if variable.kind is Kind.PARAM else variable.name


def _attribute(variable: Variable, name: str, width: int) -> tuple[tuple[int, ...], ...]:
    value: Any = variable.attrs.get(name)
    if not isinstance(value, tuple) or not all(isinstance(v, tuple) and len(v) == width for v in value):
        help = "run the passes slice-parameters and make-buckets first"
        raise ProgramError(f"%{variable.name} has no attribute {name}", rule="layout", help=help)
    return cast("tuple[tuple[int, ...], ...]", value)


# -- between a whole model and its slices -------------------------------------------------------------------------


def assemble(trainer: Program, shard_values: Sequence[Mapping[str, Tensor]], every: bool = False) -> dict[str, Tensor]:
    """Returns the model's state_dict, from what each shard holds by slice name, and the frozen values of `trainer`.

    Names and shapes are the model's; a tied parameter stands under each of its names (as the same tensor), a buffer
    that is not persistent not at all, nor a constant: only with `every`.

    Raises GraphftError when a slice is missing, or has another type.
    """
    state: dict[str, Tensor] = {}
    for v in trainer.of_kind(Kind.PARAM, Kind.BUFFER, Kind.FROZEN, *([Kind.CONST] if every else [])):
        if v.attrs.get("persistent") is False and not every:
            continue
        if v.kind in (Kind.FROZEN, Kind.CONST):
            value = trainer.values[v.name]
        else:
            parts = [_slice(shard_values, s.shard, s.name, s.numel, v.dtype) for s in slices_of(v)]
            import torch

            value = torch.cat(parts).reshape([int(d) for d in v.shape])
        for name in (v.name, *v.attrs.get("tied", ())):
            state[name] = value
    return state


def _slice(shards: Sequence[Mapping[str, Tensor]], shard: int, name: str, numel: int, dtype: str) -> Tensor:
    value = shards[shard].get(name) if shard < len(shards) else None
    if value is None or value.numel() != numel or str(value.dtype) != f"torch.{dtype}":
        found = "nothing" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        help = "give each shard's values, in the order of the shards, of this very job"
        text = f"shard {shard} gives {found} for %{name}, expected {dtype}[{numel}]"
        raise GraphftError(text, rule="assemble", help=help)
    return value.detach().reshape(-1).cpu()
