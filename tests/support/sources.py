"""The project's Python files, and what they hold: each is read once in a process, and not before a test asks."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("graphft", "ops", "transpiler", "runtime")


def sources(*folders: str) -> list[Path]:
    """Python files of the folders, the symbolic links graphft/ops etc. not followed."""
    return [path for folder in folders for path in _below(folder)]


@cache
def _below(folder: str) -> tuple[Path, ...]:
    found = (Path(where, name) for where, _, names in os.walk(ROOT / folder) for name in names)
    return tuple(sorted(path for path in found if path.suffix == ".py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))
