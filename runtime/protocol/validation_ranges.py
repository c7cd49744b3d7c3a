"""Ranges of the held-out data that a validation consists of: their records, and the transactions that change them.

Below a prefix of the validation (`keys.ranges(step)`):

    range/<number>   how often it was claimed and has failed; once it is computed, what it came to: for good
    claim/<number>   who computes it, under that process's lease

A range is computed from a checkpoint, and does not change it: so whoever computes it comes to the same, and the first
who records it decides. Two that compute one range do no harm. The functions take records as they were read; what they
return holds only if these are still the same (`chunk_queue.Change`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from graphft.errors import plain_text
from graphft.runtime.protocol.chunk_queue import Change, Compare, Put, Record

WHY = 500
"""Characters of a reason."""
MOST_CLAIMS = 100
"""Of a range that nobody computes to its end: more, and it is what ends its processes."""


class RangeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Value of `range/<number>`. `sums`: of each result, over the records of the range, in the order of the program's
    results, as text that gives the same float64 (JSON has no NaN); none until it is computed."""

    claims: int = 0
    failures: int = 0
    why: str = ""
    """Of the failure that was the last."""
    samples: int = 0
    sums: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        return self.samples > 0


class RangeClaim(msgspec.Struct, frozen=True):
    """Value of `claim/<number>`. `attempt`: which one at the range; `batches`: so many are computed: a holder that gets
    on changes its claim."""

    trainer: str
    attempt: int
    batches: int = 0


def range_key(prefix: str, number: int) -> str:
    return f"{prefix}range/{number:08d}"


def claim_key(prefix: str, number: int) -> str:
    return f"{prefix}claim/{number:08d}"


def decode_range(record: Record | None) -> RangeRecord:
    return msgspec.json.decode(record.value, type=RangeRecord) if record is not None else RangeRecord()


def sums_as_text(sums: Iterable[float]) -> tuple[str, ...]:
    return tuple(repr(float(value)) for value in sums)


def expire(prefix: str, number: int, held: Record) -> Change:
    """Takes away a claim that is stale: a claim after it has a revision of its own."""
    key = claim_key(prefix, number)
    return Change("expired", f"range {number}", (_as_read(key, held),), (), (key,))


def claim(prefix: str, number: int, known: Record | None, trainer: str, max_failures: int) -> Change | str:
    """Claims a range that is not computed, and that nobody holds. `known`: its record. A text, where too many have
    tried: why the validation cannot be made."""
    record = decode_range(known)
    if record.failures >= max_failures or record.claims >= MOST_CLAIMS:
        last = f"; the last failure: {record.why}" if record.why else ""
        vanished = record.claims - record.failures
        others = f", and {vanished} vanished" if vanished else ""
        return f"{record.failures} of {record.claims} that tried have failed{others}{last}"
    return Change(
        "claimed",
        f"range {number}",
        (_as_read(range_key(prefix, number), known), _as_read(claim_key(prefix, number), None)),
        (
            Put(range_key(prefix, number), _encode(RangeRecord(record.claims + 1, record.failures, record.why))),
            Put(claim_key(prefix, number), _encode(RangeClaim(trainer, record.claims + 1)), leased=True),
        ),
    )


def renew(prefix: str, number: int, fence: int, mine: RangeClaim) -> Change:
    """The holder says that it gets on. `fence`: the revision of its claim."""
    key = claim_key(prefix, number)
    return Change("renewed", f"range {number}", (Compare(key, "create", fence),), (Put(key, _encode(mine), True),))


def complete(prefix: str, number: int, known: Record | None, samples: int, sums: Sequence[float]) -> Change | None:
    """Records what the range came to; None if somebody has."""
    record = decode_range(known)
    if record.done:
        return None
    done = RangeRecord(record.claims, record.failures, "", samples, sums_as_text(sums))
    key = range_key(prefix, number)
    return Change(
        "completed",
        f"range {number}",
        (_as_read(key, known),),
        (Put(key, _encode(done)),),
        (claim_key(prefix, number),),
    )


def release(prefix: str, number: int, known: Record | None, fence: int, why: str = "") -> Change | None:
    """Gives a claim back: its holder goes, or the range has failed, and `why`. None if it is computed by now."""
    record = decode_range(known)
    if record.done:
        return None
    back = RangeRecord(record.claims - (not why), record.failures + bool(why), plain_text(why, WHY) or record.why)
    return Change(
        "released",
        f"range {number}",
        (_as_read(range_key(prefix, number), known), Compare(claim_key(prefix, number), "create", fence)),
        (Put(range_key(prefix, number), _encode(back)),),
        (claim_key(prefix, number),),
    )


def undo(prefix: str, number: int, known: Record) -> Change:
    """What a range came to is not whole: it is computed again, which counts as a failure of it."""
    record = decode_range(known)
    key = range_key(prefix, number)
    again = RangeRecord(record.claims, record.failures + 1, "its entries were lost")
    return Change("released", f"range {number}", (_as_read(key, known),), (Put(key, _encode(again)),))


def totals(records: Mapping[int, RangeRecord], count: int) -> tuple[int, tuple[float, ...]] | None:
    """(samples, the mean of each result) over all ranges, added up in their order: the same bits whoever computed them,
    and when. None if some are not computed."""
    done = [records.get(number, RangeRecord()) for number in range(count)]
    if not all(record.done for record in done):
        return None
    samples = sum(record.samples for record in done)
    columns = zip(*(map(float, record.sums) for record in done), strict=True)
    return samples, tuple(_sum(column) / samples for column in columns)


def _sum(values: Iterable[float]) -> float:
    """From left to right: rounding is that of this order."""
    total = 0.0
    for value in values:
        total += value
    return total


def as_number(value: float) -> float | str:
    """For JSON, which has no number for what is not finite."""
    return value if math.isfinite(value) else str(value)


def _as_read(key: str, record: Record | None) -> Compare:
    return Compare(key, "mod", record.mod_revision if record is not None else 0)


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value)
