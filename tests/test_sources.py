"""Rules that the sources alone show: no hash(), no asserts for validation, no state in modules, no exits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.mutants import MUTANTS, problem
from tests.support.sources import FOLDERS, name_of, sources, tree


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in sources(*FOLDERS):
        found = (node for node in ast.walk(tree(path)) if isinstance(node, kind))
        yield from ((f"{name_of(path)}:{getattr(node, 'lineno', 0)}", node) for node in found)


@cache
def all_calls() -> list[tuple[str, str]]:
    """(place, what is called) of every call."""
    return [(place, ast.unparse(node.func)) for place, node in nodes(ast.Call) if isinstance(node, ast.Call)]


def calls(*names: str) -> list[str]:
    return [place for place, called in all_calls() if called in names]


def test_mutants_can_be_made() -> None:
    """Their texts follow the code, so that `python -m tests.mutants` tries all of them."""
    assert [text for mutant in MUTANTS if (text := problem(mutant))] == []


def test_nothing_is_placed_by_hash() -> None:
    """Python's `hash()` of a string differs from process to process."""
    assert not calls("hash", "object.__hash__")


def test_errors_are_told_apart_by_type_or_rule_never_by_their_text() -> None:
    """The text is for people, and may change."""
    found = []
    for place, node in nodes(ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        texts = {
            f"str({node.name})",
            f"repr({node.name})",
            *(f"{node.name}.{a}" for a in ("message", "help", "args", "details()", "msg", "strerror")),
        }
        for inner in ast.walk(node):
            decides = isinstance(inner, ast.Compare) or (
                isinstance(inner, ast.Call)
                and re.fullmatch(r".*\.(startswith|endswith|find|index|count)|re\.\w+", ast.unparse(inner.func))
            )
            if decides and node.name and any(text in ast.unparse(inner) for text in texts):
                found.append(f"{place}: {ast.unparse(inner)}")
    assert not found


def test_nothing_is_validated_by_assert() -> None:
    """`python -O` drops asserts. Those here only tell the type checker what is known."""
    wrong = []
    for place, node in nodes(ast.Assert):
        assert isinstance(node, ast.Assert)
        test = node.test
        known = (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)) or (
            isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"
        )
        if not known or node.msg is not None:
            wrong.append(f"{place}: {ast.unparse(node)}")
    assert not wrong


ENDS = {
    "graphft/__main__.py": "a command",
    "runtime/launcher/launch.py": "a script that is one role, or is only to save its job",
    "runtime/process/role_process.py": "its parent is dead",
    "runtime/roles/session.py": "its lease is lost, or it hangs",
    "runtime/engines/fork_server_process.py": "the process between two forks",
    "runtime/engines/remote_task.py": "a role's step, which ends as the role did",
}
"""Files that end the process, and why they may."""


def test_errors_are_raised_to_whoever_called() -> None:
    ending = calls("sys.exit", "os._exit", "exit", "quit", "SystemExit", "os.abort")
    assert {place.rsplit(":", 1)[0] for place in ending} == ENDS.keys()


REGISTRIES = {"graphft/ir/registry.py": {"_OPS"}, "graphft/ir/verify.py": {"RULES", "JOB_RULES"}}
"""They are filled when modules are imported, and do not change afterwards."""
OF_THE_PROCESS = {
    "runtime/execute/accelerator.py": {"_held"},
    "runtime/launcher/output.py": {"_outputs"},
    "runtime/process/interrupts.py": {"_held"},
    "runtime/process/folder_lock.py": {"_held"},
    "runtime/driver/running_job.py": {"_launches"},
}
"""A process has one of each: its main thread, in which all signals are handled; its table of descriptors; the folders
and accelerators that it holds; its streams."""
CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend"}
CHANGES |= {"insert", "pop", "popitem", "remove", "setdefault", "update"}


def changed_names(module: ast.Module) -> set[str]:
    """Names of a module that are changed by code in it."""
    globals_ = {
        t.id
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(t, ast.Name)
    }
    changed = {name for node in ast.walk(module) if isinstance(node, ast.Global) for name in node.names}
    for function in [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef)]:
        own = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(function):
            target: ast.AST | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                target = node.func.value
            elif isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
                target = node.value
            if isinstance(target, ast.Name) and target.id in globals_ - own:
                changed.add(target.id)
    return changed


def test_no_module_holds_state() -> None:
    changed = {name_of(path): found for path in sources(*FOLDERS) if (found := changed_names(tree(path)))}
    assert changed == REGISTRIES | OF_THE_PROCESS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = []\ndef f():\n    x.append(1)", {"x"}),
        ("x = {}\ndef f():\n    x['a'] = 1", {"x"}),
        ("x = 0\ndef f():\n    global x\n    x = 1", {"x"}),
        ("x = []\ndef f():\n    x = []\n    x.append(1)", set()),
        ("x = object()\ndef f():\n    x.y = 1", {"x"}),
        ("x = [1]\ndef f():\n    return x[0]", set()),
    ],
)
def test_changes_of_a_modules_names_are_seen(source: str, found: set[str]) -> None:
    assert changed_names(ast.parse(source)) == found
