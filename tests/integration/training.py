"""The integration tests train a small classifier with everything that is hard to keep exact, on data at a pace.

Roles read the data by reference to this file, so it imports neither tests nor fixtures.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphft
from graphft.ir import Program
from graphft.plan import Located, batch_seed
from graphft.runtime.data import open_reader
from graphft.transpiler.job import Job

RECORDS, CHUNK, BATCH, SLOTS, PASSES = 444, 40, 8, 3, 4
"""The last chunk has 4 records: one short batch, after which its slot has no data for the rest of the pass."""
HANGS_AT = 100
LR, CLIP, STEPS = 0.02, 0.5, 80


LOOKED = ".looked"
"""Ending of a file that whoever has something to do to the job touches at each look."""
UNSEEN_AFTER, UNSEEN = 1.0, 2.0


def seconds_of_batch(pace: Path) -> float:
    """Returns what `pace` holds; more while nobody looks who wants to, as the job would be over before."""
    seconds = float(pace.read_text())
    try:
        seen = pace.with_suffix(LOOKED).stat().st_mtime
    except FileNotFoundError:
        return seconds
    return max(seconds, UNSEEN) if time.time() - seen > UNSEEN_AFTER else seconds


def take_time(pace: str) -> None:
    """That of a batch: each moment as long as the file says then."""
    start = time.monotonic()
    while pace and time.monotonic() - start < seconds_of_batch(Path(pace)):
        time.sleep(0.01)


class Blobs:
    """Record i is a point and its class. Record `broken` cannot be read; those from `mislabeled` on have a class
    that there is not, so that computing their loss fails. Reading record `fatal` is a segmentation fault. Record
    `nonfinite` has a value that is no number.

    The file `pace` holds the seconds that reading a batch takes: a test slows a running job down by writing it. Whoever
    finds a file in the folder `hangs` when it reads record HANGS_AT deletes it, and never comes back.
    """

    def __init__(
        self,
        records: int = RECORDS,
        pace: str = "",
        broken: int = -1,
        mislabeled: int = 1 << 30,
        fatal: int = -1,
        hangs: str = "",
        nonfinite: int = -1,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(records, 8, generator=generator)
        self.y = self.x[:, :3].argmax(1)
        self.y[mislabeled:] = 7
        if nonfinite >= 0:
            self.x[nonfinite, 5] = float("nan")
        self.pace, self.broken, self.fatal, self.hangs = pace, broken, fatal, hangs

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == self.broken:
            raise ValueError(f"record {i} is damaged")
        if i == self.fatal:
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
        return self.x[i], self.y[i]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if self.hangs and HANGS_AT in indices:
            self._hang()
        take_time(self.pace)
        return [self[i] for i in indices]

    def _hang(self) -> None:
        for file in Path(self.hangs).iterdir():
            try:
                file.unlink()
            except FileNotFoundError:
                continue  # another process hangs by it
            threading.Event().wait()


class StoredBlobs(Blobs):
    """The same records, each read from a file in `folder`, which `store` writes."""

    def __init__(self, folder: str, pace: str = "") -> None:
        super().__init__(pace=pace)
        self.file = Path(folder, "points")

    def store(self) -> None:
        self.file.parent.mkdir(parents=True)
        self.file.write_bytes(self.x.numpy().tobytes())

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        with self.file.open("rb") as f:
            f.seek(32 * i)
            return torch.frombuffer(bytearray(f.read(32)), dtype=torch.float32), self.y[i]


def network(plain: bool = False) -> nn.Module:
    """`plain`: without what depends on how samples are divided into batches (batch norm, dropout).

    A bias before batch norm would have a gradient of rounding errors only, which Adam makes large steps of."""
    torch.manual_seed(3)
    hard = [] if plain else [nn.BatchNorm1d(32), nn.Dropout(0.2)]
    return nn.Sequential(nn.Linear(8, 32, bias=plain), *hard, nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def program(plain: bool = False, steps: int = STEPS) -> Program:
    """Captured and minimized: Adam, cosine schedule, clipping by global norm."""
    made = graphft.build(network(plain), loss_of, inputs={"x": (None, 8), "y": ((None,), torch.int64)})
    graphft.minimize(made, graphft.Adam(lr=graphft.schedule.cosine(LR, steps)), graphft.ClipByGlobalNorm(CLIP))
    return made


def job(
    source: Program, *, pace: Path | None = None, blobs: Mapping[str, int | str] | None = None, **options: Any
) -> Job:
    """`source` with the tests' usual options: small slices, so that every shard has some. `blobs`: of the data."""
    arguments = {"pace": str(pace or ""), **(blobs or {})}
    chunk_size = options.pop("chunk_size", CHUNK)
    data = options.pop("data", None) or graphft.dataset(f"{__file__}:Blobs", arguments, chunk_size=chunk_size)
    usual: dict[str, Any] = {
        "trainers": SLOTS,
        "pservers": 2,
        "ft": True,
        "batch_size": BATCH,
        "epochs": PASSES,
        "seed": 11,
        "slice_unit": 64,
        "min_block": 64,
        "bucket_bytes": 2048,
        "checkpoint_every": 10,
        "checkpoint_seconds": 0,
        "daemon_interval": 0.2,
        "name": "blobs",
    }
    if not options.get("ft", True):  # no checkpoints on the way, and their options are refused
        usual = {name: value for name, value in usual.items() if not name.startswith("checkpoint_")}
    return graphft.transpile(source, data=data, **{**usual, **options})


def trained_in_one_process(
    job: Job,
    model: nn.Module,
    without: Callable[[Located], frozenset[int]] = lambda work: frozenset(),
    skipped: Collection[int] = (),
) -> dict[str, Tensor]:
    """Eager torch on the same samples: per step one batch of each slot, gradients averaged by samples. Of a step that
    is `skipped`, the schedule counts it, and nothing else is done.

    `without`: positions in its chunk of the records that a batch discards.
    """
    config, plan = job.config, job.config.plan

    def left_in(work: Located) -> int:
        return len(set(plan.positions(work.pass_index, work.chunk, work.batch).tolist()) - without(work))

    reader = open_reader(config.data, ".", config.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(config.total_steps):
        if step in skipped:
            schedule.step()
            continue
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        after: list[dict[str, Tensor]] = []
        works = [(slot, w) for slot in range(plan.slots) if (w := plan.locate(step, slot)) and left_in(w)]
        samples = sum(left_in(w) for _, w in works)
        optimizer.zero_grad()
        for slot, work in works:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            torch.manual_seed(batch_seed(config.seed, step, slot))
            batch = reader.batch(work.pass_index, work.chunk, work.batch, config.batch_size, without(work))
            (loss_of(model, **batch) * (left_in(work) / samples)).backward()
            after.append({n: b.clone() for n, b in model.named_buffers()})
        for name, buffer in model.named_buffers():
            all_slots = torch.stack([values[name] for values in after])
            buffer.copy_(all_slots.mean(0) if buffer.is_floating_point() else all_slots[0])
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    return {n: v.detach().clone() for n, v in model.state_dict().items()}
