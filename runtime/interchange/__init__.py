"""Weights and optimizer state from and for others; and `graphft checkpoint`, whose parser is here."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

from graphft.errors import GraphftError, describe
from graphft.runtime.coordination.runs import weights_source

EITHER = "a job's name, folder or storage; or where a loop saves"


def add_parser(commands: Any) -> None:
    checkpoint = commands.add_parser("checkpoint", help="list, check or export checkpoints")
    actions = checkpoint.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, help: str, where: str = EITHER, module: str = "inspection") -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help)
        parser.add_argument("path", metavar="PATH_OR_URL", help=where)
        parser.set_defaults(command=lambda options: _run(module, f"{name}_", options))
        return parser

    action("list", "the checkpoints that are there")
    which = "its number; of a job: its step"
    show = action("show", "what is in a checkpoint")
    show.add_argument("--version", type=int, help=f"{which} (default: the newest that is whole)")
    action("verify", "read every byte, and check it").add_argument(
        "--version", type=int, help=f"{which} (default: all)"
    )
    export = action(
        "export",
        "a model's weights, for plain torch, Hugging Face or torch.distributed.checkpoint",
        f"{EITHER}; or whatever else init_from= takes",
        "export",
    )
    export.add_argument("file", metavar="TO", help="the file, or the new folder, to write; a path or URL")
    export.add_argument("--version", type=int, help=f"{which} (default: the newest that is whole)")
    export.add_argument("--object", default="model", help="the name it was saved under (default: model)")
    export.add_argument("--best", action="store_true", help="of a job, the best model by its validations")
    export.add_argument(
        "--format",
        choices=("safetensors", "pt2", "huggingface", "dcp"),
        help="one file (default for TO that ends in .safetensors); of a job, the model with its code, for "
        "torch.export.load (.pt2); a folder as save_pretrained writes it (default otherwise); or a directory of "
        "torch.distributed.checkpoint",
    )


def _run(module: str, function: str, options: argparse.Namespace) -> int:
    """Imports torch only now. Raises GraphftError, also for a storage's own errors."""
    options.path = os.fspath(weights_source(options.path))
    try:
        command = getattr(importlib.import_module(f"graphft.runtime.interchange.{module}"), function)
        return int(command(options))
    except (GraphftError, BrokenPipeError):  # the latter is of the terminal, not the storage
        raise
    except OSError as error:
        help = "is the path right, and the storage there?"
        raise GraphftError(f"{options.path}: {describe(error)}", rule="storage", help=help) from error
