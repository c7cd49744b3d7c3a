"""The jobs that are simulated: small ones, each different from the others in what matters to the protocol.

A sync job's result must be that of the undisturbed run, bit by bit; so its model is one in which everything matters:
order, version and repetition. An async job applies batches in any order; so its loss is linear and adds up integers:
the model holds, for each record and each parameter, how often it was applied.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import graphft
from graphft.data import ChunkInfo, DataSpec
from graphft.ir import Program
from graphft.plan import record_order
from graphft.transpiler.job import Job

RECORDS = 128
"""At most so many in an async job: a parameter has an element for each."""
VARIANTS = 48


@dataclass(frozen=True)
class Variant:
    """One job, and how many trainers are started for it."""

    number: int
    options: tuple[tuple[str, Any], ...]
    chunks: tuple[int, ...]
    """Records of each."""
    batch: int
    nonfinite: tuple[int, ...] = ()
    """Records with a value that is not finite: whatever contains one is to be discarded."""

    @property
    def sync(self) -> bool:
        return bool(dict(self.options)["sync"])

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        chunks = ", ".join(map(str, self.chunks))
        return f"job {self.number}: chunks of {chunks} records, batches of {self.batch}, {options}"


@functools.cache
def sync_variant(number: int) -> Variant:
    pick = random.Random(number)
    slots = pick.randint(1, 3)
    return Variant(
        number,
        (
            ("sync", True),
            ("trainers", slots),
            ("pservers", pick.randint(1, 3)),
            ("epochs", pick.randint(1, 2)),
            ("checkpoint_every", pick.choice((0, 1, 2, 4))),
            ("checkpoint_seconds", pick.choice((0.0, 3.0))),
            ("clip", pick.random() < 0.4),
            ("optimizer", pick.choice(("SGD", "Adam"))),
            ("on_trainer_loss", pick.choice(("takeover", "takeover", "wait"))),
        ),
        tuple(pick.randint(1, 16) for _ in range(pick.randint(slots, slots + 3))),
        4,
    )


@functools.cache
def async_variant(number: int) -> Variant:
    pick = random.Random(1000 + number)
    mode = pick.choice(("async", "async", "half_async", "geo_sgd"))
    # Half-async: units of two whole batches, the mean of which adds up exactly.
    unit = 8 if mode == "half_async" else 4
    chunks = tuple(unit * pick.randint(1, 4) for _ in range(pick.randint(2, 4)))
    return Variant(
        number,
        (
            ("sync", False),
            ("mode", mode),
            ("trainers", pick.choice((1, 2, 4)) if mode == "geo_sgd" else pick.randint(1, 3)),
            ("pservers", pick.randint(1, 3)),
            ("epochs", pick.randint(1, 2)),
            ("checkpoint_every", pick.choice((1, 2, 4))),
            ("checkpoint_seconds", pick.choice((0.0, 3.0))),
            (
                "local_steps",
                min(pick.choice((1, 2)) if mode == "geo_sgd" else 2, max(chunks) // 4) if mode != "async" else 1,
            ),
            ("max_staleness", pick.choice((-1, -1, 2))),
        ),
        chunks,
        4,
    )


@functools.cache
def make_job(variant: Variant) -> Job:
    options = dict(variant.options)
    clip, optimizer, half = options.pop("clip", False), options.pop("optimizer", ""), options.pop("half", False)
    if "validate_every" in options:
        options["validate"] = _held_out(options.pop("validate_every"), options.pop("decides"))
    return graphft.transpile(
        _curved(optimizer, clip, half) if variant.sync else _counting(),
        data=_in_chunks(graphft.arrays(**_columns(variant)), variant.chunks),
        batch_size=variant.batch,
        ft=True,
        name="sim",
        seed=variant.number,
        slice_unit=64,
        min_block=64,
        lease_ttl=5,
        chunk_timeout=30.0,
        **({"recovery_timeout": 4.0} if variant.sync else {"push_timeout": 4.0}),
        keep_checkpoints=2,
        max_discarded=1.0,
        **options,
    )


def _held_out(every: int, decides: str) -> graphft.Validation:
    """Ranges of one batch, and one of several. `decides`: what is decided by it."""
    rate, stop = graphft.ReduceLROnPlateau(patience=0, factor=0.5), graphft.EarlyStopping(patience=2)
    terms: dict[str, dict[str, Any]] = {
        "best": {"best": "loss"},
        "stop": {"stop": stop},
        "rate": {"plateau": rate, "best": "loss"},
        "all": {"plateau": rate, "stop": stop},
    }
    torch.manual_seed(2)
    x, y = torch.randn(27, 8), torch.randn(27, 4)
    data = _in_chunks(graphft.arrays(x=x, y=y), (2, 3, 1, 3, 18))
    return graphft.Validation(data=data, batch_size=3, every=every or "epoch", **terms.get(decides, {}))


def _in_chunks(data: DataSpec, records: Sequence[int]) -> DataSpec:
    """The same data, in chunks of so many records."""
    ends = itertools.accumulate(records)
    chunks = (ChunkInfo(i, n, end - n) for i, (n, end) in enumerate(zip(records, ends, strict=True)))
    return replace(data, chunks=tuple(chunks))


def _columns(variant: Variant) -> dict[str, Tensor]:
    records = sum(variant.chunks)
    torch.manual_seed(1)
    x = torch.randn(records, 8) if variant.sync else torch.eye(RECORDS)[:records]
    if variant.sync and variant.number % 2:  # weights of these columns stay as they are: parts refer to those before
        x[:, 4:] = 0
    for record in variant.nonfinite:
        x[record, 0] = float("nan")
    return {"x": x, "y": torch.randn(records, 4)} if variant.sync else {"x": x}


@functools.cache
def _curved(optimizer: str, clip: bool, half: bool) -> Program:
    """`half`: in float16, with a loss scale that overflows every few steps, and that every gradient is rounded by."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=half):
            return nn.functional.mse_loss(model(x), y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    program = graphft.build(model, loss, {"x": (None, 8), "y": (None, 4)})
    made = graphft.SGD(lr=0.1, momentum=0.9) if optimizer == "SGD" else graphft.Adam(lr=0.02)
    scaler = graphft.GradScaler(2.0**20, 9.7, 0.3, 2) if half else None
    graphft.minimize(program, made, graphft.ClipByGlobalNorm(0.5) if clip else None, grad_scaler=scaler)
    return program


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            setattr(self, f"count{i}", nn.Parameter(torch.zeros(RECORDS)))


@functools.cache
def _counting() -> Program:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return sum((x @ getattr(model, f"count{i}")).sum() for i in range(3))  # type: ignore[return-value]

    program = graphft.build(Counters(), loss, {"x": (None, RECORDS)})
    graphft.minimize(program, graphft.SGD(lr=1.0))
    return program


def with_nonfinite(variant: Variant, seed: int) -> Variant:
    """The same job with a few records that are not finite, whose steps are to be discarded; or in float16."""
    records = random.Random(seed).sample(range(sum(variant.chunks)), min(2, sum(variant.chunks)))
    if variant.sync and seed % 2 == 0:
        return with_options(variant, on_nonfinite="skip", half=True)
    return replace(with_options(variant, on_nonfinite="skip"), nonfinite=tuple(sorted(records)))


def with_options(variant: Variant, **options: Any) -> Variant:
    """The same job, with these options."""
    return replace(variant, options=tuple({**dict(variant.options), **options}.items()))


def expected_counts(variant: Variant) -> tuple[Tensor, int]:
    """Returns an async job's counters of the records at the end, minus the sum of what each batch was worth; and how
    many batches, or units, are discarded."""
    options = dict(variant.options)
    share = {"async": 1.0, "half_async": 0.5, "geo_sgd": 1 / options["trainers"]}[options["mode"]]
    counts, discarded, first = torch.zeros(RECORDS), 0, 0
    unit = variant.batch * options["local_steps"]
    for chunk, records in enumerate(variant.chunks):
        for index in range(options["epochs"]):
            order = first + torch.from_numpy(record_order(variant.number, index, chunk, records))
            for batch in order.split(unit):
                if set(variant.nonfinite).isdisjoint(batch.tolist()):
                    counts[batch] -= share
                else:
                    discarded += 1
        first += records
    return counts, discarded
