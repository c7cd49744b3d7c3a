"""The program: variables, and named blocks of operators. A user builds it, passes rewrite it, a role executes it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphft.capture.locations import user_line
from graphft.errors import ProgramError
from graphft.ir import printer, registry
from graphft.ir.types import Arg, Dim, Kind, Ref, Type, refs, same

if TYPE_CHECKING:
    import torch


def _equal(a: object, b: object, *fields: str) -> bool:
    return type(a) is type(b) and all(same(getattr(a, field), getattr(b, field)) for field in fields)


@dataclass(slots=True, eq=False)
class Variable:
    """A named value of a program. `attrs` are printed; an operand in a hand-written program may be a Variable."""

    name: str
    type: Type
    kind: Kind = Kind.TEMP
    attrs: dict[str, Arg] = field(default_factory=dict)
    program: Program | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        return _equal(self, other, "name", "type", "kind", "attrs")

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
        return _equal(self, other, "type", "outputs", "args", "given_attrs")

    __hash__ = None  # type: ignore[assignment]

    @property
    def given_attrs(self) -> dict[str, Arg]:
        return registry.given_attrs(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the variables read, in order, each once."""
        return tuple(dict.fromkeys(r.name for r in refs((*self.args, *self.attrs.values()))))

    def operand(self, slot: str) -> Ref:
        """The operand in this slot of the op's definition; of a variadic slot, the first one."""
        return self.operands(slot)[0]

    def operands(self, slot: str) -> tuple[Ref, ...]:
        """The operands in this slot: one, or for a variadic slot all that are left."""
        return tuple(refs(registry.in_slot(self, slot)))

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the results (not of operands written in place: see `registry.writes_of`)."""
        return tuple(o for o in self.outputs if o is not None)


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
        loc = loc or user_line(sys._getframe(1))
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
        for name, t in zip(names, types, strict=True):
            if name is not None and name not in self.program.variables:
                self.program.variables[name] = Variable(name, t, Kind.TEMP, {}, self.program)
        self.ops.append(op)
        created = [self.program.variables.get(name) for name in names]
        return None if not created else created[0] if len(created) == 1 else tuple(created)

    def __eq__(self, other: object) -> bool:
        return _equal(self, other, "name", "attrs", "ops")

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.ops)

    def excerpt(self, index: int | None, after: str, around: int = 1) -> list[str]:
        """Op `index` and the ones around it, for an error; `after`: the pass behind which it was found, if one was."""
        where = f"  --> program '{self.program.name}', block {self.name}"
        behind = f" (after pass {after})" if after else ""
        if index is None or not self.ops:
            return [where + behind]
        index = min(index, len(self.ops) - 1)
        lines = [f"{where}, op {index}{behind}"]
        for i in range(max(0, index - around), min(len(self.ops), index + around + 1)):
            lines.append(f" {'>' if i == index else ' '} {i:3d} | {printer.format_operator(self.ops[i], self.program)}")
        loc = self.ops[index].loc
        return [*lines, f"  written by {loc}"] if loc else lines

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
        self.origin: Any = None
        """The `capture.model.Origin` that `build` captured it from; one that was read from a file has none."""
        self.loaded = False
        """True if other weights were loaded into it than `build` copied."""
        self.loaded_whole = False
        """True if these are all of its weights: none is left that a script may have drawn."""
        self.taken_over: Any = None
        """The torch.optim instance that `minimize` was given, if it was one, and its options then."""

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

    def find_op(self, type: str) -> Operator | None:
        """The first op of this type, in whatever block; None if there is none."""
        return next((op for block in self.blocks.values() for op in block.ops if op.type == type), None)

    def clone(self, name: str | None = None) -> Program:
        """A deep copy, but for the values, which are shared (they are never changed in place)."""
        new = Program(self.name if name is None else name, copy.deepcopy(self.attrs))
        for v in self.variables.values():
            new.variables[v.name] = replace(v, attrs=copy.deepcopy(v.attrs), program=new)
        for b in self.blocks.values():
            nb = new.block(b.name, **copy.deepcopy(b.attrs))
            nb.ops = [replace(op, attrs=dict(op.attrs)) for op in b.ops]
        new.values, new.origin, new.taken_over = dict(self.values), self.origin, self.taken_over
        new.loaded, new.loaded_whole = self.loaded, self.loaded_whole
        return new

    def __eq__(self, other: object) -> bool:
        ordered = isinstance(other, Program) and [*self.blocks] == [*other.blocks]
        return ordered and _equal(self, other, "name", "attrs", "variables", "blocks")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return printer.format_program(self)

    def __repr__(self) -> str:
        ops = ", ".join(f"{b.name}: {len(b.ops)}" for b in self.blocks.values())
        return f"<Program {self.name!r}: {len(self.variables)} variables; ops {ops or 'none'}>"
