"""Describes a map-style torch Dataset, by some of its items: types, whether it draws random numbers, and digests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphft.data.fingerprint import digest
from graphft.data.randomness import own_generators, seed_generators, seeded, states
from graphft.data.reference import DEFAULT_COLUMNS, Reference, named
from graphft.data.spec import ChunkInfo, DataSpec, check_columns, split
from graphft.errors import GraphftError, UsageError, describe, shown_plainly
from graphft.ir import Type

log = logging.getLogger("graphft")

SEED = 1
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

    A dataset that draws random numbers (augmentation) is `random`: its batches are then not made ahead of use, and
    seeded, so that every trainer that reads a batch gets the same one. This is found out by reading some items; one
    whose other items draw is found out when they are read. Raises GraphftError for a dataset whose items differ when
    they are read again.
    """
    reference = Reference.of(make, {} if args is None else args)
    names = check_columns(columns)
    made = reference.make()
    if (records := len(made)) == 0:
        raise GraphftError(f"the dataset of {reference} has no records", rule="short-data", help="give at least one")
    types, draws, items = _inspect(reference, made, names)
    chunks = tuple(ChunkInfo(i, n, start) for i, (start, n) in enumerate(split(records, chunk_size)))
    fingerprint = {
        "code": reference.code_digest(),
        "args": digest(json.dumps(reference.args, sort_keys=True)),
        "records": str(records),
        "items": items,
    }
    source = {**reference.to_json(), "random": random or draws, "fingerprint": fingerprint}
    return DataSpec("dataset", types, chunks, source)


def _inspect(reference: Reference, made: Any, columns: Sequence[str]) -> tuple[dict[str, Type], bool, str]:
    """Reads some of the dataset's items, twice each, with the same seeds. Returns a batch's types, True if random
    numbers were drawn, and a digest of the items.

    Raises GraphftError if they differ then, if most of them cannot be read, or if they differ in shape.
    """
    own, types, digests, draws = own_generators(made), dict[str, Type](), list[str](), False
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
        digests.append(f"{index} {_digest(one)}")
        types = types or found
        where = f"record {index} of the dataset of {reference}"
        if found != types:
            raise UsageError(
                f"{where} has {_listed(found)}, and those before {_listed(types)}",
                rule="dataset",
                help="give all items one shape and dtype, in __getitem__: pad what is shorter (there is no collate_fn)",
            )
        if changing := [name for name in one if _digest({name: one[name]}) != _digest({name: two[name]})]:
            raise GraphftError(
                f"{where} is another one when it is read again, with the same seeds: {', '.join(changing)} differs",
                rule="dataset-changes",
                help="an item may depend on its index, and on random generators of torch, NumPy and Python that are "
                "global or in the dataset's attributes, as these are seeded per batch; not on the time, on what was "
                "read before, or on a generator elsewhere (in a closure): make one for each item, from its index",
            )
    text = f"{len(unreadable)} of {len(sampled)} records of {reference} cannot be read: {unreadable} of {len(made)}"
    if isinstance(failed, OSError) or 2 * len(unreadable) > len(sampled):
        help = "does its __len__ fit its records? items must be what torch's default_collate takes"
        raise UsageError(f"{text}: {describe(failed or OSError())}", rule="dataset", help=help) from failed
    if unreadable:
        log.warning("%s; such records are discarded", text)
    return types, draws, digest(*digests)


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
