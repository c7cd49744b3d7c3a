"""Lowering: a block becomes one generated Python function, run as often as the block is.

Variables are local variables of that function, kernels are bound in its globals, literals are resolved once, and a
value is deleted right after the last op that reads it. What lives longer than the block (parameters, inputs, ...) is
loaded from the scope at its first use, and stored back when an op has it as a result. `Lowered.source` is the text.
"""

from __future__ import annotations

import keyword
import re
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any

import torch

from graphft.errors import GraphftError, ProgramError, describe
from graphft.ir import Arg, Block, Kind, Operator, Ref, registry
from graphft.ir.literals import DEVICE, resolve
from graphft.ops.context import Interrupt

Scope = MutableMapping[str, Any]
"""Values by variable name."""

Observe = Callable[[Block, int, Mapping[str, Any]], None]
"""Gets the block and index of each op that has run, and the values that the op read and wrote, by variable name."""


class Lowered:
    """The function that runs `block` from op `start` on, and returns the values of the variables in `fetch`.

    Call it with a context (for own kernels) and a scope, which holds what the block loads, and receives what outlives
    it. `observe` is called after each op; without it, the function has nothing of that. A failing op raises
    ProgramError[op-failed] with the op, its place, the user's line and the operands' actual shapes, chained to torch's
    own error. Interrupts and graphft's own errors pass through as they are.

    Raises ProgramError for an unknown op, and for a fetch that the program does not declare.
    """

    def __init__(
        self,
        block: Block,
        *,
        fetch: Sequence[str] = (),
        start: int = 0,
        device: str | torch.device = "cpu",
        observe: Observe | None = None,
    ) -> None:
        self.block = block
        for name in fetch:
            if name not in block.program.variables:
                raise ProgramError(
                    f"%{name} is fetched, but program '{block.program.name}' does not declare it",
                    block=block,
                    rule="undeclared",
                    help="fetch a variable of the program",
                )
        self._writer = _Writer(block, tuple(fetch), start, torch.device(device), observe)
        self.source = self._writer.source()
        exec(compile(self.source, f"<{block.program.name}.{block.name}>", "exec"), self._writer.globals)
        self._function = self._writer.globals["run"]
        inputs = {v.name for v in block.program.of_kind(Kind.INPUT)}
        self.inputs = [n for n in self._writer.loads if n in inputs]

    def __call__(self, ctx: Any, scope: Scope) -> tuple[Any, ...]:
        try:
            with torch.no_grad():
                return self._function(ctx, scope)
        except (Interrupt, GraphftError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, too: user code must not end a role as if it were done
            raise self._located(error) from error

    def _located(self, error: BaseException) -> ProgramError:
        frames = [f for f in traceback.walk_tb(error.__traceback__) if f[0].f_code is self._function.__code__]
        index = self._writer.op_of_line.get(frames[0][1]) if frames else None
        if index is None:
            what = f"block {self.block.name} failed: {describe(error)}"
            return ProgramError(what, block=self.block, rule="op-failed")
        op, values, slots = self.block.ops[index], frames[0][0].f_locals, self._writer.slots
        missing = [n for n in op.reads if slots[n] not in values]
        if isinstance(error, KeyError) and missing:
            return ProgramError(
                f"%{missing[0]} has no value in the scope",
                block=self.block,
                index=index,
                rule="no-value",
                help="feed it, or run the block that makes it first",
            )
        operands = [f"%{n}: {_describe(values[slots[n]])}" for n in op.reads if n not in missing]
        return ProgramError(
            f"{op.type} failed: {describe(error)}",
            block=self.block,
            index=index,
            rule="op-failed",
            help=f"its operands were {', '.join(operands) or 'none'}",
        )


lower = Lowered


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}] on {value.device}"
    return repr(value)


class _Writer:
    """Writes the text of one block's function."""

    def __init__(
        self, block: Block, fetch: tuple[str, ...], start: int, device: torch.device, observe: Observe | None
    ) -> None:
        self.block, self.fetch, self.start, self.device, self.observe = block, fetch, start, device, observe
        self.globals: dict[str, Any] = {}
        self.slots: dict[str, str] = {}
        self.op_of_line: dict[int, int] = {}
        self._taken = {"ctx", "scope", "run"}
        self._bound: dict[Any, str] = {}
        self._lines = ["def run(ctx, scope):"]
        self._loaded: set[str] = set()
        self.loads: list[str] = []

    def source(self) -> str:
        """The whole text; fills `globals`, `slots` and `op_of_line`."""
        last = self._last_use()
        for index in range(self.start, len(self.block.ops)):
            op = self.block.ops[index]
            definition = registry.require(op, self.block, index)
            for name in op.reads:
                self._load(name, index)
            self._line(self._call(op, definition), index)
            self._loaded.update(op.writes)
            if any(slot.by_name and slot.name in definition.writes for slot in definition.slots):
                self._loaded.difference_update(definition.written_operands(op))  # it may put others in their place
            for name in filter(self._outlives, op.writes):
                self._line(f"scope[{name!r}] = {self._slot(name)}", index)
            if self.observe is not None:
                self._line(self._observation(index), index)
            dead = [self._slot(n) for n in dict.fromkeys((*op.reads, *op.writes)) if last.get(n) == index]
            if None in op.outputs:
                dead.append("_")
            if dead:
                self._lines[-1] += f"; del {', '.join(dead)}"
        for name in self.fetch:
            self._load(name, len(self.block.ops) - 1)
        self._line(f"return ({''.join(self._slot(n) + ', ' for n in self.fetch)})", len(self.block.ops) - 1)
        return "\n".join(self._lines) + "\n"

    def _observation(self, index: int) -> str:
        op = self.block.ops[index]
        values = ", ".join(
            f"{n!r}: {self._slot(n)}" for n in dict.fromkeys((*op.reads, *op.writes)) if n in self._loaded
        )
        return f"{self._bind(self.observe, 'observe')}({self._bind(self.block, 'block')}, {index}, {{{values}}})"

    def _outlives(self, name: str) -> bool:
        """True for a result that is stored in the scope: no temporary, or one that another block reads."""
        program = self.block.program
        return program.variables[name].kind is not Kind.TEMP or name in self._read_elsewhere

    @cached_property
    def _read_elsewhere(self) -> frozenset[str]:
        others = (b for b in self.block.program.blocks.values() if b is not self.block)
        return frozenset(name for b in others for op in b.ops for name in op.reads)

    def _last_use(self) -> dict[str, int]:
        """For every variable that is not fetched, the last op that touches it."""
        last: dict[str, int] = {}
        for index in range(self.start, len(self.block.ops)):
            op = self.block.ops[index]
            last.update(dict.fromkeys((*op.reads, *op.writes), index))
        return {n: i for n, i in last.items() if n not in self.fetch}

    def _line(self, text: str, index: int) -> None:
        self._lines.append(f"    {text}")
        self.op_of_line[len(self._lines)] = index

    def _load(self, name: str, index: int) -> None:
        if name not in self._loaded:
            self._loaded.add(name)
            self.loads.append(name)
            self._line(f"{self._slot(name)} = scope[{name!r}]", index)

    def _slot(self, name: str) -> str:
        if name not in self.slots:
            self.slots[name] = self._unique(re.sub(r"\W", "_", name))
        return self.slots[name]

    def _unique(self, stem: str) -> str:
        stem = f"v_{stem}" if not stem.isidentifier() or keyword.iskeyword(stem) or stem == "_" else stem
        name, n = stem, 1
        while name in self._taken:
            n += 1
            name = f"{stem}__{n}"
        self._taken.add(name)
        return name

    def _call(self, op: Operator, definition: registry.OpDef) -> str:
        named = {i for i, slot in enumerate(definition.slots) if slot.by_name}
        operands = [
            self._bind(a, a.name) if min(i, len(definition.slots) - 1) in named else self._expression(a)
            for i, a in enumerate(op.args)
        ]
        operands += [f"{k}={self._expression(v)}" for k, v in op.attrs.items()]
        if not definition.extra.get("context_free"):
            operands.insert(0, "ctx")
        call = f"{self._bind(definition.kernel, op.type)}({', '.join(operands)})"
        targets = self._targets(op, definition)
        return f"{targets} = {call}" if targets else call

    def _targets(self, op: Operator, definition: registry.OpDef) -> str:
        names = ["_" if n is None else self._slot(n) for n in op.outputs]
        shape = definition.extra.get("result_lists")
        if shape:  # results that are lists of tensors take what the single ones leave
            lists = len(names) - sum(not is_list for is_list in shape)
            parts = []
            for is_list in shape:
                part, names = (names[:lists], names[lists:]) if is_list else (names[:1], names[1:])
                parts.append(f"[{', '.join(part)}]" if is_list else part[0])
            return ", ".join(parts)
        return ", ".join(names)

    def _bind(self, value: Any, stem: str) -> str:
        key = id(value)
        if key not in self._bound:
            self._bound[key] = self._unique(re.sub(r"\W", "_", stem))
            self.globals[self._bound[key]] = value
        return self._bound[key]

    def _expression(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return self._slot(arg.name)
        if isinstance(arg, tuple):
            return f"({''.join(self._expression(a) + ', ' for a in arg)})"
        if isinstance(arg, float) and not abs(arg) < float("inf"):
            return f"float('{arg}')"
        if isinstance(arg, (bool, int, float, str)) or arg is None:
            return repr(arg)
        return self._bind(self.device if arg == DEVICE else resolve(arg, self.device), arg.name)
