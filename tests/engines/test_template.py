"""Templates that are filled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.engines.template import fill

TEMPLATE = """\
# {{name}} is filled in
args: [{a: {{name}}}]  #? some
list:
  {{lines}}
---
#? other
second: {{name}}
---
third: ${not_ours} \\  #? some
  {{none}}
"""


def test_what_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text(TEMPLATE)
    values = {"name": "x", "some": 1, "lines": "- 1\n- 2", "other": "", "none": ""}
    first = "# x is filled in\nargs: [{a: x}]\nlist:\n  - 1\n  - 2\n"
    assert fill(file, values) == f"{first}---\nthird: ${{not_ours}} \\\n"
    assert fill(file, {**values, "other": "y"}).split("---\n")[1] == "second: x\n"
    assert "args" not in fill(file, {**values, "some": 0})
    with pytest.raises(KeyError):
        fill(file, {})
