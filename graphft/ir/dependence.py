"""What depends on what in a block: the graph that every legal order of its ops satisfies.

The nodes are the indices of the ops. An edge (a, b) says that op b must run after op a. Its `kind` tells why, its
`names` about which variables:

    flow      b reads what a wrote (a result, or an operand that a changed in place)
    anti      b changes in place, or defines again, what a reads
    output    both write it
    effect    both have an effect beyond their results (drawing random numbers is one): these keep their order

Views share memory: a change in place of one name touches every name that may be a view of the same tensor. So every
topological order of the graph computes the same values. `to_dot` draws the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Program, refs, registry

if TYPE_CHECKING:
    import networkx as nx


def def_use(block: Block) -> nx.DiGraph:
    """The dependence graph. Nodes carry `op`, edges `kind` and `names` (see the module's docstring).

    A temporary that is read before the op that produces it stands gives an edge backwards: the graph of a block in
    the wrong order has another topological order, that of a cyclic one has none.
    """
    import networkx as nx  # here: a process that only runs programs does without

    graph = nx.DiGraph()
    for i, op in enumerate(block.ops):
        graph.add_node(i, op=op)
    _data_edges(block, graph)
    effects = [i for i, op in enumerate(block.ops) if (d := registry.get(op.type)) is not None and d.effect]
    for a, b in itertools.pairwise(effects):
        _edge(graph, a, b, "effect")
    return graph


def flow(graph: nx.DiGraph) -> nx.DiGraph:
    """The part of a `def_use` graph that carries values."""
    import networkx as nx

    return nx.edge_subgraph(graph, [(a, b) for a, b, kind in graph.edges(data="kind") if kind == "flow"])


def _data_edges(block: Block, graph: nx.DiGraph) -> None:
    classes = alias_classes(block)
    definer: dict[str, int] = {}
    writer: dict[str, int] = {}  # per class of names that may share memory
    readers: dict[str, list[int]] = {}
    early: list[tuple[int, str]] = []
    for i, op in enumerate(block.ops):
        for name in op.reads:
            memory = classes(name)
            for source in {definer.get(name), writer.get(memory)} - {None, i}:
                _edge(graph, source, i, "flow", name)
            if name not in definer:
                early.append((i, name))
            readers.setdefault(memory, []).append(i)
        changed = set(memory_writes(op, block)) | {n for n in op.writes if n in definer}
        for name in sorted(changed):
            memory = classes(name)
            for source in {writer.get(memory), definer.get(name)} - {None, i}:
                _edge(graph, source, i, "output", name)
            for source in set(readers.get(memory, ())) - {i}:
                _edge(graph, source, i, "anti", name)
            writer[memory], readers[memory] = i, []
        definer.update(dict.fromkeys(op.writes, i))
    for i, name in early:
        variable = block.program.variables.get(name)
        if name in definer and (variable is None or variable.kind is Kind.TEMP):
            _edge(graph, definer[name], i, "flow", name)


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


def _edge(graph: nx.DiGraph, a: int | None, b: int, kind: str, *names: str) -> None:
    """Adds the edge, or adds to it; one that carries a value is of kind flow whatever else it is."""
    known = graph.get_edge_data(a, b)
    if known is None:
        graph.add_edge(a, b, kind=kind, names=names)
    else:
        known["kind"] = "flow" if "flow" in (kind, known["kind"]) else known["kind"]
        known["names"] = (*known["names"], *(n for n in names if n not in known["names"]))


def topological_order(block: Block) -> list[int]:
    """Op indices in an order that satisfies every dependence, as close to the written one as can be.

    Raises ProgramError[cycle] if there is none.
    """
    import networkx as nx

    graph = def_use(block)
    try:
        return list(nx.lexicographical_topological_sort(graph))
    except nx.NetworkXUnfeasible:
        cycle = sorted(a for a, _ in nx.find_cycle(graph))
        message = f"ops {', '.join(map(str, cycle))} of block {block.name} wait for each other"
        raise ProgramError(message, block=block, index=cycle[0], rule="cycle") from None


def to_dot(what: Program | Block) -> str:
    """GraphViz source: one cluster per block. `dot -Tsvg` draws it.

    Boxes are ops, rounded ones the variables that outlive a block; a dashed arrow carries no value, only order.
    """
    blocks = [what] if isinstance(what, Block) else list(what.blocks.values())
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for n, block in enumerate(blocks):
        lines += [f"  subgraph cluster_{n} {{", f"    label={_quoted(f'block {block.name}')}"]
        lines += [f"    {line}" for line in _drawing(block, f"b{n}")] + ["  }"]
    return "\n".join([*lines, "}", ""])


def _drawing(block: Block, prefix: str) -> Iterator[str]:
    variables = block.program.variables
    for i, op in enumerate(block.ops):
        results = [str(variables.get(n, f"%{n}")) for n in op.writes]
        yield f"{prefix}_{i} [label={_quoted(f'{i}: {op.type}', *results)}]"
    for a, b, data in sorted(def_use(block).edges(data=True), key=lambda e: e[:2]):
        style = "" if data["kind"] == "flow" else "style=dashed"
        label = f"label={_quoted(', '.join(f'%{n}' for n in data['names']))}" if data["names"] else ""
        yield f"{prefix}_{a} -> {prefix}_{b} [{', '.join(filter(None, (label, style)))}]"
    lasting: dict[str, str] = {}
    for i, op in enumerate(block.ops):
        writes = registry.writes_of(op)
        for name in dict.fromkeys((*op.reads, *writes)):
            if name not in variables or variables[name].kind is Kind.TEMP:
                continue
            if name not in lasting:
                lasting[name] = f"{prefix}_v{len(lasting)}"
                yield f"{lasting[name]} [label={_quoted(str(variables[name]))}, style=rounded]"
            yield f"{prefix}_{i} -> {lasting[name]}" if name in writes else f"{lasting[name]} -> {prefix}_{i}"


def _quoted(*lines: str) -> str:
    return '"' + "\\n".join(s.replace("\\", "\\\\").replace('"', '\\"') for s in lines) + '"'
