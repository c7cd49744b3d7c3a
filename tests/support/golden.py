"""Goldens: whole texts, kept in tests/golden/. `make accept` rewrites them; the diff is the review."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def difference(old: str, new: str, context: int = 0) -> str:
    """Returns the lines of `new` that `old` has not, and those that it lost, as a unified diff without its heading."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=context, lineterm="")
    return "\n".join(list(lines)[2:])


def assert_golden(text: str, name: str) -> None:
    """Asserts that `text` is that of tests/golden/<name>.txt; with GRAPHFT_ACCEPT=1 writes it there instead."""
    path = GOLDEN / f"{name}.txt"
    text = text.rstrip("\n") + "\n"
    if os.environ.get("GRAPHFT_ACCEPT") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != known:
        diff = "\n".join(
            difflib.unified_diff(known.splitlines(), text.splitlines(), f"golden/{path.name}", "got", lineterm="")
        )
        raise AssertionError(f"{path.name} differs; if the new text is right, run `make accept`:\n{diff}")
