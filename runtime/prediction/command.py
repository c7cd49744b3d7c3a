"""`graphft predict`: what a job's model predicts of data in files, as a file. Run again, it goes on."""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError, UsageError, describe
from graphft.runtime.process.folder_lock import locked

LOCK = "predict.lock"


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
    predict.add_argument(
        "--workers", type=int, help="processes that share the data (default: the job's trainers, at most the cores)"
    )
    predict.add_argument("--batch-size", type=int, help="records of a forward pass (default: as in training)")
    predict.add_argument("--step", type=int, help="the weights of this checkpoint (default: the newest)")
    predict.add_argument("--best", action="store_true", help="the best model by its validations, not the newest")
    others = "other weights of the same model: a .safetensors file, what Trainer.save wrote"
    predict.add_argument("--weights", metavar="PATH", help=others)
    predict.add_argument("--device", help="where to compute: cpu, cuda, cuda:1 (default: the job's)")
    predict.set_defaults(command=_predict)

    worker = commands.add_parser("predict-worker")  # what `predict` starts; of no use to people
    worker.add_argument("--folder", type=Path, required=True)
    worker.set_defaults(command=_work)


def _predict(options: argparse.Namespace) -> int:
    from graphft.runtime.prediction.output import check_output, write_output
    from graphft.runtime.prediction.predict import Request, results_of

    out, begun = Path(options.out), time.monotonic()
    out = out.resolve() if out.is_symlink() else out  # what it names is replaced, not the link
    _check_place(out, options.job, options.data)
    request = Request.of(
        options.job,
        options.data,
        _columns(options.column) or None,
        options.batch_size,
        options.step,
        options.best,
        options.device,
        options.weights,
    )
    check_output(out, request.program)
    count = request.count(options.workers)
    partial = out.with_name(f".{out.name}.partial")
    try:
        with locked(partial, _busy, file=LOCK):
            work = request.compute(partial, count, _tell)
            write_output(out, request.results, work.data.records, results_of(work, request.program), partial / "out")
            done = partial.rename(partial.with_name(f"{partial.name}.{uuid.uuid4().hex[:8]}.done"))
        shutil.rmtree(done)  # another command for the same file may begin: it has a folder of its own
    except OSError as error:
        raise GraphftError(
            f"{out} cannot be written: {describe(error)}",
            rule="predict",
            help=f"see whether there is room; run again, it goes on with what is in {partial}",
        ) from error
    except KeyboardInterrupt:
        print(f"what is computed is kept in {partial}: run again, it goes on", file=sys.stderr)
        raise
    results = ", ".join(f"{name}: {request.program.variables[name].type}" for name in request.results)
    workers = f"{count} worker{'s' * (count > 1)}"
    print(f"{out}: {work.data.records} records, {results}; {workers}, {time.monotonic() - begun:.1f} s")
    print(f"weights: {request.trained.weights}")
    return 0


def _check_place(out: Path, job: str, data: list[str]) -> None:
    """Raises UsageError for a file that something else is in: data, or a part of the job."""
    from graphft.runtime.coordination.job_storage import is_url
    from graphft.runtime.launcher.folder_status import find_folder

    if not is_url(job) and out.resolve().is_relative_to(find_folder(job).resolve()):
        raise UsageError(f"{out} is in the folder of the job", rule="predict", help="write elsewhere")
    read = [path for given in data for path in (given, *glob.glob(given))]
    if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in read):
        raise UsageError(f"{out} is the data to predict from", rule="predict", help="give another --out")


def _work(options: argparse.Namespace) -> int:
    from graphft.runtime.prediction.worker import serve

    return serve(options.folder)


def _columns(given: list[str]) -> dict[str, list[str]]:
    found = {}
    for text in given:
        name, equals, fields = text.partition("=")
        if not equals or not name or not all(fields.split(",")):
            raise UsageError(f"--column {text}", rule="usage", help="--column x=age,weight,height")
        found[name] = fields.split(",")
    return found


def _busy(holder: str) -> None:
    raise UsageError(
        f"{holder} predicts into this file", rule="predict", help="wait for its end, or give another --out"
    )


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} parts{'' if done < of else chr(10)}", end="", file=sys.stderr, flush=True)
