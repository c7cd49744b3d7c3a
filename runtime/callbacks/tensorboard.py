"""`graphft.callbacks.TensorBoard`: steps, epochs and validations as scalars, events as text."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from graphft.runtime.callbacks.callbacks import Run, check_library
from graphft.runtime.coordination.records import Event

KINDS = ("train", "epoch", "validation")


class TensorBoard:
    """`train/<name>` has a value for each step, once, whatever is killed; `epoch/<name>` and `validation/<name>` for
    each epoch, `events` the run's events as text. Values are float32, as TensorBoard keeps scalars.

    `folder`: of all runs; each has a folder of its own in it, named after the run's folder and its id.
    """

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        check_library("tensorboard", "TensorBoard")
        self._folder, self._step = Path(folder), 0
        self._writer: Any = None

    def on_begin(self, run: Run) -> None:
        self._place = self._folder / f"{run.folder.resolve().name}-{run.id[:8]}"
        self._newest = newest_of(self._place)
        self._step = max(0, self._newest["train"])

    def held(self) -> tuple[int, int]:
        return self._newest["train"] + 1, max(0, self._newest["epoch"])

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._write("train", step, metrics)

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._write("epoch", epoch, {name: value for name, value in metrics.items() if name != "epoch"})

    def on_validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self._write("validation", epoch, metrics)

    def on_event(self, event: Event) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(self._step, event.at, text("events", f"[{event.who}] {event.text}"))

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def on_end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """All values of a step are one record, which is there whole, or not at all."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if step <= self._newest[kind]:
            return
        self._newest[kind] = step
        scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        self._add(step, time.time(), Summary(value=scalars))

    def _add(self, step: int, at: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._place))
        self._writer.add_event(Record(wall_time=at, step=step, summary=summary))


def newest_of(folder: Path) -> dict[str, int]:
    """By kind, the newest step (epoch) that is there; -1: none is. Files are read from the newest one on, by the second
    that their names have, until all kinds are found."""
    found = dict.fromkeys(KINDS, -1)
    files = sorted(folder.glob("events.out.tfevents.*"), key=_second_of, reverse=True)
    for _, paths in groupby(files, _second_of):
        for tag, step in chain.from_iterable(map(_values, paths)):
            kind = tag.partition("/")[0]
            if kind in found:
                found[kind] = max(found[kind], step)
        if min(found.values()) >= 0:
            break
    return found


def _second_of(path: Path) -> int:
    second = path.name.split(".")[3]
    return int(second) if second.isdecimal() else 0


def _values(path: Path) -> Iterator[tuple[str, int]]:
    """(tag, step) of the values in a file, up to a record that is not whole."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for record in LegacyEventFileLoader(str(path)).Load():
        for value in record.summary.value:
            yield value.tag, record.step
