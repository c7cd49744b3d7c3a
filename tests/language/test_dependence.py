"""The results of a block depend on ops through views and changes in place."""

from __future__ import annotations

import random

import networkx
import pytest
import torch

from graphft.ir import Operator
from graphft.ir.graph import dependence_graph, needed_ops, to_dot
from graphft.ir.parser import parse


@pytest.mark.parametrize("seed", range(20))
def test_needed_ops_and_every_order_compute_the_same(seed: int) -> None:
    """The blocks are a model of memory: cells, views of cells, changes in place."""
    rng = random.Random(seed)
    names, lines = ["x"], []
    for i in range(12):
        make = rng.choice(
            [
                "aten.view({a}, (4,))",
                "aten.add.Tensor({a}, {b})",
                "aten.add_.Tensor({a}, {b})",
                "aten.mul_.Tensor({a}, 3)",
            ]
        )
        lines.append(f"  %v{i}: int64[4] = " + make.format(a=f"%{rng.choice(names)}", b=f"%{rng.choice(names)}"))
        names.append(f"v{i}")
    block = parse("program p\nbuffer %x: int64[4]\nblock step:\n" + "\n".join(lines)).blocks["step"]
    for result in names[1:]:
        assert run(needed_ops(block, [result]))[result] == run(block.ops)[result]
    graph = dependence_graph(block)
    graph.remove_node(len(block.ops))
    for _ in range(10):
        priority = [rng.random() for _ in block.ops]
        order = list(networkx.lexicographical_topological_sort(graph, key=priority.__getitem__))
        assert run([block.ops[i] for i in order]) == run(block.ops), "every order of the graph computes the same"


def run(ops: list[Operator]) -> dict[str, list[int]]:
    scope = {"x": torch.tensor([1, 2, 3, 4])}
    for op in ops:
        args = [scope[a.name] if hasattr(a, "name") else a for a in op.args]
        name, _, overload = op.type.removeprefix("aten.").partition(".")
        scope[op.writes[0]] = getattr(getattr(torch.ops.aten, name), overload or "default")(*args)
    return {name: value.tolist() for name, value in scope.items()}


def test_what_no_result_depends_on_is_left_out() -> None:
    text = """
        program p
        input %x: float32[4]
        buffer %mean: float32[4]
        block step:
          %a: float32[4] = aten.view(%x, (4,))
          %b: float32[4] = aten.relu_(%a)
          %loss: float32[] = aten.sum(%x)
          %c: float32[4] = aten.copy_(%mean, %x)
          %d: float32[4] = aten.relu_(%a)
    """
    block = parse(text).blocks["step"]
    assert needed_ops(block, ["loss"]) == block.ops[:3], "relu_ changes %x through its view, before it is summed"
    picture = to_dot(block.program)
    assert 'b0_1 -> b0_2 [label="%x"]' in picture
    assert "b0_2 -> b0_3 [style=dashed]" not in picture
    assert "b0_2 -> b0_4 [style=dashed]" in picture, "%d changes what %loss is the sum of"
