"""Predicting with what a job has trained, in this process; the parser of `graphft predict` is here."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    predict = commands.add_parser("predict", help="what a job's trained model predicts of new data, as a file")
    predict.add_argument("job", metavar="JOB", help="the job's name or folder, or the URL of its storage")
    predict.add_argument(
        "--data",
        required=True,
        action="append",
        metavar="FILE",
        help=".csv or .parquet (a path, pattern or URL; may be given several times), or one .npz file",
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
    predict.set_defaults(command="graphft.runtime.prediction.output:predict_to_file")
