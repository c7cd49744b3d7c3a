"""Views of a block or program: orders, critical path, dead ops (on networkx), GraphViz and Mermaid pictures.

`def_use(block)` is the graph below them all (see `graphft.ir.dependence`). In the pictures boxes are ops, rounded ones
the variables that outlive a block; a full arrow carries a value, a dashed one only order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Program, refs, registry
from graphft.ir.dependence import alias_classes, def_use, flow, memory_writes


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
        raise ProgramError(
            f"ops {', '.join(map(str, cycle))} of block {block.name} wait for each other",
            block=block,
            index=cycle[0],
            rule="cycle",
            help="break the cycle: let one of them read another variable",
        ) from None


def critical_path(block: Block, cost: Callable[[Operator], float] | None = None) -> list[int]:
    """Op indices of the costliest chain of dependences. `cost` gives an op's cost in any unit; by default it is 1."""
    graph = def_use(block)
    total: dict[int, float] = {}
    before: dict[int, int | None] = {}
    for i in topological_order(block):
        before[i] = max(graph.predecessors(i), key=lambda p: (total[p], -p), default=None)
        previous = before[i]
        total[i] = (cost(block.ops[i]) if cost else 1.0) + (0.0 if previous is None else total[previous])
    path: list[int] = []
    at = max(total, key=lambda i: (total[i], -i), default=None)
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1]


def unreachable(block: Block, fetch: Iterable[str] = ()) -> list[int]:
    """Indices of pure ops whose results reach nothing: no effect, no variable that outlives the block, no `fetch`.

    The program's `loss`, variables in the attributes of the program or a block, and those that another block reads,
    are reached.
    """
    live = {i for i, op in enumerate(block.ops) if _lasts(op, block)}
    if len(live) == len(block.ops):  # as in every optimize block, of which there may be many
        return []
    wanted = set(fetch) | _read_elsewhere(block)
    classes = alias_classes(block)
    lasting = {classes(v.name) for v in block.program.variables.values() if v.kind is not Kind.TEMP or v.name in wanted}
    live.update(
        i
        for i, op in enumerate(block.ops)
        if wanted.intersection(registry.writes_of(op)) or any(classes(n) in lasting for n in memory_writes(op, block))
    )
    graph = flow(def_use(block))
    pending = [i for i in live if i in graph]
    while pending:
        found = [i for i in graph.predecessors(pending.pop()) if i not in live]
        live.update(found)
        pending += found
    return [i for i in range(len(block.ops)) if i not in live]


def to_dot(what: Program | Block) -> str:
    """GraphViz source: one cluster per block. `dot -Tsvg` draws it."""
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for n, block in enumerate(_blocks(what)):
        nodes, edges = _drawing(block, f"b{n}")
        lines += [f"  subgraph cluster_{n} {{", f"    label={_dot_string(f'block {block.name}')}"]
        lines += [f"    {v.id} [label={_dot_string(*v.label)}{', style=rounded' if v.variable else ''}]" for v in nodes]
        lines += [f"    {e.source} -> {e.target}{_dot_style(e)}" for e in edges]
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def to_mermaid(what: Program | Block) -> str:
    """Mermaid source: a flowchart with one subgraph per block."""
    lines = ["flowchart TD"]
    for n, block in enumerate(_blocks(what)):
        nodes, edges = _drawing(block, f"b{n}")
        lines.append(f"  subgraph b{n}[{_mermaid_string(f'block {block.name}')}]")
        for v in nodes:
            text = _mermaid_string(*v.label)
            lines.append(f"    {v.id}({text})" if v.variable else f"    {v.id}[{text}]")
        for e in edges:
            arrow = "-.->" if e.dashed else "-->"
            lines.append(f"    {e.source} {arrow}{f'|{_mermaid_string(e.label)}|' if e.label else ''} {e.target}")
        lines.append("  end")
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    label: tuple[str, ...]
    variable: bool = False


@dataclass(frozen=True, slots=True)
class _Edge:
    source: str
    target: str
    label: str = ""
    dashed: bool = False


def _blocks(what: Program | Block) -> list[Block]:
    return [what] if isinstance(what, Block) else list(what.blocks.values())


def _drawing(block: Block, prefix: str) -> tuple[list[_Node], list[_Edge]]:
    nodes = [
        _Node(f"{prefix}_{i}", (f"{i}: {op.type}", *(_signature(n, block) for n in op.writes)))
        for i, op in enumerate(block.ops)
    ]
    edges = [
        _Edge(f"{prefix}_{a}", f"{prefix}_{b}", ", ".join(f"%{n}" for n in data["names"]), data["kind"] != "flow")
        for a, b, data in sorted(def_use(block).edges(data=True), key=lambda e: e[:2])
    ]
    lasting: dict[str, str] = {}
    for i, name, written in _lasting_uses(block):
        if name not in lasting:
            lasting[name] = f"{prefix}_v{len(lasting)}"
            nodes.append(_Node(lasting[name], (_signature(name, block),), variable=True))
        ends = (f"{prefix}_{i}", lasting[name])
        edges.append(_Edge(*ends) if written else _Edge(*ends[::-1]))
    return nodes, edges


def _lasting_uses(block: Block) -> Iterator[tuple[int, str, bool]]:
    """(op index, name, written) for each use of a variable that is no temporary: its first value, and its last."""
    variables = block.program.variables
    for i, op in enumerate(block.ops):
        writes = registry.writes_of(op)
        for name in dict.fromkeys((*op.reads, *writes)):
            if name in variables and variables[name].kind is not Kind.TEMP:
                yield i, name, name in writes


def _signature(name: str, block: Block) -> str:
    return str(block.program.variables.get(name, f"%{name}"))


def _dot_string(*lines: str) -> str:
    return '"' + "\\n".join(s.replace("\\", "\\\\").replace('"', '\\"') for s in lines) + '"'


def _dot_style(edge: _Edge) -> str:
    style = ([f"label={_dot_string(edge.label)}"] if edge.label else []) + (["style=dashed"] if edge.dashed else [])
    return f" [{', '.join(style)}]" if style else ""


def _mermaid_string(*lines: str) -> str:
    return '"' + "<br/>".join(s.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;") for s in lines) + '"'


def _lasts(op: Operator, block: Block) -> bool:
    """Whether `op` has an effect, or changes, under its own name, a variable that outlives the block."""
    definition, variables = registry.get(op.type), block.program.variables
    return (
        definition is None
        or definition.effect
        or any(n in variables and variables[n].kind is not Kind.TEMP for n in memory_writes(op, block))
    )


def _read_elsewhere(block: Block) -> set[str]:
    program = block.program
    attrs = [*program.attrs.values(), *(v for b in program.blocks.values() for v in b.attrs.values())]
    names = {r.name for r in refs(tuple(attrs))} | {str(program.attrs.get("loss", ""))}
    for other in program.blocks.values():
        if other is not block:
            names.update(name for op in other.ops for name in op.reads)
    return names


__all__ = ["critical_path", "def_use", "to_dot", "to_mermaid", "topological_order", "unreachable"]
