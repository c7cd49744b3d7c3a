"""What some items of a dataset tell of it: types, whether they depend on anything but their index, and digests."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphft.data_fingerprint import digest
from graphft.data_generators import own_generators, seed_generators
from graphft.data_reference import Reference, named
from graphft.data_seeding import seeded, states
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Type

log = logging.getLogger(__name__)

PROBE_SEED = 1
CHOSEN = 2
"""Records that are read besides the first, the middle and the last one."""
SPACED = 13
"""Evenly spaced records, the first and the last among them, of which a digest is made, with those above: up to 16."""
DIGEST_SECONDS = 2.0
"""Records that are read for their digests only are given up after so long: a slow dataset is not described much more
slowly for them."""
UNREADABLE = "unreadable"
"""In place of the digest of a record at which the dataset raises an exception: once mended it is another one."""


class Inspected(NamedTuple):
    """What is known of a dataset. `types`: of a batch, by column; `draws`: reading items draws random numbers;
    `digests`: of some records' contents, by their numbers, read with the same seeds if it draws."""

    records: int
    types: dict[str, Type]
    draws: bool
    digests: dict[int, str]


def inspect_dataset(reference: Reference, columns: Sequence[str], random: bool = False) -> Inspected:
    """Reads some of the dataset's items.

    Up to five are read twice with the same seeds: whether the dataset draws is told by these alone. Up to eleven more
    are read for their digests: once, if nothing is drawn for them and the dataset is not said to be `random`. Raises
    GraphftError if none of the five can be read, or if one differs then.
    """
    made = reference.make()
    records = len(made)
    if records == 0:
        raise GraphftError(f"the dataset of {reference} has no records", rule="short-data", help="give at least one")
    own = own_generators(made)
    types: dict[str, Type] = {}
    draws, failed = False, None
    digests: dict[int, str] = {}
    others: dict[int, str] = {}
    for index in _chosen(records):
        try:
            (one, drew), (other, _) = (_read(made, index, columns, own) for _ in range(2))
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) or (isinstance(e, GraphftError) and not types):
                raise
            failed = failed or e
            digests |= _damaged(made, index, columns, own, e)
            continue  # a damaged record is its chunk's matter, when it is read
        types = types or {name: _type(reference, name, value) for name, value in one.items()}
        draws |= drew
        _compare(reference, index, one, other)
        digests[index] = _digest(one)
        others |= _another_shape(reference, index, types, one)
    if failed is not None and not types:
        raise UsageError(
            f"reading record 0 of the dataset of {reference} failed: {describe(failed)}",
            rule="dataset",
            help="its items must be what torch's default_collate takes",
        ) from failed
    _check_shapes(reference, others)
    spaced = [index for index in _spaced(records) if index not in _chosen(records)]
    digests |= _read_digests(reference, made, spaced, columns, own, draws or random)
    _tell_unreadable(reference, records, digests)
    return Inspected(records, types, draws, digests)


def _tell_unreadable(reference: Reference, records: int, digests: Mapping[int, str]) -> None:
    """A warning if a record that was looked at cannot be read. Raises UsageError if most of them cannot."""
    bad = sorted(index for index, found in digests.items() if found == UNREADABLE)
    if not bad:
        return
    text = (
        f"{len(bad)} of the {len(digests)} records of {reference} that were looked at cannot be read, the first is "
        f"{bad[0]} of {records}"
    )
    if 2 * len(bad) > len(digests):
        raise UsageError(
            text, rule="dataset", help="does its __len__ fit its records? reading one must not need the others"
        )
    log.warning("%s; such records are left out, up to max_discarded of all", text)


def _read_digests(
    reference: Reference, made: Any, indices: Sequence[int], columns: Sequence[str], own: Sequence[Any], draws: bool
) -> dict[int, str]:
    """Digests of the records that can be read in time. `draws`: the dataset draws, perhaps from what nobody can seed
    for these: a record that is another one when it is read again is told, and has none, for each launch would begin a
    new run."""
    digests: dict[int, str] = {}
    others: list[int] = []
    end = time.monotonic() + DIGEST_SECONDS
    for index in indices:
        if time.monotonic() > end:
            break
        try:
            batch, drew = _read(made, index, columns, own)
            again = _read(made, index, columns, own)[0] if draws or drew else batch
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            digests |= _damaged(made, index, columns, own, e)
            continue
        if (found := _digest(batch)) == _digest(again):
            digests[index] = found
        else:
            others.append(index)
    if others:
        log.warning(
            "record %s of the dataset of %s is another one when it is read again, with the same seeds: it depends on "
            "the time, or on a generator in no attribute of the dataset; no restart gives the same bits then",
            ", ".join(map(str, others)),
            reference,
        )
    return digests


def _damaged(made: Any, index: int, columns: Sequence[str], own: Sequence[Any], error: BaseException) -> dict[int, str]:
    """What stands for the digest of a record that cannot be read; nothing if its storage may have been away: not all
    that reads from one raises an OSError then, so it is read again."""
    if isinstance(error, OSError):
        return {}
    try:
        _read(made, index, columns, own)
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return {} if isinstance(e, OSError) else {index: UNREADABLE}
    return {}


def _digest(batch: Mapping[str, Any]) -> str:
    """Of dtype, shape and bits of a batch of one record, by column."""
    import torch

    parts: list[Any] = []
    for name, value in sorted(batch.items()):
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            parts += [f"{name} {value.dtype}{list(value.shape)}\n", flat.view(torch.uint8).numpy()]
        else:
            parts.append(f"{name} {type(value).__name__}\n")
    return digest(*parts)


def _spaced(records: int) -> list[int]:
    return sorted({round(i * (records - 1) / (SPACED - 1)) for i in range(SPACED)})


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


def _another_shape(
    reference: Reference, index: int, types: Mapping[str, Type], one: Mapping[str, Any]
) -> dict[int, str]:
    """Of a record whose columns are not those of the first one: how they are."""
    for name, type in types.items():
        if (found := _type(reference, name, one[name])) != type:
            return {index: f"column {name} as {found}, and another one {type}"}
    return {}


def _check_shapes(reference: Reference, others: Mapping[int, str]) -> None:
    """Raises UsageError where records differ in shape: one may be damaged, and is left out then."""
    if len(others) > 1:
        index, how = min(others.items())
        raise UsageError(
            f"record {index} of the dataset of {reference} has {how}: no batch can be made of them",
            rule="dataset",
            help="give all items one shape and dtype, in __getitem__: pad what is shorter (there is no collate_fn)",
        )


def _compare(reference: Reference, index: int, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    different = [name for name in one if _digest({name: one[name]}) != _digest({name: other[name]})]
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
