"""Weights from wherever they lie: `graphft.read_weights`."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_storage import MODEL, download_result, fetch, is_url
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.fs import FS, LocalFS, file_system
from graphft.runtime.interchange.huggingface import WHOLE, check_whole, read_sharded
from graphft.runtime.loop.check_points import CheckPoints
from graphft.runtime.loop.version_store import FOLDER
from graphft.tensor_file import read_tensors

log = logging.getLogger("graphft")

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SOURCES = (
    "a safetensors file, a folder of them as Hugging Face writes it, the folder of a job, what save_check_point "
    "saved, or a directory of torch.distributed.checkpoint"
)


def read_weights(source: str | os.PathLike[str], name: str = "model", version: int | None = None) -> dict[str, Tensor]:
    """A model's `state_dict`, from a file, folder or URL; every checksum that is there is checked.

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
    if version is not None:
        if fs.size(f"{path}/job.json") is not None:
            if is_url(source):
                return _read_stored_job(os.fspath(source), [], version)
            return _read_job(Path(path), version)
        return _read_loop(os.fspath(source), name, version)
    if fs.size(path) is not None:
        return _read_file(fs, path)
    names = fs.ls_dir(path)
    if not names:
        raise UsageError(f"there is nothing at {source}", rule="weights", help=f"give {_SOURCES}")
    if any(map(FOLDER.fullmatch, names)):
        return _read_loop(os.fspath(source), name, None)
    indexes = [n for n in names if n.endswith(".safetensors.index.json")]
    files = [n for n in names if n.endswith(".safetensors")]
    if WHOLE in names and indexes and "job.json" not in names:  # as from_pretrained does
        log.warning("%s has %s and %s: the weights are those of the first", source, WHOLE, indexes[0])
        indexes, files = [], [WHOLE]
    if len(indexes) == 1 or ("job.json" not in names and len(files) == 1 and ".metadata" not in names):
        if not indexes:
            check_whole(f"{source}/{files[0]}")
        return _read_folder(fs, path, indexes, files[0] if files else "")
    if "job.json" in names and is_url(source):
        return _read_stored_job(os.fspath(source), names, None)
    if not isinstance(fs, LocalFS) and ".metadata" in names:
        raise UsageError(f"{source} can be read from a local disk only", rule="weights", help="copy the folder first")
    if "job.json" in names:
        return _read_job(Path(path))
    if ".metadata" in names:
        from graphft.runtime.interchange.distributed import read_distributed

        return read_distributed(Path(path), name)
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
    """Where this machine has the file or folder."""
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


def _read_job(folder: Path, step: int | None = None, named: str = "") -> dict[str, Tensor]:
    """`named`: the URL that the folder is a copy of."""
    from graphft.runtime.interchange.job_state import read_job

    if step is None and (folder / MODEL).exists():
        try:
            return read_tensors(folder / MODEL)[0]
        except GraphftError as error:
            raise GraphftError(
                error.message,
                rule=error.rule,
                help=f"its checkpoints are there: `graphft checkpoint list {folder}`, and give one's step as version=; "
                f"or delete the file, and `graphft launch --job {folder}` makes it again",
            ) from error
    state = read_job(folder, step)
    if step is None:
        log.warning("the job in %s is not complete: its weights are those of step %d", named or folder, state.step)
    return state.model


def _read_stored_job(url: str, names: list[str], step: int | None) -> dict[str, Tensor]:
    """Of a job that lies in its storage."""
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        if MODEL in names:
            download_result(url, Path(scratch))
            return read_tensors(Path(scratch, MODEL))[0]
        fetch(url, Path(scratch, "job"))
        return _read_job(Path(scratch, "job"), step, url)


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
