"""The program: variables, and named blocks of operators.

A `Program` is what a user builds, what passes rewrite, and what a role executes. It is plain data: it knows no
kernel, no clock and no address. Everything here prints (`graphft.printer`), parses back (`graphft.parser`) and
is checked (`graphft.verify`).
"""

from __future__ import annotations

import copy
import enum
import os
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphft.errors import ProgramError

if TYPE_CHECKING:
    import torch

Dim = int | str
"""A dimension: a number, or an expression over named symbolic dimensions such as `batch` or `2*batch`."""


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a variable. `shape` is None for what is not a tensor.

    Tensors: `Type("float32", ("batch", 8))`, printed `float32[batch, 8]`. Scalars of a step: `Type("int")`,
    `Type("float")`, `Type("bool")`. Handles that only our own ops read: `Type("chunk")`.
    """

    dtype: str
    shape: tuple[Dim, ...] | None = None

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def numel(self) -> int | None:
        """Number of elements, or None when a dimension is symbolic or this is no tensor."""
        if self.shape is None or any(isinstance(d, str) for d in self.shape):
            return None
        n = 1
        for d in self.shape:
            n *= int(d)
        return n


class Kind(enum.Enum):
    """Where a variable's value comes from, and who owns it."""

    INPUT = "input"  # fed at each step, or read by read_chunk
    PARAM = "param"  # trainable: has a gradient, is evolved by an optimizer; lives on pservers
    BUFFER = "buffer"  # evolves without gradient (batch-norm statistics); lives on pservers
    STATE = "state"  # optimizer state; lives where its parameter lives
    FROZEN = "frozen"  # in the model's state_dict, never changes (frozen parameters, constant buffers)
    CONST = "const"  # a constant that capture lifted out of the code; not in the state_dict
    TEMP = "temp"  # the result of an op; lives within one run of a block

    @property
    def persistent(self) -> bool:
        """Has a value before the first run, which `Program.values` holds."""
        return self in _PERSISTENT


_PERSISTENT = frozenset({Kind.PARAM, Kind.BUFFER, Kind.STATE, Kind.FROZEN, Kind.CONST})


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand: the variable of this name."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Sym:
    """A literal that is no Python literal: `torch.float32`, `torch.strided`, `@device` (the role's device)."""

    name: str

    def __str__(self) -> str:
        return self.name


Arg = Any
"""An operand or attribute value: Ref | Sym | None | bool | int | float | str | tuple of Arg."""


def same(a: Any, b: Any) -> bool:
    """Equality of Args or dicts of them: exact (1 is neither 1.0 nor true), and nan equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


GRAD = "@GRAD"
"""`grad_name(x)` is `x@GRAD`: the gradient of parameter x."""


def grad_name(name: str) -> str:
    return name + GRAD


def backup_name(name: str) -> str:
    """`x@BACKUP`: parameter x as it was when the gradient at hand was computed."""
    return f"{name}@BACKUP"


@dataclass(slots=True, eq=False)
class Variable:
    """A named value of a program. `attrs` are printed; an operand in a hand-written program may be a Variable."""

    name: str
    type: Type
    kind: Kind = Kind.TEMP
    attrs: dict[str, Arg] = field(default_factory=dict)
    program: Program | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Variable)
            and self.name == other.name
            and self.type == other.type
            and self.kind is other.kind
            and same(self.attrs, other.attrs)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def ref(self) -> Ref:
        return Ref(self.name)

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape or ()

    def __str__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(slots=True, eq=False)
class Operator:
    """One op: `outputs = type(args) {attrs}`. An output of None is not wanted and prints as `_`.

    `args` are positional operands and literals (nested tuples of them where the op takes lists); `attrs` are
    keyword arguments. `loc` is the user's source line, for errors; it takes no part in comparison. An attribute
    that is left out equals one given with its default.
    """

    type: str
    args: tuple[Arg, ...] = ()
    attrs: dict[str, Arg] = field(default_factory=dict)
    outputs: tuple[str | None, ...] = ()
    loc: str = ""

    def __eq__(self, other: object) -> bool:
        from graphft.registry import given_attrs

        return (
            isinstance(other, Operator)
            and self.type == other.type
            and self.outputs == other.outputs
            and same(self.args, other.args)
            and same(given_attrs(self), given_attrs(other))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the variables read, in order, each once."""
        return tuple(dict.fromkeys(r.name for r in refs((*self.args, *self.attrs.values()))))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the results (not of operands written in place: see `registry.writes_of`)."""
        return tuple(o for o in self.outputs if o is not None)


def refs(args: Any) -> Iterator[Ref]:
    """Every `Ref` in nested args, in order."""
    if isinstance(args, Ref):
        yield args
    elif isinstance(args, (tuple, list)):
        for a in args:
            yield from refs(a)


def map_refs(args: Any, fn: Any) -> Any:
    """`args` with `fn(ref)` in the place of every `Ref`."""
    if isinstance(args, Ref):
        return fn(args)
    if isinstance(args, (tuple, list)):
        return tuple(map_refs(a, fn) for a in args)
    return args


class Block:
    """A named list of operators. `attrs` are printed (`daemon` has its `interval`, in seconds)."""

    __slots__ = ("attrs", "name", "ops", "program")

    def __init__(self, name: str, program: Program, attrs: Mapping[str, Arg] | None = None) -> None:
        self.name, self.program = name, program
        self.attrs: dict[str, Arg] = dict(attrs or {})
        self.ops: list[Operator] = []

    def append_op(self, type: str, *args: Any, outputs: Any = None, loc: str = "", **attrs: Any) -> Any:
        """Appends an op, inferring its result types; returns its result Variable(s), or None.

        Operands may be Variables, Refs, literals or lists of them. `outputs` names the results (a string, or a
        sequence with None for unwanted ones); by default they get fresh names. Raises ProgramError when the op
        is unknown, an argument has the wrong type, or shapes do not fit; the program is then unchanged.
        """
        from graphft import locations, registry

        loc = loc or locations.user_line(sys._getframe(1))
        op = Operator(type, tuple(map(_to_arg, args)), {k: _to_arg(v) for k, v in attrs.items()}, (), loc)
        types = registry.infer(op, self)
        names = [outputs] if isinstance(outputs, str) else list(outputs) if outputs is not None else None
        if names is None:
            stem = type.split(".")[1] if "." in type else type
            names = []
            for _ in types:
                names.append(self.program.fresh(stem, names))
        if len(names) != len(types):
            raise ProgramError(
                f"{type} has {len(types)} results, but {len(names)} names were given: {names}",
                block=self,
                rule="results",
                help="name each result, or None for one not wanted",
            )
        op.outputs = tuple(names)
        created = []
        for name, t in zip(names, types, strict=True):
            if name is not None and name not in self.program.variables:
                self.program.variables[name] = Variable(name, t, Kind.TEMP, {}, self.program)
            created.append(self.program.variables[name] if name is not None else None)
        self.ops.append(op)
        return None if not created else created[0] if len(created) == 1 else tuple(created)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Block)
            and self.name == other.name
            and same(self.attrs, other.attrs)
            and self.ops == other.ops
        )

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.ops)

    def __repr__(self) -> str:
        return f"<Block {self.name}: {len(self.ops)} ops>"


def _to_arg(value: Any) -> Arg:
    if isinstance(value, Variable):
        return value.ref
    if isinstance(value, (list, tuple)):
        return tuple(map(_to_arg, value))
    return value


class Program:
    """Variables and blocks. `values` holds the initial values of persistent variables (not part of the text).

    `attrs` are printed in the header: `role`, `seed`, and what passes record.
    """

    def __init__(self, name: str = "program", attrs: Mapping[str, Arg] | None = None) -> None:
        self.name = name
        self.attrs: dict[str, Arg] = dict(attrs or {})
        self.variables: dict[str, Variable] = {}
        self.blocks: dict[str, Block] = {}
        self.values: dict[str, torch.Tensor] = {}

    # -- building ---------------------------------------------------------------------------------------------

    def block(self, name: str = "step", **attrs: Arg) -> Block:
        """The block of this name, made if it is not there yet; `attrs` are added to it."""
        if name not in self.blocks:
            self.blocks[name] = Block(name, self)
        self.blocks[name].attrs.update(attrs)
        return self.blocks[name]

    def variable(
        self, name: str, type: Type, kind: Kind = Kind.TEMP, value: torch.Tensor | None = None, **attrs: Arg
    ) -> Variable:
        """Declares a variable. Raises ProgramError if the name is taken."""
        if name in self.variables:
            raise ProgramError(
                f"variable %{name} is declared twice in program '{self.name}'",
                rule="redeclared",
                help="choose another name, or use the variable that is there",
            )
        var = self.variables[name] = Variable(name, type, kind, dict(attrs), self)
        if value is not None:
            self.values[name] = value
        return var

    def fresh(self, stem: str, taken: Container[str] = ()) -> str:
        """A variable name not in use yet, nor in `taken`: `stem`, `stem_1`, `stem_2` ..."""
        name, n = stem, 0
        while name in self.variables or name in taken:
            n += 1
            name = f"{stem}_{n}"
        return name

    def of_kind(self, *kinds: Kind) -> list[Variable]:
        """Variables of these kinds, in declaration order."""
        return [v for v in self.variables.values() if v.kind in kinds]

    # -- files ------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes text and values into directory `path`, wholly or not at all (see `graphft.storage`)."""
        from graphft.storage import save_program

        save_program(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Program:
        """The program that `save` wrote. Raises GraphftError when the files are missing or damaged."""
        from graphft.storage import load_program

        return load_program(path)

    # -- copies and comparison --------------------------------------------------------------------------------

    def clone(self, name: str | None = None) -> Program:
        """A deep copy, but for the values, which are shared (they are never changed in place)."""
        new = Program(self.name if name is None else name, copy.deepcopy(self.attrs))
        for v in self.variables.values():
            new.variables[v.name] = replace(v, attrs=copy.deepcopy(v.attrs), program=new)
        for b in self.blocks.values():
            nb = new.block(b.name, **copy.deepcopy(b.attrs))
            nb.ops = [replace(op, attrs=dict(op.attrs)) for op in b.ops]
        new.values = dict(self.values)
        return new

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Program)
            and self.name == other.name
            and same(self.attrs, other.attrs)
            and self.variables == other.variables
            and list(self.blocks) == list(other.blocks)
            and all(self.blocks[n] == other.blocks[n] for n in self.blocks)
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        from graphft.printer import format_program

        return format_program(self)

    def __repr__(self) -> str:
        ops = ", ".join(f"{b.name}: {len(b.ops)}" for b in self.blocks.values())
        return f"<Program {self.name!r}: {len(self.variables)} variables; ops {ops or 'none'}>"
