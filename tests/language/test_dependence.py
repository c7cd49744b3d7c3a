"""The dependence graph, on blocks by hand; and that every order that it allows computes the same."""

from __future__ import annotations

import random

import networkx as nx
import pytest
import torch

from graphft.errors import ProgramError
from graphft.ir import Block, Program
from graphft.ir.dependence import def_use, to_dot, topological_order
from graphft.ir.parser import parse
from graphft.ir.registry import op
from tests.support.golden import assert_golden


@op("view_send", effect=True)
def _send(ctx: object, *tensors: object) -> None:
    """An effect."""


TEXT = """
program p

input %x: float32[batch, 8]
param %w: float32[4, 8]
buffer %mean: float32[4]

block step:
  %t: float32[8, 4] = aten.t(%w)
  %h: float32[batch, 4] = aten.mm(%x, %t)
  %flat: float32[4*batch] = aten.view(%h, (-1,))
  %r: float32[4*batch] = aten.relu_(%flat)
  %s: float32[4] = aten.sum.dim_IntList(%h, (0,))
  %dead: float32[4] = aten.neg(%s)
  view_send(%s)
  %c: float32[4] = aten.copy_(%mean, %s)
  view_send(%mean)
"""


def block(text: str = TEXT) -> Block:
    return next(iter(parse(text).blocks.values()))


def kinds(b: Block) -> dict[tuple[int, int], str]:
    return {(i, j): kind for i, j, kind in def_use(b).edges(data="kind")}


def test_values_flow_through_results_and_through_views_changed_in_place() -> None:
    edges = kinds(block())
    assert edges[0, 1] == edges[1, 2] == edges[2, 3] == "flow"
    assert edges[1, 4] == "flow"
    assert edges[3, 4] == "flow", "relu_ changes %h through its view %flat"
    assert def_use(block()).edges[3, 4]["names"] == ("h",)


def test_effects_keep_their_order_and_changes_wait_for_readers() -> None:
    b = block(TEXT.replace("  %c: float32[4] = aten.copy_", "  view_send(%mean)\n  %c: float32[4] = aten.copy_"))
    edges = kinds(b)
    assert edges[6, 7] == "effect"
    assert edges[7, 8] == "anti", "copy_ changes %mean, which the send before it reads"
    assert edges[8, 9] == "flow"
    assert edges[7, 9] == "effect"


def test_two_changes_in_place_keep_their_order() -> None:
    b = block(
        "program p\nbuffer %m: float32[4]\ninput %x: float32[4]\nblock step:\n"
        "  %a: float32[4] = aten.copy_(%m, %x)\n  %b: float32[4] = aten.zero_(%m)\n"
    )
    assert kinds(b)[0, 1] == "flow"
    once = block("program p\nbuffer %m: float32[4]\nblock step:\n  %m = aten.zeros((4,))\n  %m = aten.ones((4,))\n")
    assert kinds(once) == {(0, 1): "output"}


def test_topological_order() -> None:
    b = block()
    assert topological_order(b) == list(range(9)), "the written one where that is legal"
    b.ops.insert(2, b.ops.pop(0))
    assert topological_order(b) == [2, 0, 1, 3, 4, 5, 6, 7, 8]
    b = block(
        "program p\ninput %x: float32[4]\nblock step:\n  %a: float32[4] = aten.add.Tensor(%x, %c)\n"
        "  %b: float32[4] = aten.neg(%a)\n  %c: float32[4] = aten.neg(%b)\n"
    )
    with pytest.raises(ProgramError) as caught:
        topological_order(b)
    assert caught.value.rule == "cycle"


@pytest.mark.parametrize("seed", range(20))
def test_every_order_of_the_graph_computes_the_same(seed: int) -> None:
    """A model of memory: cells, views of cells, changes in place; any topological order leaves the same values."""
    rng = random.Random(seed)
    names, lines = ["x"], []
    for i in range(12):
        a, b = rng.choice(names), rng.choice(names)
        make = rng.choice(
            [
                "aten.view({a}, (4,))",
                "aten.add.Tensor({a}, {b})",
                "aten.add_.Tensor({a}, {b})",
                "aten.mul_.Tensor({a}, 3)",
            ]
        )
        lines.append(f"  %v{i}: int64[4] = " + make.format(a=f"%{a}", b=f"%{b}"))
        names.append(f"v{i}")
    b = block("program p\nbuffer %x: int64[4]\nblock step:\n" + "\n".join(lines))
    expected = run(b, list(range(12)))
    graph = def_use(b)
    for _ in range(10):
        priority = [rng.random() for _ in b.ops]
        order = list(nx.lexicographical_topological_sort(graph, key=priority.__getitem__))
        assert run(b, order) == expected


def run(b: Block, order: list[int]) -> dict[str, list[int]]:
    scope = {"x": torch.tensor([1, 2, 3, 4])}
    for i in order:
        o = b.ops[i]
        args = [scope[a.name] if hasattr(a, "name") else a for a in o.args]
        name, _, overload = o.type.removeprefix("aten.").partition(".")
        scope[o.writes[0]] = getattr(getattr(torch.ops.aten, name), overload or "default")(*args)
    return {name: value.tolist() for name, value in scope.items()}


def test_golden_picture() -> None:
    program = parse(TEXT + "block daemon {interval = 0.5}:\n  view_send(%w)\n")
    assert_golden(to_dot(program), "language_dot")


def test_a_picture_of_one_block_escapes_what_it_quotes() -> None:
    assert 'label="block a \\"b\\" \\\\ <c>"' in to_dot(Program().block('a "b" \\ <c>'))
