"""Files that other processes read while a test writes them."""

from __future__ import annotations

from pathlib import Path


def put(file: Path, text: str) -> None:
    """`file` has `text` from one moment to the next: who reads it finds it whole, never an empty one."""
    scratch = file.with_name(f"{file.name}.new")
    scratch.write_text(text)
    scratch.replace(file)
