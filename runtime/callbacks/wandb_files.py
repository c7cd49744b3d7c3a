"""What an offline run of Weights & Biases holds: its file `run-<id>.wandb`, as the library leaves it behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC = b":W&B"
HEADER, BLOCK = 7, 1 << 15
FULL, LAST = 1, 4
"""Of a record in LevelDB's log format: blocks of 32 KB; in each, parts of records, each with checksum (4 bytes), length
(2), and kind (1): the whole record, its first part, one in the middle, its last one."""


def rows_of_offline_runs(folder: Path, run: str) -> Iterator[dict[str, Any]]:
    """What was logged to a run, by all processes that went on with it offline, each part up to where it ends."""
    for path in sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb")):
        yield from rows_of_file(path)


def rows_of_file(path: Path) -> Iterator[dict[str, Any]]:
    """What was logged, as it was given, and what the library added (`_step`, `_timestamp`)."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # its classes are made when it is loaded
    for data in _records(path):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(path: Path) -> Iterator[bytes]:
    """Up to the first one that is not whole: its writer was killed."""
    with path.open("rb") as file:
        if file.read(HEADER)[: len(MAGIC)] != MAGIC:
            return
        at, record = HEADER, b""
        while True:
            room = BLOCK - at % BLOCK
            if room < HEADER:  # filled up
                file.read(room)
                at += room
                continue
            head = file.read(HEADER)
            if len(head) < HEADER:
                return
            _, length, kind = struct.unpack("<IHB", head)
            part = file.read(length)
            if len(part) < length or not kind:
                return
            at, record = at + HEADER + length, record + part
            if kind in (FULL, LAST):
                yield record
                record = b""
