"""The dependence graph of a block: what every legal order of its ops satisfies.

Views share memory: a change in place of one name touches every name that may be a view of the same tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from graphft.ir import Block, Kind, Operator, Program, registry
from graphft.ir.dependence import alias_classes, memory_writes

if TYPE_CHECKING:
    import networkx as nx


def dependence_graph(block: Block, results: Collection[str] = ()) -> nx.DiGraph:
    """Returns the graph: its nodes are the indices of the ops, and an edge (a, b) says that op b runs after op a.

    An edge with `names` carries their values: b reads what a wrote. One without keeps an order: b
    changes what a reads or writes, or both have an effect beyond their results. Every topological order computes the
    same values. One more node, behind those of the ops, reads `results`.
    """
    import networkx as nx  # here: a process that only runs programs does without

    graph, memory = nx.DiGraph(), alias_classes(block)
    definer: dict[str, int] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}

    def edge(a: int | None, b: int, *names: str) -> None:
        if a is not None and a != b:
            known = graph.get_edge_data(a, b, {"names": ()})["names"]
            graph.add_edge(a, b, names=tuple(dict.fromkeys((*known, *names))))

    def read(i: int, name: str) -> None:
        edge(definer.get(name), i, name)
        edge(writer.get(memory(name)), i, name)

    graph.add_nodes_from(range(len(block.ops) + 1))
    for i, op in enumerate(block.ops):
        for name in op.reads:
            read(i, name)
            readers.setdefault(memory(name), []).append(i)
        for name in sorted({*memory_writes(op, block), *(n for n in op.writes if n in definer)}):
            for other in (writer.get(memory(name)), definer.get(name), *readers.get(memory(name), ())):
                edge(other, i)
            writer[memory(name)], readers[memory(name)] = i, []
        definer.update(dict.fromkeys(op.writes, i))
    effects = [i for i, op in enumerate(block.ops) if (d := registry.get(op.type)) is not None and d.effect]
    for a, b in itertools.pairwise(effects):
        edge(a, b)
    for name in results:
        read(len(block.ops), name)
    return graph


def needed_ops(block: Block, results: Collection[str]) -> list[Operator]:
    """Returns the ops that the results depend on: those that make what is read, or change it in place before."""
    import networkx as nx

    graph = dependence_graph(block, results)
    flow = nx.subgraph_view(graph, filter_edge=lambda a, b: bool(graph.edges[a, b]["names"]))
    return [block.ops[i] for i in sorted(nx.ancestors(flow, len(block.ops)))]


def to_dot(program: Program) -> str:
    """Returns GraphViz source, one cluster per block; a dashed arrow carries no value, only order."""
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for n, block in enumerate(program.blocks.values()):
        lines += [f"  subgraph cluster_{n} {{", f"    label={_quoted('block ' + block.name)}"]
        lines += [f"    {line}" for line in _drawing(block, f"b{n}")] + ["  }"]
    return "\n".join([*lines, "}", ""])


def _drawing(block: Block, prefix: str) -> Iterator[str]:
    variables = block.program.variables
    for i, op in enumerate(block.ops):
        lasting = [n for n in dict.fromkeys((*op.reads, *op.writes)) if n in variables]
        lasting = [str(variables[n]) for n in lasting if variables[n].kind is not Kind.TEMP]
        yield f"{prefix}_{i} [label={_quoted(f'{i}: {op.type}', *lasting)}]"
    for a, b, names in sorted(dependence_graph(block).edges(data="names"), key=lambda e: e[:2]):
        style = f"label={_quoted(', '.join(f'%{n}' for n in names))}" if names else "style=dashed"
        yield f"{prefix}_{a} -> {prefix}_{b} [{style}]"


def _quoted(*lines: str) -> str:
    return '"' + "\\n".join(s.replace("\\", "\\\\").replace('"', '\\"') for s in lines) + '"'
