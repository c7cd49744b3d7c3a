"""`graphft checkpoint export`: weights out of a job, a loop, or whatever else `read_weights` knows."""

from __future__ import annotations

import argparse
import contextlib
import io
import posixpath
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from graphft.disk.fileio import size_in_words, write_atomically
from graphft.disk.tensor_file import write_tensors
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind
from graphft.runtime.fs import LocalFS, file_system
from graphft.runtime.interchange.distributed import write_distributed
from graphft.runtime.interchange.trained_program import best_model, export_program, read_trained
from graphft.runtime.interchange.weights import read_weights, write_weights

_SUFFIXES = {".safetensors": "safetensors", ".pt2": "pt2"}


def export_(options: argparse.Namespace) -> int:
    url = options.file.rstrip("/")
    form = _form(options, posixpath.splitext(url)[1])
    fs, path = file_system(url)
    with _writing(url):
        if fs.stat(path):
            raise UsageError(f"{url} is there already", rule="export", help="give a new name")
    write, words = _program(options) if form == "pt2" else _weights(options, form)
    with _writing(url):
        if isinstance(fs, LocalFS):
            write(Path(path))
        else:
            with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
                made = Path(scratch, posixpath.basename(path))
                write(made)
                fs.upload(made, path)
    print(f"{url}: {words}")
    return 0


def _form(options: argparse.Namespace, suffix: str) -> str:
    """Raises UsageError for options that do not go with it."""
    form = str(options.format or _SUFFIXES.get(suffix, "huggingface"))
    if form not in _SUFFIXES.values() and suffix in (".pt", ".pth", ".bin", ".ckpt", ".st"):
        text = f"{options.file} is named like a file, and the format {form} is a folder"
        raise UsageError(text, rule="usage", help="one file: a name that ends in .safetensors; else a folder's name")
    return form


def _program(options: argparse.Namespace) -> tuple[Callable[[Path], object], str]:
    """Returns what writes the program that the job predicts with, and its description."""
    program = read_trained(options.path, options.version, options.best).program
    data = io.BytesIO()
    torch.export.save(export_program(program), data)
    inputs = ", ".join(f"{v.name}: {v.type}" for v in program.of_kind(Kind.INPUT))
    results = ", ".join(f"{name}: {program.variables[name].type}" for name in program.attrs["extras"])
    size = size_in_words(data.getbuffer().nbytes)
    words = f"{size}; torch.export.load(...).module() takes ({inputs}), and returns {results}"
    return lambda target: write_atomically(target, data.getvalue()), words


def _weights(options: argparse.Namespace, form: str) -> tuple[Callable[[Path], object], str]:
    """Returns what writes the weights, and its description."""
    source = best_model(options.path, options.version) if options.best else options.path
    tensors = read_weights(source, options.object, None if options.best else options.version)
    words = f"{len(tensors)} tensors of {options.object!r}, {size_in_words(sum(t.nbytes for t in tensors.values()))}"
    if form == "safetensors":
        return lambda target: write_tensors(target, tensors, {"format": "pt"}), words
    if form == "huggingface":
        return lambda target: write_weights(target, tensors), words
    return lambda target: write_distributed(target, tensors, options.object), words


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """Raises GraphftError[export] where it cannot be written there."""
    try:
        yield
    except OSError as error:
        help = "give a TO that is not there yet, in a folder that this process may write to, with space on its disk"
        raise GraphftError(f"{target} cannot be written: {describe(error)}", rule="export", help=help) from error
