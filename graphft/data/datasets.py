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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from graphft.data.randomness import CONSTRUCTION_SEED, kept, own_generators, seed_generators, seeded, states
from graphft.data.spec import ChunkInfo, DataSpec, check_columns, digest, split
from graphft.data.urls import CHANGED
from graphft.errors import GraphftError, UsageError, describe, shown_plainly
from graphft.ir import Type

log = logging.getLogger("graphft")

DEFAULT_COLUMNS = ("x", "y")
"""The names of a dataset's parts where none are given."""
SEED = 1
SAMPLED = 5
"""Evenly spaced records that are read, the first and the last among them."""
MADE_ANEW = (
    "a Dataset is made anew in each process: seed what its module draws, and give as args= what the script sets after "
    "the import or below its main guard, the environment, the order of a set"
)
KEPT = 256
"""About so many evenly spaced numbers of each of their columns are kept: they show what differs, and how much."""


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
    only once belongs under `if __name__ == "__main__":`), and what it makes there must have the records that it has
    here. `args` must be JSON-serialisable. Items are tuples, whose parts are named by `columns`, or dicts with the
    `columns` among their keys; `default_collate` makes them batches.

    A dataset that draws random numbers (augmentation) is `random`: its batches are seeded, and not made ahead of use.
    This is found out by reading some items, or later. Raises GraphftError for a dataset whose items differ when they
    are read again.
    """
    reference = Reference.of(make, {} if args is None else args)
    names = check_columns(columns)
    with torch_threads(1):
        made = reference.make(None if isinstance(make, str) else make)
        if (records := len(made)) == 0:
            raise GraphftError(
                f"the dataset of {reference} has no records", rule="short-data", help="give at least one"
            )
        with kept(own_generators(made)):  # some may be the script's
            types, draws, samples = _inspect(reference, made, names)
    chunks = tuple(ChunkInfo(i, n, start) for i, (start, n) in enumerate(split(records, chunk_size)))
    fingerprint = {
        "code": reference.code_digest(),
        "args": digest(json.dumps(reference.args, sort_keys=True)),
        "records": str(records),
        **{f"record {i}": digest(*(kept[0] for kept in columns.values())) for i, columns in samples.items()},
    }
    found = {"fingerprint": fingerprint, "samples": samples, "folder": os.getcwd(), "argv": [*sys.argv]}
    return DataSpec("dataset", types, chunks, {**asdict(reference), "random": random or draws, **found})


Samples = dict[str, dict[str, list[str]]]  # by record and column: the column's digest, and some of its numbers


def _inspect(reference: Reference, made: Any, columns: Sequence[str]) -> tuple[dict[str, Type], bool, Samples]:
    """Reads some of the dataset's items, twice each, with the same seeds. Returns a batch's types, True if random
    numbers were drawn, and the items. Raises GraphftError if they differ, or most cannot be read."""
    own, types, samples, draws = own_generators(made), dict[str, Type](), Samples(), False
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
        samples[str(index)] = {name: [_digest(value), *_numbers(value)] for name, value in sorted(one.items())}
        types = types or found
        where = f"record {index} of the dataset of {reference}"
        if found != types:
            help = "give all items one shape and dtype, in __getitem__: pad what is shorter (there is no collate_fn)"
            text = f"{where} has {_listed(found)}, and those before {_listed(types)}"
            raise UsageError(text, rule="dataset", help=help)
        if changing := [name for name in one if _digest(one[name]) != _digest(two[name])]:
            text = f"{where} is another one when it is read again, with the same seeds: {', '.join(changing)} differs"
            help = "make what is random from the item's index, or by a generator that is global or in its attributes"
            raise GraphftError(text, rule="dataset-changes", help=help)
    text = f"{len(unreadable)} of {len(sampled)} records of {reference} cannot be read: {unreadable} of {len(made)}"
    if isinstance(failed, OSError) or 2 * len(unreadable) > len(sampled):
        help = "does its __len__ fit its records? items must be what torch's default_collate takes"
        raise UsageError(f"{text}: {describe(failed or OSError())}", rule="dataset", help=help) from failed
    if unreadable:
        log.warning("%s; such records are discarded", text)
    return types, draws, samples


def compare(reference: Reference, made: Any, spec: DataSpec) -> str:
    """Compares the records that were read when the data was described. Returns a warning if one differs no more than
    another machine may round, else "". Raises UsageError[data-changed] for another record."""
    own, warning = own_generators(made), ""
    for record, columns in spec.source["samples"].items():
        try:
            found, _ = _read(made, int(record), spec.columns, own)
            digests = {column: _digest(found[column]) for column in columns}
        except (Exception, SystemExit) as error:  # its chunk's matter, when it is read
            log.info("record %s is not compared: %s", record, describe(error))
            continue
        for column, (known, *before) in columns.items():
            if digests[column] == known:
                continue
            value, numbers = found[column], _numbers(found[column])
            pairs = ((a, b) for a, b in zip(before, numbers, strict=False) if a != b)
            was, here = next(pairs, (f"digest {known}", f"digest {digests[column]}"))
            warning = f"column {column} of record {record} of the dataset of {reference} has {here} in this process, "
            warning += f"and had {was} when the data was described"
            if not (value.is_floating_point() or value.is_complex()) or not _close(before, numbers, value.dtype):
                raise UsageError(warning, rule=CHANGED, help=MADE_ANEW)
    return warning and f"{warning}, as rounding may do"


def _close(before: Sequence[str], numbers: Sequence[str], dtype: Any) -> bool:
    """True if numbers of this dtype are the same in about half of their digits."""
    import torch

    one, two = (torch.tensor([complex(n) for n in of], dtype=torch.complex128) for of in (before, numbers))
    eps, size = torch.finfo(dtype).eps, float(one.abs().nan_to_num(0, 0, 0).norm())
    return len(one) == len(two) and torch.allclose(one, two, eps**0.5, eps * size, equal_nan=True)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Has torch compute with `count` threads meanwhile: the bits of sums, and so of records, depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(count)
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


def _digest(value: Any) -> str:
    """Returns the digest of dtype, shape and bits of a column of a batch."""
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    return digest(f"{value.dtype}{list(value.shape)}\n", flat.view(torch.uint8).numpy())


def _numbers(value: Any) -> list[str]:
    flat = value.detach().cpu().flatten()
    return [str(number) for number in flat[:: max(1, len(flat) // KEPT)].tolist()]


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
        help = "name one at a module's top level, where what is to run once is below `if __name__ == '__main__':`"
        with _user_code(f"importing {self}", help):
            found: Any = _load(self.file) if self.file else importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        if not callable(found):
            raise _refused(f"{self} is no function", "name the function (or class) that returns the dataset")
        return found

    def make(self, function: Callable[..., Any] | None = None) -> Any:
        """Makes the dataset, with the script's own `function` where that is at hand. Raises UsageError when it is not
        map-style, or the function fails."""
        function = self.resolve() if function is None else function
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
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)  # behind the others: what is named like one of theirs is not meant
    reference = Reference(where, "", "", name, args)
    reference.resolve()
    found = getattr(sys.modules[where], "__file__", None)
    return replace(reference, path=_home(where, found)) if found else reference


def _home(name: str, file: str) -> str:
    """Returns the folder in which Python finds the module `name` as this file."""
    return str(Path(file).absolute().parents[name.count(".") + (Path(file).name == "__init__.py")])


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
    if module.__name__ == "__main__" and not getattr(module, "__package__", None):
        file = os.path.realpath(file)  # beside which Python looks for modules
        return Reference("", file, os.path.dirname(file), name, args)
    spec_name = module.__spec__.name if module.__spec__ is not None else module.__name__
    return Reference(spec_name, "", _home(spec_name, file), name, args)


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
