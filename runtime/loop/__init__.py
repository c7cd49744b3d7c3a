"""Checkpoints of a training loop of the user's own.

`save_check_point` and `load_check_point` are those of the design "Fault tolerance for sync training" of PaddlePaddle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graphft.ir import Program
from graphft.runtime.fs import FS
from graphft.runtime.loop.check_points import CheckPoints
from graphft.runtime.loop.ranks import PerRank
from graphft.runtime.loop.snapshot import Found, TrainStatus, stateful_objects


def save_check_point(
    executor: Any,
    train_status: TrainStatus,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    keep: int = 3,
    storage_options: Mapping[str, Any] | None = None,
) -> int | None:
    """Saves the state of a training loop as the next version in a folder: wholly, or not at all.

        graphft.save_check_point({"model": model, "optimizer": optimizer}, graphft.TrainStatus(epoch), "checkpoints")

    Args:
        executor: What to save: objects with `state_dict()` and `load_state_dict()`, by name; one such object; or a
            `graphft.Executor`, with the program in `main_program`.
        train_status: Where the loop is: what `load_check_point` returns.
        path: A folder, or a URL that fsspec knows (s3://bucket/run, gs://..., memory://...).
        fs: The file system that `path` is on; by default that of the URL, else this machine's.
        trainer_id: Only trainer 0 saves; for others nothing is done (call it in all of them, or in trainer 0 alone; in
            all of them where the state has a `graphft.PerRank`).
        keep: How many of the newest versions are kept. Older ones are deleted, never the newest good one.
        storage_options: Go to fsspec, with a URL.

    Returns:
        The version, when it is committed. Of a trainer that does not save, None. `graphft.CheckPoints(path).begin(...)`
        saves while the loop goes on.

    Raises:
        GraphftError: [state] or [save] for what cannot be saved, [superseded] if another process saves here, too.
        StorageUnavailable: [storage], an OSError, too: the storage refused it eight times, within about a minute; at
            once where it is not there.
    """
    targets = stateful_objects(executor, main_program)  # a mistake shows in every trainer
    train_status.to_json()
    if trainer_id != 0:
        for each in targets.values():
            if isinstance(each, PerRank):
                each.state_dict()  # it is a collective
        return None
    place = CheckPoints(path, fs, keep=keep, storage_options=storage_options)
    return place.save(executor, train_status, main_program=main_program)


def load_check_point(
    executor: Any,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TrainStatus | None:
    """Gives the objects the state of the newest checkpoint that is whole, and returns where the loop was.

    None, and nothing is changed, where there is no checkpoint. The arguments are those of `save_check_point`; all
    trainers load. `version`: another one than the newest. Trainer 0 goes on with its random numbers; with a `PerRank`
    in the state, every trainer does.

    Raises:
        GraphftError: [checkpoint] if no checkpoint is whole; [checkpoint-fit] if the objects are not those that were
            saved: nothing is changed then (`read_check_point` gives the states, to load what fits of them).
        StorageUnavailable: [storage], an OSError, too: the storage fails, so nothing can be said of the checkpoints.
    """
    place = CheckPoints(path, fs, storage_options=storage_options)
    return place.load(executor, main_program=main_program, version=version, trainer_id=trainer_id)


def read_check_point(
    path: str | os.PathLike[str],
    fs: FS | None = None,
    *,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Found | None:
    """Returns the newest checkpoint that is whole, as it was saved: `states` by name, `status`, `random`; None if
    there is none.

    For what `load_check_point` does not do: to load a part that one chooses, or into something else.
    """
    return CheckPoints(path, fs, storage_options=storage_options).newest(version)
