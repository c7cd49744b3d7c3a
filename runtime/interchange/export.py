"""`graphft checkpoint export`: weights out of a job, a loop, or whatever else `read_weights` knows."""

from __future__ import annotations

import argparse
import contextlib
import posixpath
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from graphft.disk.fileio import size_in_words
from graphft.disk.tensor_file import read_tensors, write_tensors
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind
from graphft.runtime.coordination.job_storage import is_url
from graphft.runtime.fs import file_system
from graphft.runtime.interchange.distributed import write_distributed
from graphft.runtime.interchange.exported_program import export_program, write_exported
from graphft.runtime.interchange.huggingface import SHARD_BYTES, write_weights
from graphft.runtime.interchange.optimizer_state import read_training
from graphft.runtime.interchange.trained_program import best_model, read_trained
from graphft.runtime.interchange.weights import read_weights

MEGABYTE = 1e6
_FILES = ("safetensors", "pt2")
"""Formats that are one file."""


def export_(options: argparse.Namespace) -> int:
    if is_url(options.file):
        return _export_to_url(options)
    target, form = Path(options.file), _form(options)
    if options.optimizer and form != "dcp":
        raise UsageError(
            f"--optimizer goes with --format dcp, this is {form}", rule="usage", help="others have weights alone"
        )
    if options.best and options.optimizer:
        raise UsageError(
            "--best and --optimizer are both given, and of the best model only its weights are kept",
            rule="usage",
            help="leave one of them out",
        )
    _check_new(target, form)
    if form == "pt2":
        return _export_program(options, target)
    tensors, optimizer = _with_optimizer(options) if options.optimizer else (_tensors(options), None)
    with _writing(target):
        written = _write(options, form, target, tensors, optimizer)
    count = len({id(t) for t in tensors.values()}) if form == "huggingface" else len(tensors)
    size = size_in_words(sum(t.nbytes for t in tensors.values()))
    print(f"{target}: {count} tensors of {options.object!r}, {size}, in {', '.join(written)}")
    return 0


def _export_program(options: argparse.Namespace, target: Path) -> int:
    """Writes the program that the job predicts with, and its weights."""
    program = read_trained(options.path, options.version, options.best).program
    exported = export_program(program)
    with _writing(target):
        size = write_exported(target, exported)
    inputs = ", ".join(f"{v.name}: {v.type}" for v in program.of_kind(Kind.INPUT))
    names = program.attrs["extras"]
    results = ", ".join(f"{name}: {program.variables[name].type}" for name in names)
    print(f"{target}: {size_in_words(size)}; torch.export.load(...).module() takes ({inputs}), and returns {results}")
    return 0


def _write(
    options: argparse.Namespace, form: str, target: Path, tensors: dict[str, Tensor], optimizer: dict[str, Any] | None
) -> list[str]:
    """Returns what it has written, in words."""
    if form == "safetensors":
        write_tensors(target, tensors, {"format": "pt"})
        return [target.name]
    if form == "huggingface":
        size = SHARD_BYTES if options.shard_mb is None else round(options.shard_mb * MEGABYTE)
        return write_weights(target, tensors, size)
    write_distributed(target, tensors, options.object, optimizer, options.optimizer)
    also = f" and {options.optimizer!r}" * bool(options.optimizer)
    return [f"a directory of torch.distributed.checkpoint, with {options.object!r}{also}"]


@contextlib.contextmanager
def _writing(target: str | Path) -> Iterator[None]:
    """Raises GraphftError[export] where it cannot be written there."""
    try:
        yield
    except OSError as error:
        raise GraphftError(
            f"{target} cannot be written: {describe(error)}",
            rule="export",
            help="give a TO that is not there yet, in a folder that this process may write to, with space on its disk",
        ) from error


def _form(options: argparse.Namespace) -> str:
    """Raises UsageError for options that do not go with it."""
    named = {".safetensors": "safetensors", ".pt2": "pt2"}.get(posixpath.splitext(options.file.rstrip("/"))[1])
    form = str(options.format or named or "huggingface")
    suffix = posixpath.splitext(options.file)[1]
    if form not in _FILES and suffix in (".pt", ".pth", ".bin", ".ckpt", ".st"):
        raise UsageError(
            f"{options.file} is named like a file, and the format {form} is a folder",
            rule="usage",
            help="one file: a name that ends in .safetensors (safetensors.torch.load_file reads it); else a folder's "
            "name",
        )
    if options.shard_mb is not None and not (form == "huggingface" and 0 < options.shard_mb < float("inf")):
        raise UsageError(
            f"--shard-mb is {options.shard_mb}, and the format {form}",
            rule="usage",
            help="give megabytes, as 5000, with --format huggingface; what it writes otherwise is one file",
        )
    return form


def _check_new(target: Path, form: str) -> None:
    """Raises UsageError for a file of another kind: an older export may be overwritten."""
    with _writing(target):
        there, is_folder = target.exists(), target.is_dir()
    if form not in _FILES and there and not is_folder:
        raise UsageError(
            f"{target} is a file, and the format {form} is a folder",
            rule="export",
            help="give a new folder; or, for one file, a name that ends in .safetensors, or --format safetensors",
        )
    if form == "pt2" and there and not zipfile.is_zipfile(target):
        raise UsageError(f"{target} is there, and is no .pt2 file", rule="usage", help="give another name")
    if form == "safetensors" and there:
        try:
            read_tensors(target)
        except (GraphftError, OSError) as error:
            raise UsageError(
                f"{target} is there, and is no whole safetensors file", rule="usage", help="give another name"
            ) from error


def _export_to_url(options: argparse.Namespace) -> int:
    """Writes here, and uploads: to where nothing is that it would be mixed with. A file may be an older export."""
    url, form = options.file.rstrip("/"), _form(options)
    fs, path = file_system(url)
    if form not in _FILES:
        is_file = fs.size(path) is not None
        taken = ["a file"] if is_file else [n for n in fs.ls_dir(path) if form == "dcp" or ".safetensors" in n]
        if taken:
            raise UsageError(f"{url} has {', '.join(taken[:3])} already", rule="export", help="give a new folder")
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        made = Path(scratch, posixpath.basename(url))
        export_(argparse.Namespace(**{**vars(options), "file": str(made)}))
        with _writing(url):
            fs.upload(made, path)
    print(f"uploaded to {url}")
    return 0


def _tensors(options: argparse.Namespace) -> dict[str, Tensor]:
    if options.best:
        return read_weights(best_model(options.path, options.version))
    return read_weights(options.path, options.object, options.version)


def _with_optimizer(options: argparse.Namespace) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns both of one checkpoint, though the job goes on meanwhile."""
    if options.optimizer == options.object:
        raise UsageError(f"both are called {options.object!r}", rule="usage", help="--object NAME --optimizer NAME")
    tensors, optimizer = read_training(options.path, options.object, options.optimizer, options.version)
    return tensors, optimizer.by_name()
