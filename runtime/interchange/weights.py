"""Weights from wherever they lie, and as Hugging Face saves them: `model.safetensors`, or several files, and an index
`model.safetensors.index.json`, {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from graphft.disk.tensor_file import read_tensors, write_tensors
from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.manifest import is_directory
from graphft.runtime.coordination.job_files import MODEL, download_result, is_url
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.fs import FS, LocalFS, file_system
from graphft.runtime.interchange.distributed import METADATA, local_path, read_distributed
from graphft.runtime.interchange.training_state import job_folder, newest_of_loop, read_job, saved_as
from graphft.transpiler.record import RECORD

log = logging.getLogger("graphft")

WHOLE = "model.safetensors"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SOURCES = (
    "a safetensors file, a folder of them as Hugging Face writes it, the folder of a job, what save_check_point "
    "saved, or a directory of torch.distributed.checkpoint"
)
_AGAIN = "was the folder copied or downloaded wholly?"


def read_weights(source: str | os.PathLike[str], name: str = "model", version: int | None = None) -> dict[str, Tensor]:
    """Returns a model's `state_dict`, from a file, folder or URL; every checksum that is there is checked.

    `source` is a safetensors file; a folder as Hugging Face writes it; a job (its model, or else its newest whole
    checkpoint); what `save_check_point` saved; or a local directory of `torch.distributed.checkpoint`. In the last two,
    `name` is what the model was saved as. `version`: of a loop, or the step of a job's checkpoint.

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
    if WHOLE in names:  # as from_pretrained does
        indexes, files = [], [WHOLE]
    if len(indexes) == 1 or (len(files) == 1 and METADATA not in names):
        with _at_hand(fs, path) as folder:
            return read_sharded(folder / indexes[0]) if indexes else read_tensors(folder / files[0])[0]
    if METADATA in names:
        return read_distributed(local_path(source), name)
    found = ", ".join(names[:4]) + ", ..." * (len(names) > 4)
    raise UsageError(f"{source} holds no weights that graphft knows: {found}", rule="weights", help=f"give {_SOURCES}")


def _read_file(fs: FS, path: str) -> dict[str, Tensor]:
    if path.endswith(_PICKLES):
        help = "convert it, if you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), ...)"
        raise UsageError(f"{path} is a pickle, which runs code when it is read", rule="weights", help=help)
    with _at_hand(fs, path) as file:
        return read_tensors(file)[0]


@contextmanager
def _at_hand(fs: FS, path: str) -> Iterator[Path]:
    """Yields where this machine has the file or folder: a copy that is deleted, where it is not local."""
    if isinstance(fs, LocalFS):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        fs.download(path, Path(scratch, "copy"))
        yield Path(scratch, "copy")


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
        help = f"give the step of a checkpoint, of `graphft checkpoint list {source}`; or delete the file, and "
        help += f"`graphft launch --job {source}` makes it again"
        raise GraphftError(error.message, rule=error.rule, help=help) from error


def _read_loop(source: str, name: str, version: int | None) -> dict[str, Tensor]:
    state = saved_as(newest_of_loop(source, version), name)
    tensors = {str(n): value for n, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise UsageError(f"{name!r} has no tensors at its first level", rule="weights", help="name a model's state")
    return tensors


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a new folder that `from_pretrained` and `load_into` read. Raises OSError.

    A tensor under several names (tied) is written under the first, as Hugging Face does.
    """
    first = {id(tensors[name]): name for name in reversed(list(tensors))}
    write_tensors(folder / WHOLE, {n: t for n, t in tensors.items() if first[id(t)] == n}, {"format": "pt"})


def read_sharded(index: Path) -> dict[str, Tensor]:
    """Returns the tensors of all files that an index names. Raises GraphftError[weights] where one differs."""
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GraphftError(f"{index} is no index of weights: {error!r}", rule="weights", help=_AGAIN) from error
    wrong = sorted({str(f) for f in places.values() if posixpath.basename(str(f)) != f or not str(f).strip(".")})
    if wrong:
        raise GraphftError(f"{index} names files elsewhere: {', '.join(wrong[:3])}", rule="weights", help=_AGAIN)
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        try:
            tensors, _ = read_tensors(index.parent / file)
        except OSError as error:
            text = f"{index} names {file}, which cannot be read: {error}"
            raise GraphftError(text, rule="weights", help=_AGAIN) from error
        found.update({n: t for n, t in tensors.items() if places.get(n) == file})
    missing = sorted(places.keys() - found.keys())
    if missing:
        text = f"{index} names {missing[0]} in {places[missing[0]]}, which does not have it"
        raise GraphftError(text, rule="weights", help=_AGAIN)
    return found
