"""What some items of a dataset tell about its batches: types, and whether they depend on anything but their index."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from graphft.data_generators import own_generators, seed_generators
from graphft.data_reference import Reference, named
from graphft.data_seeding import seeded, states
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Type

PROBE_SEED = 1
CHOSEN = 2
"""Records that are read besides the first, the middle and the last one."""


def inspect_dataset(reference: Reference, columns: Sequence[str]) -> tuple[int, dict[str, Type], bool]:
    """(records, types of a batch, whether reading items draws random numbers), from some of the dataset's items.

    Each is read twice with the same seeds. Raises GraphftError if the first cannot be read, or if one differs then.
    """
    made = reference.make()
    records = len(made)
    if records == 0:
        raise GraphftError(f"the dataset of {reference} has no records", rule="short-data", help="give at least one")
    own = own_generators(made)
    try:
        batch, draws = _read(made, 0, columns, own)
    except (GraphftError, KeyboardInterrupt):
        raise
    except BaseException as e:
        raise UsageError(
            f"reading record 0 of the dataset of {reference} failed: {describe(e)}",
            rule="dataset",
            help="its items must be what torch's default_collate takes",
        ) from e
    types = {name: _type(reference, name, value) for name, value in batch.items()}
    for index in _chosen(records):
        try:
            (one, drew), (other, _) = (_read(made, index, columns, own) for _ in range(2))
        except KeyboardInterrupt:
            raise
        except BaseException:
            continue  # a damaged record is its chunk's matter, when it is read
        draws |= drew
        _compare(reference, index, one, other)
    return records, types, draws


def _chosen(records: int) -> list[int]:
    pick = random.Random(PROBE_SEED)
    return sorted({0, records // 2, records - 1, *(pick.randrange(records) for _ in range(CHOSEN))})


def _read(made: Any, index: int, columns: Sequence[str], own: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """(a batch of one record, whether numbers were drawn for it from the global generators)."""
    from torch.utils.data import default_collate

    seed_generators(own, PROBE_SEED)
    with seeded(PROBE_SEED):
        before = states()
        batch = default_collate([named(made[index], columns)])
        return batch, states() != before


def _type(reference: Reference, column: str, value: Any) -> Type:
    import torch

    if not isinstance(value, torch.Tensor):
        raise GraphftError(
            f"column {column} of the dataset of {reference} is no tensor but {type(value).__name__}",
            rule="columns",
            help="encode it as numbers",
        )
    return Type(str(value.dtype).removeprefix("torch."), ("batch", *value.shape[1:]))


def _compare(reference: Reference, index: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    different = [name for name in one if not _same_bits(one[name], other[name])]
    if different:
        raise GraphftError(
            f"record {index} of the dataset of {reference} is another one when it is read again: column "
            f"{', '.join(different)} differs, with the same seeds",
            rule="dataset-changes",
            help="an item may depend on its index and on numbers from torch's, NumPy's and Python's global generators "
            "and those in the dataset's attributes, which are seeded per batch; not on the time, on what was read "
            "before, or on a generator that is kept elsewhere (in a closure, say): keep it in an attribute, or make "
            "one for each item, from its index",
        )


def _same_bits(one: Any, other: Any) -> bool:
    import torch

    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
