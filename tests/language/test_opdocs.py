"""The op reference is made from the definitions, and docs/ops.md is up to date."""

from __future__ import annotations

from pathlib import Path

from graphft.ir.registry import own_ops
from graphft.runtime.reference import ops_page

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_every_own_op_is_documented() -> None:
    page = ops_page()
    ops = [d for d in own_ops() if d.kernel.__module__.startswith("graphft.ops.")]
    assert {"send", "recv", "etcd_get_chunk", "listen_and_serv", "sgd", "adam"} <= {d.name for d in ops}
    for definition in ops:
        assert f"### `{definition.name}`" in page
        assert definition.doc, f"{definition.name} has no docstring"


def test_the_page_is_up_to_date() -> None:
    assert ops_page() == PAGE.read_text(), "make docs"
