"""Reading what trainers noted of each batch: the rows in `metrics/` of a job's folder, files of each trainer.

A row: step, slot, loss, samples, at (seconds since 1970), and a value for each metric that `loss_fn` returns: means
over the batch. Several rows may be of one step and slot: it was computed again, after a fault or by another trainer, or
stands in the files for old steps, too. In sync mode they agree; the newest counts.

`trainer-<id>.every<k>.<n>.rows` is the n-th file of a trainer with the steps that are multiples of k. Files only grow;
the oldest are deleted where they take too much (`roles/trainer/metrics.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from graphft.runtime.process import metric_lines, metric_rows
from graphft.runtime.process.metric_table import Table, joined

log = logging.getLogger("graphft")

FOLDER = "metrics"
LEVELS = (1, 16, 256)
"""Of which steps there are rows: of each one, of each 16th one, ..."""
PIECE = 4 << 20
"""Bytes that are read at a time: as rows of JSON they take ten times the memory."""


def file_of(job_dir: Path, trainer: str, level: int, number: int) -> Path:
    return job_dir / FOLDER / f"{stem(level, trainer)}.{number:06}{metric_rows.SUFFIX}"


def files_of(job_dir: Path, level: int) -> list[Path]:
    """Those with the rows of each `level`-th step, as far as they are there. Files of JSON lines have each step."""
    found = [*(job_dir / FOLDER).glob(f"{stem(level)}.*{metric_rows.SUFFIX}")]
    return sorted([*found, *((job_dir / FOLDER).glob(f"*{metric_lines.SUFFIX}") if level == 1 else ())])


def stem(level: int, trainer: str = "*") -> str:
    return f"trainer-{trainer}.every{level}"


def read_file(
    path: Path, offset: int = 0, piece: int = PIECE, tell: Callable[[str], object] = lambda text: None
) -> Iterator[tuple[Table, int]]:
    """The whole rows from this byte on, in pieces of about so many bytes, each with the byte behind it: a file that
    grows is read on from there. Nothing of a file that was deleted; of one that cannot be read, `tell` is called with
    why."""
    read = metric_lines.read_lines if path.suffix == metric_lines.SUFFIX else metric_rows.read_rows
    try:
        yield from read(path, offset, piece)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(unread(path, error))


def unread(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror or error}"


def check_listed(job_dir: Path, tell: Callable[[str], object]) -> None:
    """Calls `tell` where the folder of the files cannot be listed: then none is found."""
    try:
        next((job_dir / FOLDER).iterdir(), None)
    except FileNotFoundError:
        return
    except OSError as error:
        tell(unread(job_dir / FOLDER, error))


def read_table(job_dir: Path) -> Table:
    """Each (step, slot) of the job in this folder once. What cannot be read is left out, and told in `Table.unread`."""
    told: list[str] = []
    check_listed(job_dir, told.append)
    paths = [path for level in LEVELS for path in files_of(job_dir, level)]
    table = joined([table for path in paths for table, _ in read_file(path, tell=told.append)]).newest()
    return replace(table, unread=tuple(told))


def _read_or_log(job_dir: Path) -> Table:
    table = read_table(job_dir)
    for text in table.unread:
        log.warning("%s", text)
    return table


def losses_of(job_dir: Path) -> list[tuple[int, int, float]]:
    """(step, slot, loss) of the job in this folder, each (step, slot) once. What cannot be read is logged."""
    table = _read_or_log(job_dir)
    return list(zip(table.step.tolist(), table.slot.tolist(), table.values["loss"].tolist(), strict=True))


def metrics_of(job_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of the loss and of each metric by name, each step once: weighted by samples over the slots. What
    cannot be read is logged."""
    table = _read_or_log(job_dir)
    means = {name: table.means(name, table.step) for name in table.values}
    return {n: list(zip(steps.tolist(), of.tolist(), strict=True)) for n, (steps, of) in means.items() if len(steps)}
