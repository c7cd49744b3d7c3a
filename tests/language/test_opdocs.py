"""The op reference is made from the definitions, and docs/ops.md is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from graphft.ir import Type
from graphft.ir.registry import get, op, own_ops
from graphft.runtime.reference import op_section, ops_page

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


@op("doc_example", infer=[Type("float32", ("batch",)), Type("int")], writes=("target",), effect=True)
def _example(
    ctx: object,
    target: object,
    *others: object,
    count: int,
    mode: Literal["a", "b"] = "a",
    scale: float | None = None,
    ranges: tuple[tuple[int, int], ...] = (),
    anything: Any = True,
) -> None:
    """Shows everything that a section can hold."""


def test_section_of_an_op() -> None:
    definition = get("doc_example")
    assert definition is not None
    assert (
        op_section(definition)
        == """\
### `doc_example`

```
float32[batch], int = doc_example(%target!, *%others) {count, mode = "a", scale = none, ranges = (), anything = true}
```

Shows everything that a section can hold.

| attribute | type | default |
| --- | --- | --- |
| `count` | int |  |
| `mode` | `"a"` or `"b"` | `"a"` |
| `scale` | float or none | `none` |
| `ranges` | tuple of (int, int) | `()` |
| `anything` | any | `true` |

Has an effect beyond its results: it is never removed, and keeps its place among such ops.
"""
    )


def test_every_own_op_is_documented() -> None:
    page = ops_page()
    ops = [d for d in own_ops() if d.kernel.__module__.startswith("graphft.ops.")]
    assert {"send", "recv", "etcd_get_chunk", "listen_and_serv", "sgd", "adam"} <= {d.name for d in ops}
    for definition in ops:
        assert f"### `{definition.name}`" in page
        assert definition.doc, f"{definition.name} has no docstring"
    assert "doc_example" not in page, "an op of a test is none of graphft's"


def test_the_page_is_up_to_date() -> None:
    assert ops_page() == PAGE.read_text(), "make docs"
