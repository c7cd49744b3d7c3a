"""`save_check_point` and `load_check_point`, for training loops of any kind.

Source: the design "Fault tolerance for sync training" of PaddlePaddle's fleet, whose names these are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from graphft.data import DataSpec
from graphft.ir import Program
from graphft.runtime.fs import FS
from graphft.runtime.loop.check_points import CheckPoints, WaitedTooLong
from graphft.runtime.loop.ranks import check_rank, gather_rank_states
from graphft.runtime.loop.snapshot import Found
from graphft.runtime.loop.targets import Stateful, targets_of
from graphft.runtime.loop.train_status import TrainStatus, check_status
from graphft.runtime.loop.version_store import Keep

LOOK_SECONDS = 0.2


def save_check_point(
    executor: Any,
    train_status: TrainStatus,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    keep: int | Keep = 3,
    random_states: bool = True,
    per_rank: Mapping[str, Stateful] | None = None,
    data: DataSpec | None = None,
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
        trainer_id: Only trainer 0 saves; for others nothing is done (call it in all of them, or in trainer 0 alone).
        keep: How many of the newest versions are kept, or a `Keep`. Older ones are deleted, never the newest good one.
        random_states: Whether torch's, NumPy's and Python's generators are saved, too: those of trainer 0.
        per_rank: What each rank of `torch.distributed` has for itself, by name, `{"loader": loader}`, or `{}`. Given
            (by every rank, at the same step: it is a collective), these objects and the generators of all ranks are
            saved, and each rank goes on with its own.
        data: What the loop is trained on, where `graphft.arrays`, `files` or `dataset` describes it: its fingerprint
            goes into the manifest, as that of the program in `main_program` does (`graphft checkpoint show`).
        storage_options: Go to fsspec, with a URL.

    Returns:
        The version, when it is committed. Of a trainer that does not save, None. `graphft.CheckPoints(path).begin(...)`
        saves while the loop goes on.

    Raises:
        GraphftError: [state] or [save] for what cannot be saved, [rank] if trainer_id is not the rank, [superseded] if
            another process saves here, too.
        StorageUnavailable: [storage], an OSError, too: the storage refused it eight times, within about a minute; at
            once where it is not there.
    """
    targets_of(executor, main_program)  # a mistake shows in every trainer
    check_status(train_status)
    ranks = None
    if per_rank is not None:
        check_rank(trainer_id)
        ranks = gather_rank_states(per_rank)
    if trainer_id != 0:
        return None
    place = CheckPoints(path, fs, keep=keep, data=data, storage_options=storage_options)
    return place.save(executor, train_status, main_program=main_program, random_states=random_states, ranks=ranks)


def load_check_point(
    executor: Any,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    version: int | None = None,
    random_states: bool = True,
    per_rank: Mapping[str, Stateful] | None = None,
    partial: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> TrainStatus | None:
    """Gives the objects the state of the newest checkpoint that is whole, and returns where the loop was.

    None, and nothing is changed, where there is no checkpoint. The arguments are those of `save_check_point`; all
    trainers load. `version`: another one than the newest. `random_states`: each trainer goes on with its own random
    numbers, if it was saved with `per_rank`; else trainer 0 does, and the others' generators stay as they are.
    `partial`: into objects that have changed, what fits by name, shape and dtype is loaded, an optimizer if it has
    the same parameters; the rest stays as it is, and a warning lists it.

    Raises:
        GraphftError: [checkpoint] if no checkpoint is whole; [checkpoint-fit] if the objects are not those that were
            saved (with `partial`: if nothing fits): nothing is changed then.
        StorageUnavailable: [storage], an OSError, too: the storage fails, so nothing can be said of the checkpoints.
    """
    place = CheckPoints(path, fs, storage_options=storage_options)
    return place.load(
        executor,
        main_program=main_program,
        version=version,
        random_states=random_states,
        trainer_id=trainer_id,
        per_rank=per_rank,
        partial=partial,
    )


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


def wait_for_check_point(
    path: str | os.PathLike[str],
    version: int,
    timeout: float,
    fs: FS | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """For trainers that do not save: returns when this version (or a later one) is committed.

    Raises WaitedTooLong, a TimeoutError, after `timeout` seconds; OSError where the storage fails.
    """
    store, end = CheckPoints(path, fs, storage_options=storage_options).store, time.monotonic() + timeout
    while max(found := store.all_committed(), default=-1) < version:
        if time.monotonic() > end:
            raise WaitedTooLong(
                f"{path} had no checkpoint {version} within {timeout:g} s; "
                + (f"the newest is {found[0]}" if found else "it has none"),
                rule="checkpoint-timeout",
                help="is trainer 0 alive, and does it save to this path? its log says what the storage refuses; if "
                "a save takes so long, wait longer",
            )
        time.sleep(LOOK_SECONDS)
