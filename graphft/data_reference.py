"""A reference to the function that makes a dataset; and the parts of a dataset's items."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graphft.data_seeding import CONSTRUCTION_SEED, seeded
from graphft.errors import GraphftError, UsageError, describe

DEFAULT_COLUMNS = ("x", "y")
"""Of a dataset that is described without columns."""
_BY_DEFAULT = '; columns is ("x", "y") by default'
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
        """Checks that the reference can be followed, and returns it."""
        if not isinstance(args, Mapping):
            raise UsageError(
                f"the dataset's args is a {type(args).__name__}; give a dict of keyword arguments",
                rule="dataset-args",
                help=f'write {{"name": {args!r}}}, with the parameter\'s name',
            )
        try:
            plain: dict[str, Any] = json.loads(json.dumps(dict(args), allow_nan=False))
        except (TypeError, ValueError) as e:
            raise GraphftError(
                f"the dataset's args are not JSON-serialisable: {e}",
                rule="dataset-args",
                help="give numbers, strings, lists and dicts; open files inside the function",
            ) from e
        reference = _from_text(make, plain) if isinstance(make, str) else _from_object(make, plain)
        reference.resolve()
        return reference

    def to_json(self) -> dict[str, Any]:
        return {"module": self.module, "file": self.file, "path": self.path, "name": self.name, "args": self.args}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Reference:
        return Reference(data["module"], data["file"], data["path"], data["name"], data["args"])

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"

    def resolve(self) -> Callable[..., Any]:
        """The function; its module is loaded with seeded generators. Raises GraphftError when it is not there."""
        if self.path and self.path not in sys.path:
            sys.path.append(self.path)
        try:
            with seeded(CONSTRUCTION_SEED):
                found: Any = _load(self.file) if self.file else importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except KeyboardInterrupt:  # a launch's is both
            raise
        except SystemExit as e:
            raise UsageError(
                f"{self.file or self.module} ended the process while it was imported ({describe(e)})",
                rule="dataset-reference",
                help="end scripts behind `if __name__ == '__main__':` only",
            ) from e
        except (ImportError, OSError, AttributeError) as e:
            raise UsageError(
                f"no dataset at {self}: {e}",
                rule="dataset-reference",
                help="give module:function or file.py:function, of a function at the top level",
            ) from e
        if not callable(found):
            raise UsageError(
                f"{self} is no function",
                rule="dataset-reference",
                help="name the function (or class) that returns the dataset, not the dataset",
            )
        return found

    def make(self) -> Any:
        """The dataset, made with seeded generators: numbers that its construction draws are the same everywhere.

        Raises GraphftError when it is not map-style, or the function fails.
        """
        function = self.resolve()
        try:
            with seeded(CONSTRUCTION_SEED):
                made = function(**self.args)
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # SystemExit, too: user code must not end a process as if it were done
            raise UsageError(
                f"{self} failed: {describe(e)}", rule="dataset", help=f"it is called with {self.args or 'no arguments'}"
            ) from e
        if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            raise UsageError(
                f"{self} returned a {type(made).__name__}, which is no map-style dataset",
                rule="dataset",
                help="return an object with __len__ and __getitem__",
            )
        return made


def _from_text(text: str, args: dict[str, Any]) -> Reference:
    where, colon, name = text.rpartition(":")
    if not colon or not name:
        raise UsageError(
            f"{text!r} is no reference to a function",
            rule="dataset-reference",
            help="write module:function or path/to/file.py:function",
        )
    if where.endswith(".py"):
        file = os.path.abspath(os.path.expanduser(where))
        return Reference("", file, os.path.dirname(file), name, args)
    return Reference(where, "", os.getcwd(), name, args)


def _from_object(make: Callable[..., Any], args: dict[str, Any]) -> Reference:
    if type(make).__name__ == "DataLoader" or (isinstance(make, type) and make.__name__ == "DataLoader"):
        raise UsageError(
            "a DataLoader is no dataset: chunks, batches and their order are the job's",
            rule="dataset-reference",
            help="give its Dataset's class: graphft.dataset(MyDataset, {...}); what a collate_fn does belongs into its "
            "__getitem__ (pad to one length there)",
        )
    if not isinstance(make, type) and hasattr(make, "__getitem__") and hasattr(make, "__len__"):
        kind = type(make).__name__
        raise UsageError(
            f"a {kind} that is made already cannot be made again by another process",
            rule="dataset-reference",
            help=f"give the class, and its arguments by name: graphft.dataset({kind}, {{...}})",
        )
    name, module = getattr(make, "__qualname__", "<"), sys.modules.get(getattr(make, "__module__", ""))
    file = getattr(module, "__file__", None)
    if "<" in name or module is None or file is None:
        raise UsageError(
            f"{make!r} cannot be found again by another process",
            rule="dataset-reference",
            help="define it at the top level of a module or script: no lambda, no inner function, no cell of a "
            "notebook (write the class into a .py file, and import it)",
        )
    file = os.path.abspath(file)
    if module.__name__ == "__main__" and not getattr(module, "__package__", None):
        return Reference("", file, os.path.dirname(file), name, args)
    spec_name = module.__spec__.name if module.__spec__ is not None else module.__name__
    up = spec_name.count(".") + (Path(file).name == "__init__.py")
    return Reference(spec_name, "", str(Path(file).parents[up]), name, args)


def _load(file: str) -> ModuleType:
    """The module that a file holds, loaded once, and not as `__main__`."""
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
    """The script whose top level calls this, if it runs because it is imported for a dataset; "" else."""
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name == "<module>" and str(frame.f_globals.get("__name__")).startswith(_PREFIX):
            return str(frame.f_globals["__file__"])
        frame = frame.f_back
    return ""


def named(item: Any, columns: Sequence[str]) -> dict[str, Any]:
    """An item's (or a collated batch's) parts by column. Raises GraphftError when they do not fit `columns`."""
    if isinstance(item, Mapping):
        missing = [c for c in columns if c not in item]
        if missing:
            keys = tuple(map(str, item))
            raise GraphftError(
                f"the dataset's items have no {', '.join(missing)}: columns is {_tuple(columns)}, their keys are "
                f"{', '.join(keys)}",
                rule="columns",
                help=f"give dataset(..., columns={_tuple(keys)}), or those of them that the program has as inputs"
                + _BY_DEFAULT * (tuple(columns) == DEFAULT_COLUMNS),
            )
        return {c: item[c] for c in columns}
    parts = item if isinstance(item, (tuple, list)) else (item,)
    if len(parts) != len(columns):
        raise GraphftError(
            f"the dataset's items have {len(parts)} parts, but {len(columns)} columns are named: {', '.join(columns)}",
            rule="columns",
            help="name each part of an item: dataset(..., columns=(...))"
            + _BY_DEFAULT * (tuple(columns) == DEFAULT_COLUMNS),
        )
    return dict(zip(columns, parts, strict=True))


def _tuple(names: Sequence[str]) -> str:
    listed = ", ".join(f'"{name}"' for name in names)
    return f"({listed}{',' * (len(names) == 1)})"
