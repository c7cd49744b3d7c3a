"""Finds names that share memory in a block, and what an op changes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphft.ir import Block, Kind, Operator, refs, registry


def memory_writes(op: Operator, block: Block) -> Iterator[str]:
    """Names whose memory, there before, `op` changes: operands in place, and results that are no temporaries."""
    variables = block.program.variables
    for name in registry.writes_of(op):
        if name not in op.writes or (name in variables and variables[name].kind is not Kind.TEMP):
            yield name


def alias_classes(block: Block) -> Callable[[str], str]:
    """Maps a name to the representative of all names that may share its memory."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.get(name, name) != name:
            name = parent[name]
        return name

    for op in block.ops:
        for a, b in _aliases(op):
            parent[find(a)] = find(b)
    return find


def last_writes(block: Block) -> dict[str, int]:
    """Returns by variable the last op that produces it or changes its memory, under whatever name."""
    same_memory = alias_classes(block)
    changed: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(block.ops):
        changed.update({same_memory(n): i for n in memory_writes(op, block)})
        last.update(dict.fromkeys(op.writes, i))
    return {n: max(last.get(n, -1), changed.get(same_memory(n), -1)) for n in block.program.variables}


def _aliases(op: Operator) -> Iterator[tuple[str, str]]:
    """(result, operand) pairs that may share memory, as torch's schema of the op has it. Our own ops have none."""
    definition = registry.get(op.type)
    schema = getattr(definition.kernel, "_schema", None) if definition is not None else None
    if schema is None or not (schema.name in _SILENT_VIEWS or any(r.alias_info for r in schema.returns)):
        return
    for slot, arg in zip(schema.arguments, op.args, strict=False):
        if slot.alias_info is not None or schema.name in _SILENT_VIEWS:
            yield from ((result, ref.name) for result in op.writes for ref in refs(arg))


_SILENT_VIEWS = frozenset({"aten::_unsafe_view"})
"""Ops that give a view of their operand though their schema does not say so."""
