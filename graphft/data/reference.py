"""Refers to the function that makes a dataset, so that other processes can call it; names the parts of its items."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graphft.data.fingerprint import digest
from graphft.data.randomness import CONSTRUCTION_SEED, seeded
from graphft.errors import GraphftError, UsageError, describe

DEFAULT_COLUMNS = ("x", "y")
"""Of a dataset that is described without columns."""
_PREFIX = "_graphft_"
"""Of the names of modules that are loaded from a file."""


@dataclass(frozen=True, slots=True)
class Reference:
    """`name` in the module `module`, or in the file `file` where that is not empty; called with `args`.

    `path` is the folder from which the module, or what the file imports, is found if Python's path lacks it.
    """

    module: str
    file: str
    path: str
    name: str
    args: dict[str, Any]

    @staticmethod
    def of(make: str | Callable[..., Any], args: Mapping[str, Any]) -> Reference:
        """Returns the reference. Raises GraphftError if it cannot be followed."""
        try:
            plain: dict[str, Any] = json.loads(json.dumps(dict(args), allow_nan=False))
        except (TypeError, ValueError) as e:
            help = "give a dict of keyword arguments, of numbers, strings, lists and dicts; open files inside the "
            help += "function, and give tensors to graphft.arrays(x=..., y=...)"
            raise UsageError(f"the dataset's args are not JSON by name: {e}", rule="dataset-args", help=help) from e
        reference = _from_text(make, plain) if isinstance(make, str) else _from_object(make, plain)
        reference.resolve()
        return reference

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Reference:
        return Reference(data["module"], data["file"], data["path"], data["name"], data["args"])

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"

    def code_digest(self) -> str:
        """Returns the digest of the source file that has the function (not of what that file imports)."""
        spec = None if self.file else importlib.util.find_spec(self.module)
        file = self.file or (spec.origin if spec is not None and spec.has_location and spec.origin is not None else "")
        return digest(Path(file).read_bytes() if file else self.module)

    def resolve(self) -> Callable[..., Any]:
        """Returns the function. Raises UsageError when it is not there."""
        if self.path and self.path not in sys.path:
            sys.path.append(self.path)
        with _user_code(
            f"importing {self}", "give module:function or file.py:function, of a function at the top level"
        ):
            found: Any = _load(self.file) if self.file else importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        if not callable(found):
            help = "name the function (or class) that returns the dataset, not the dataset"
            raise UsageError(f"{self} is no function", rule="dataset-reference", help=help)
        return found

    def make(self) -> Any:
        """Makes the dataset. Raises UsageError when it is not map-style, or the function fails."""
        function = self.resolve()
        with _user_code(str(self), f"it is called with {self.args or 'no arguments'}", "dataset"):
            made = function(**self.args)
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            text = f"{self} returned a {type(made).__name__}, which is no map-style dataset"
            raise UsageError(text, rule="dataset", help="return an object with __len__ and __getitem__")
        return made


@contextlib.contextmanager
def _user_code(what: str, help: str, rule: str = "dataset-reference") -> Iterator[None]:
    """Runs with seeded generators: numbers that are drawn are the same everywhere. Raises UsageError where it fails,
    also by SystemExit: user code must not end a process as if it were done."""
    try:
        with seeded(CONSTRUCTION_SEED):
            yield
    except (GraphftError, KeyboardInterrupt):  # a launch's is SystemExit, too
        raise
    except BaseException as e:
        raise UsageError(f"{what} failed: {describe(e)}", rule=rule, help=help) from e


def _from_text(text: str, args: dict[str, Any]) -> Reference:
    where, colon, name = text.rpartition(":")
    if not colon or not name:
        help = "write module:function or path/to/file.py:function"
        raise UsageError(f"{text!r} is no reference to a function", rule="dataset-reference", help=help)
    if where.endswith(".py"):
        file = os.path.abspath(os.path.expanduser(where))
        return Reference("", file, os.path.dirname(file), name, args)
    return Reference(where, "", os.getcwd(), name, args)


def _from_object(make: Callable[..., Any], args: dict[str, Any]) -> Reference:
    kind = make.__name__ if isinstance(make, type) else type(make).__name__
    name, module = getattr(make, "__qualname__", "<"), sys.modules.get(getattr(make, "__module__", ""))
    file = getattr(module, "__file__", None)
    what, help = "", f"give the class, and its arguments by name: graphft.dataset({kind}, {{...}})"
    if kind == "DataLoader":
        what = "a DataLoader is no dataset: chunks, batches and their order are the job's"
        help = "give its Dataset's class, and do in its __getitem__ what a collate_fn does"
    elif kind == "TensorDataset":
        what, help = "tensors lie in the memory of this process", "give them to graphft.arrays(x=..., y=...)"
    elif not isinstance(make, type) and hasattr(make, "__getitem__"):
        what = f"a {kind} that is made already cannot be made again by another process"
    elif "<" in name or module is None or file is None:
        what = f"{make!r} cannot be found again by another process"
        help = "define it at the top level of a .py file: no lambda, no inner function, no cell of a notebook"
    if what or module is None or file is None:
        raise UsageError(what, rule="dataset-reference", help=help)
    file = os.path.abspath(file)
    if module.__name__ == "__main__" and not getattr(module, "__package__", None):
        return Reference("", file, os.path.dirname(file), name, args)
    spec_name = module.__spec__.name if module.__spec__ is not None else module.__name__
    up = spec_name.count(".") + (Path(file).name == "__init__.py")
    return Reference(spec_name, "", str(Path(file).parents[up]), name, args)


def _load(file: str) -> ModuleType:
    """Returns the module that a file holds, loaded once, and not as `__main__`."""
    name = f"{_PREFIX}{Path(file).stem.replace('-', '_')}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def being_imported() -> str:
    """Returns the script whose top level calls this, if it runs because it is imported for a dataset; else ""."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "<module>" and str(frame.f_globals.get("__name__")).startswith(_PREFIX):
            return str(frame.f_globals["__file__"])
        frame = frame.f_back
    return ""


def named(item: Any, columns: Sequence[str]) -> dict[str, Any]:
    """Returns an item's parts by column. Raises GraphftError when they do not fit `columns`."""
    listed = ", ".join(columns)
    if isinstance(item, Mapping):
        if all(c in item for c in columns):
            return {c: item[c] for c in columns}
        what = f"the columns are {listed}, and the items of the dataset have the keys {', '.join(map(str, item))}"
        help = f"give dataset(..., columns={tuple(map(str, item))}), or those of them that are inputs of the program"
    else:
        parts = item if isinstance(item, tuple | list) else (item,)
        if len(parts) == len(columns):
            return dict(zip(columns, parts, strict=True))
        what = f"the columns are {listed}, and the items of the dataset have {len(parts)} parts"
        help = "name each part of an item: dataset(..., columns=(...))"
    raise GraphftError(what, rule="columns", help=help)
