"""`graphft predict`: writes what a job's model predicts of data in files to a file."""

from __future__ import annotations

import argparse
import glob
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError, describe

if TYPE_CHECKING:
    from torch import Tensor


def add_parser(commands: Any) -> None:
    predict = commands.add_parser("predict", help="what a job's trained model predicts of new data, as a file")
    predict.add_argument("job", metavar="JOB", help="the job's name or folder, or the URL of its storage")
    predict.add_argument(
        "--data",
        required=True,
        action="append",
        metavar="FILE",
        help=".csv, .parquet, .jsonl or .npy (a path, pattern or URL; may be given several times), or one .npz file",
    )
    predict.add_argument("--out", required=True, metavar="FILE", help=".npz, .csv, .parquet or .safetensors")
    predict.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="INPUT=FIELD,...",
        help="which fields of the file an input has (default: those that the job was trained with)",
    )
    predict.add_argument("--batch-size", type=int, help="records of a forward pass (default: as in training)")
    predict.add_argument("--step", type=int, help="the weights of this checkpoint (default: the newest)")
    predict.add_argument("--best", action="store_true", help="the best model by its validations, not the newest")
    others = "other weights of the same model: a .safetensors file, what Trainer.save wrote"
    predict.add_argument("--weights", metavar="PATH", help=others)
    predict.add_argument("--device", help="where to compute: cpu, cuda, cuda:1 (default: the job's)")
    predict.set_defaults(command=_predict)


def _predict(options: argparse.Namespace) -> int:
    from graphft.runtime.prediction.output import check_output, write_output
    from graphft.runtime.prediction.predict import Prediction

    out, begun = Path(options.out), time.monotonic()
    out = out.resolve() if out.is_symlink() else out  # what it names is replaced, not the link
    _check_place(out, options.job, options.data)
    prediction = Prediction.of(
        options.job,
        options.data,
        _columns(options.column) or None,
        options.batch_size,
        options.step,
        options.best,
        options.weights,
        options.device,
    )
    check_output(out, prediction.program)
    names, records = prediction.results, prediction.data.records
    try:
        with prediction.settings():
            write_output(out, names, records, _shown(prediction.parts(), names[0], records))
    except OSError as error:
        raise GraphftError(
            f"{out} cannot be written: {describe(error)}", rule="predict", help="see whether there is room"
        ) from error
    results = ", ".join(f"{name}: {prediction.program.variables[name].type}" for name in names)
    print(f"{out}: {records} records, {results}; {time.monotonic() - begun:.1f} s")
    print(f"weights: {prediction.trained.weights}")
    return 0


def _shown(parts: Iterator[dict[str, Tensor]], name: str, records: int) -> Iterator[dict[str, Tensor]]:
    """Yields the parts; on a terminal, shows how many records are done."""
    done = 0
    for part in parts:
        yield part
        done += len(part[name])
        if sys.stderr.isatty():
            end = "\n" if done == records else ""
            print(f"\r{done} of {records} records", end=end, file=sys.stderr, flush=True)


def _check_place(out: Path, job: str, data: list[str]) -> None:
    """Raises UsageError for a file that something else is in: data, or a part of the job."""
    from graphft.runtime.coordination.job_storage import is_url
    from graphft.runtime.coordination.runs import find_folder

    if not is_url(job) and out.resolve().is_relative_to(find_folder(job, complete=True).resolve()):
        raise UsageError(f"{out} is in the folder of the job", rule="predict", help="write elsewhere")
    read = [path for given in data for path in (given, *glob.glob(given))]
    if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in read):
        raise UsageError(f"{out} is the data to predict from", rule="predict", help="give another --out")


def _columns(given: list[str]) -> dict[str, list[str]]:
    found = {}
    for text in given:
        name, equals, fields = text.partition("=")
        if not equals or not name or not all(fields.split(",")):
            raise UsageError(f"--column {text}", rule="usage", help="--column x=age,weight,height")
        found[name] = fields.split(",")
    return found
