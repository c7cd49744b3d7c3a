"""Weights from wherever they lie: `graphft.read_weights`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from graphft.disk.tensor_file import read_tensors
from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.manifest import is_directory
from graphft.runtime.coordination.job_storage import MODEL, download_result, is_url
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.fs import FS, LocalFS, file_system
from graphft.runtime.interchange.distributed import local_path, read_distributed
from graphft.runtime.interchange.distributed_metadata import METADATA
from graphft.runtime.interchange.huggingface import WHOLE, read_sharded
from graphft.runtime.interchange.job_state import job_folder, read_job
from graphft.runtime.loop.check_points import CheckPoints
from graphft.transpiler.record import RECORD

log = logging.getLogger("graphft")

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SOURCES = (
    "a safetensors file, a folder of them as Hugging Face writes it, the folder of a job, what save_check_point "
    "saved, or a directory of torch.distributed.checkpoint"
)


def read_weights(source: str | os.PathLike[str], name: str = "model", version: int | None = None) -> dict[str, Tensor]:
    """Returns a model's `state_dict`, from a file, folder or URL; every checksum that is there is checked.

    `source` is a safetensors file; a folder as Hugging Face's `save_pretrained` writes it, in one file or many; a job's
    name, folder or storage (the model of its newest complete run; else the newest checkpoint that is whole); what
    `save_check_point` saved (its newest version that is whole); or a directory of `torch.distributed.checkpoint`. In
    the last two, `name` is what the model was saved as.
    `version`: of what `save_check_point` saved, not the newest; of a job, the step of another checkpoint. All but the
    last may be URLs.

    Raises GraphftError for what is none of them, is damaged, or holds pickles; OSError where the storage fails.
    """
    source = weights_source(source)
    fs, path = file_system(os.fspath(source))
    if fs.size(path) is not None:
        return _read_file(fs, path)
    names = fs.ls_dir(path)
    if not names:
        raise UsageError(f"there is nothing at {source}", rule="weights", help=f"give {_SOURCES}")
    if RECORD in names:
        return _read_job(source, MODEL in names, version)
    if version is not None or any(map(is_directory, names)):
        return _read_loop(os.fspath(source), name, version)
    indexes = [n for n in names if n.endswith(".safetensors.index.json")]
    files = [n for n in names if n.endswith(".safetensors")]
    if WHOLE in names and indexes:  # as from_pretrained does
        log.warning("%s has %s and %s: the weights are those of the first", source, WHOLE, indexes[0])
        indexes, files = [], [WHOLE]
    if len(indexes) == 1 or (len(files) == 1 and METADATA not in names):
        return _read_folder(fs, path, indexes, files[0] if files else "")
    if METADATA in names:
        return read_distributed(local_path(source), name)
    found = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
    raise UsageError(f"{source} holds no weights that graphft knows: {found}", rule="weights", help=f"give {_SOURCES}")


def _read_file(fs: FS, path: str) -> dict[str, Tensor]:
    if path.endswith(_PICKLES):
        raise UsageError(
            f"{path} is a pickle, which runs code when it is read",
            rule="weights",
            help="convert it, if you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), ...)",
        )
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        return read_tensors(_at_hand(fs, path, Path(scratch)))[0]


def _at_hand(fs: FS, path: str, scratch: Path) -> Path:
    """Returns where this machine has the file or folder."""
    if isinstance(fs, LocalFS):
        return Path(path)
    target = scratch / "copy"
    fs.download(path, target)
    return target


def _read_folder(fs: FS, path: str, indexes: list[str], file: str) -> dict[str, Tensor]:
    """What an index names, or one file."""
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        folder = _at_hand(fs, path, Path(scratch))
        if indexes:
            return read_sharded(folder / indexes[0])
        return read_tensors(folder / file)[0]


def _read_job(source: str | os.PathLike[str], complete: bool, step: int | None) -> dict[str, Tensor]:
    if step is None and complete:
        return _read_model(source)
    with job_folder(source, whole=True) as folder:
        if folder is None:
            raise UsageError(f"there is no job at {source} any more", rule="weights", help=f"give {_SOURCES}")
        state = read_job(folder, step)
    if step is None:
        log.warning("the job in %s is not complete: its weights are those of step %d", source, state.step)
    return state.model


def _read_model(source: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the trained model of a complete job."""
    if is_url(source):
        with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
            download_result(os.fspath(source), Path(scratch))
            return read_tensors(Path(scratch, MODEL))[0]
    try:
        return read_tensors(Path(source, MODEL))[0]
    except GraphftError as error:
        raise GraphftError(
            error.message,
            rule=error.rule,
            help=f"its checkpoints are there: `graphft checkpoint list {source}`, and give one's step as version=; or "
            f"delete the file, and `graphft launch --job {source}` makes it again",
        ) from error


def _read_loop(source: str, name: str, version: int | None) -> dict[str, Tensor]:
    found = CheckPoints(source).newest(version)
    if found is None:
        raise UsageError(f"{source} has no checkpoint that is committed", rule="weights", help="save one first")
    state = found.states.get(name)
    if not isinstance(state, Mapping):
        raise UsageError(
            f"checkpoint {found.version} of {source} has no {name!r}",
            rule="weights",
            help=f"name it (name=, --object): it takes one of {', '.join(sorted(found.states))}",
        )
    tensors = {str(n): value for n, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UsageError(f"{name!r} has no tensors at its first level", rule="weights", help="name a model's state")
    if len(tensors) < len(state):
        others = ", ".join(str(n) for n in state if n not in tensors)
        log.warning("%r has values that are no tensors, which are left out: %s", name, others)
    return tensors
