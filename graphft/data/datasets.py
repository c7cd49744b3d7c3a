"""Describes a map-style torch Dataset: by a reference to the function that makes it, which other processes can call,
and by some of its items: their types, whether they draw random numbers, and a digest."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from graphft.data.randomness import CONSTRUCTION_SEED, own_generators, seed_generators, seeded, states
from graphft.data.spec import ChunkInfo, DataSpec, check_columns, digest, split
from graphft.errors import GraphftError, UsageError, describe, shown_plainly
from graphft.ir import Type

log = logging.getLogger("graphft")

DEFAULT_COLUMNS = ("x", "y")
"""The names of a dataset's parts where none are given."""
SEED = 1
_RECORD = "record "
SHOWN = 4
SAMPLED = 5
"""Evenly spaced records that are read, the first and the last among them."""


@shown_plainly
def dataset(
    make: str | Callable[..., Any],
    args: Mapping[str, Any] | None = None,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    chunk_size: int = 4096,
    random: bool = False,
) -> DataSpec:
    """Describes a map-style torch Dataset: what `make(**args)` returns, with `__len__` and `__getitem__`.

    `make` is `"module:function"`, `"path/to/file.py:function"`, or a function or class at the top level of a module
    or script; it is called again wherever the data is read (a script is then loaded as a module, so what must run
    only once belongs under `if __name__ == "__main__":`). `args` must be JSON-serialisable. Items are tuples, whose
    parts are named by `columns`, or dicts with the `columns` among their keys; `default_collate` makes them batches.

    A dataset that draws random numbers (augmentation) is `random`: its batches are seeded, and not made ahead of use.
    This is found out by reading some items, or later. Raises GraphftError for a dataset whose items differ when they
    are read again.
    """
    reference = Reference.of(make, {} if args is None else args)
    names = check_columns(columns)
    with _as_in_roles():
        made = reference.make()
        if (records := len(made)) == 0:
            raise GraphftError(
                f"the dataset of {reference} has no records", rule="short-data", help="give at least one"
            )
        types, draws, items = _inspect(reference, made, names)
    chunks = tuple(ChunkInfo(i, n, start) for i, (start, n) in enumerate(split(records, chunk_size)))
    fingerprint = {
        "code": reference.code_digest(),
        "args": digest(json.dumps(reference.args, sort_keys=True)),
        "records": str(records),
        **items,
    }
    source = {**asdict(reference), "random": random or draws, "fingerprint": fingerprint}
    return DataSpec("dataset", types, chunks, source)


def _inspect(reference: Reference, made: Any, columns: Sequence[str]) -> tuple[dict[str, Type], bool, dict[str, str]]:
    """Reads some of the dataset's items, twice each, with the same seeds. Returns a batch's types, True if random
    numbers were drawn, and digests of the items by name. Raises GraphftError if they differ, or most cannot be read."""
    own, types, digests, draws = own_generators(made), dict[str, Type](), dict[str, str](), False
    sampled = list(dict.fromkeys(round(i * (len(made) - 1) / (SAMPLED - 1)) for i in range(SAMPLED)))
    unreadable, failed = [], None
    for index in sampled:
        try:
            (one, drew), (two, _) = (_read(made, index, columns, own) for _ in range(2))
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) or (isinstance(e, GraphftError) and not types):
                raise
            failed = e
            unreadable.append(index)
            continue  # a damaged record is its chunk's matter, when it is read
        draws |= drew
        found = {name: _type(name, value) for name, value in one.items()}
        digests[f"{_RECORD}{index}"] = _digest(one)
        types = types or found
        where = f"record {index} of the dataset of {reference}"
        if found != types:
            help = "give all items one shape and dtype, in __getitem__: pad what is shorter (there is no collate_fn)"
            text = f"{where} has {_listed(found)}, and those before {_listed(types)}"
            raise UsageError(text, rule="dataset", help=help)
        if changing := [name for name in one if _digest({name: one[name]}) != _digest({name: two[name]})]:
            text = f"{where} is another one when it is read again, with the same seeds: {', '.join(changing)} differs"
            help = "make what is random from the item's index, or by a generator that is global or in its attributes"
            raise GraphftError(text, rule="dataset-changes", help=help)
    text = f"{len(unreadable)} of {len(sampled)} records of {reference} cannot be read: {unreadable} of {len(made)}"
    if isinstance(failed, OSError) or 2 * len(unreadable) > len(sampled):
        help = "does its __len__ fit its records? items must be what torch's default_collate takes"
        raise UsageError(f"{text}: {describe(failed or OSError())}", rule="dataset", help=help) from failed
    if unreadable:
        log.warning("%s; such records are discarded", text)
    return types, draws, digests


def difference(reference: Reference, made: Any, spec: DataSpec) -> str:
    """Returns a warning if a record is another one here than when the data was described; "" if none is.

    No error: the processes of a job are compared with each other (`roles/trainer/step_check.py`), and the script's may
    differ from all of them, as by its PYTHONHASHSEED."""
    own = own_generators(made)
    for name, known in spec.fingerprint().items():
        if name.startswith(_RECORD):
            try:
                found, _ = _read(made, int(name.removeprefix(_RECORD)), tuple(spec.columns), own)
            except (Exception, SystemExit) as error:  # its chunk's matter, when it is read
                log.info("%s is not compared: %s", name, describe(error))
                continue
            if _digest(found) != known:
                shown = ", ".join(f"{column} {value.flatten()[:SHOWN].tolist()}" for column, value in found.items())
                return (
                    f"{name} of the dataset of {reference} is ANOTHER one in this process than in the script, here it "
                    f"begins {shown}: a Dataset is made anew in each process, which knows nothing of variables that "
                    "the script sets after the import, of sys.argv and of its folder; give all as args="
                )
    return ""


@contextlib.contextmanager
def _as_in_roles() -> Iterator[None]:
    """Has torch compute with one thread, as roles do: sums, and so records, have other bits with more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _read(made: Any, index: int, columns: Sequence[str], own: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Returns (a batch of one record, True if numbers were drawn for it from the global generators)."""
    from torch.utils.data import default_collate

    seed_generators(own, SEED)
    with seeded(SEED):
        before = states()
        batch = default_collate([named(made[index], columns)])
        return batch, states() != before


def _digest(batch: Mapping[str, Any]) -> str:
    """Returns the digest of dtype, shape and bits of a batch of one record, by column."""
    import torch

    parts: list[Any] = []
    for name, value in sorted(batch.items()):
        flat = value.detach().cpu().contiguous().reshape(-1)
        parts += [f"{name} {value.dtype}{list(value.shape)}\n", flat.view(torch.uint8).numpy()]
    return digest(*parts)


def _type(column: str, value: Any) -> Type:
    import torch

    if not isinstance(value, torch.Tensor):
        text = f"column {column} of the dataset is no tensor but {type(value).__name__}"
        raise GraphftError(text, rule="columns", help="encode it as numbers")
    return Type(str(value.dtype).removeprefix("torch."), ("batch", *value.shape[1:]))


def _listed(types: Mapping[str, Type]) -> str:
    return ", ".join(f"column {name} as {type}" for name, type in types.items())


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
            sys.path.insert(0, self.path)  # as where the script runs
        with _user_code(f"importing {self}", "give module:function or file.py:function, of one at the top level"):
            found: Any = _load(self.file) if self.file else importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        if not callable(found):
            raise _refused(f"{self} is no function", "name the function (or class) that returns the dataset")
        return found

    def make(self) -> Any:
        """Makes the dataset. Raises UsageError when it is not map-style, or the function fails."""
        function = self.resolve()
        with _user_code(f"{self} in {os.getcwd()}", f"it is called with {self.args or 'no arguments'}", "dataset"):
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
        raise _refused(f"{text!r} is no reference to a function", "write module:function or path/to/file.py:function")
    if where.endswith(".py"):
        file = os.path.abspath(os.path.expanduser(where))
        return Reference("", file, os.path.dirname(file), name, args)
    return Reference(where, "", os.getcwd(), name, args)


def _from_object(make: Callable[..., Any], args: dict[str, Any]) -> Reference:
    kind = make.__name__ if isinstance(make, type) else type(make).__name__
    name, module = getattr(make, "__qualname__", "<"), sys.modules.get(getattr(make, "__module__", ""))
    if kind in _TAKEN_AS or (not isinstance(make, type) and hasattr(make, "__getitem__")):
        help = f"give the class, and its arguments by name: graphft.dataset({kind}, {{...}})"
        raise _refused(f"a {kind} cannot be made again by another process", _TAKEN_AS.get(kind, help))
    file = getattr(module, "__file__", None)
    if "<" in name or module is None or file is None:
        help = "define it at the top level of a .py file: no lambda, no inner function, no cell of a notebook"
        raise _refused(f"{make!r} cannot be found again by another process", help)
    file = os.path.abspath(file)
    if module.__name__ == "__main__" and not getattr(module, "__package__", None):
        file = os.path.realpath(file)  # beside which Python looks for modules
        return Reference("", file, os.path.dirname(file), name, args)
    spec_name = module.__spec__.name if module.__spec__ is not None else module.__name__
    up = spec_name.count(".") + (Path(file).name == "__init__.py")
    return Reference(spec_name, "", str(Path(file).parents[up]), name, args)


_TAKEN_AS = {
    "DataLoader": "give its Dataset's class, and do in its __getitem__ what a collate_fn does",
    "TensorDataset": "give its tensors to graphft.arrays(x=..., y=...)",
}


def _refused(text: str, help: str) -> UsageError:
    return UsageError(text, rule="dataset-reference", help=help)


def _load(file: str) -> ModuleType:
    """Returns the module that a file holds, loaded once, and not as `__main__`."""
    name = f"_graphft_{Path(file).stem.replace('-', '_')}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loading = _loading.set(file)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _loading.reset(loading)
    return module


_loading: contextvars.ContextVar[str] = contextvars.ContextVar("loading", default="")


def being_imported() -> str:
    """Returns the script whose top level calls this, if it runs because it is imported for a dataset; else ""."""
    return _loading.get()


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
