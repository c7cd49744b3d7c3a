"""`graphft checkpoint`: looks at the checkpoints of a loop, checks, copies and deletes them; takes weights out and in.

Safe to run beside a loop that saves: what it writes counts when it is whole, and the newest is never deleted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError, describe
from graphft.fileio import size_in_words
from graphft.runtime.interchange.weights_command import export, import_

if TYPE_CHECKING:
    from graphft.runtime.interchange.job_checkpoints import JobCheckpoint
    from graphft.runtime.loop.check_points import CheckPoints
    from graphft.runtime.loop.version_store import VersionManifest, VersionStore

SHORT = 8
"""Longer lists are not shown."""
LOOPS, EITHER = "where the loop saves", "where the loop saves, or a job's folder"
EXPORTED = "where the loop saves; a job's folder; or whatever else init_from= takes"


def add_parser(commands: Any) -> None:
    checkpoint = commands.add_parser("checkpoint", help="list, check, copy, export, import or delete checkpoints")
    actions = checkpoint.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, command: Any, help: str, where: str = LOOPS) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(name, help=help)
        parser.add_argument("path", metavar="PATH_OR_URL", help=where)
        parser.set_defaults(command=lambda options: _told(command, options))
        return parser

    action("list", _list, "the versions that are there", EITHER)
    for name, command, help in (
        ("show", _show, "what is in a version"),
        ("verify", _verify, "read every byte, and check it"),
        ("export", export, "a model's weights, for plain torch, Hugging Face or torch.distributed.checkpoint"),
        ("copy", _copy, "to another place, checked on the way"),
    ):
        where = EXPORTED if name == "export" else LOOPS if name == "copy" else EITHER
        parser = action(name, command, help, where)
        which = "all" if name in ("verify", "copy") else "the newest that is whole"
        parser.add_argument("--version", type=int, help=f"which one; of a job: its step (default: {which})")
        if name == "export":
            parser.add_argument("file", metavar="TO", help="the file, or the new folder, to write; a path or URL")
            parser.add_argument("--object", default="model", help="the name it was saved under (default: model)")
            parser.add_argument(
                "--best", action="store_true", help="of a job, the best model by its validations, not the newest"
            )
            parser.add_argument(
                "--format",
                choices=("safetensors", "pt2", "huggingface", "dcp"),
                help="one file (default for TO that ends in .safetensors); of a job, the model with its code, for "
                "torch.export.load (.pt2); a folder as save_pretrained writes it (default otherwise); or a directory "
                "of torch.distributed.checkpoint",
            )
            parser.add_argument(
                "--optimizer",
                nargs="?",
                const="optimizer",
                default="",
                metavar="NAME",
                help="dcp: with the optimizer's state, by the name that it has there, and in a loop (optimizer)",
            )
            parser.add_argument("--shard-mb", type=float, help="huggingface: megabytes of a file (default: 5000)")
        elif name == "copy":
            parser.add_argument("to", metavar="TO", help="a folder or URL")
    into = action("import", import_, "weights as the first checkpoint of a new place: for load_check_point", EXPORTED)
    into.add_argument("to", metavar="TO", help="where the loop will save: a folder or URL without checkpoints")
    into.add_argument("--object", default="model", help="the name it has in the loop, and in FROM (default: model)")
    into.add_argument("--version", type=int, help="of what a loop or a job saved: which one (default: the newest)")
    prune = action("prune", _prune, "delete what is not to be kept, and what crashes left")
    prune.add_argument("--keep", type=int, required=True, help="how many of the newest to keep")
    prune.add_argument("--every", type=int, default=0, help="and the first of each so many versions")
    prune.add_argument("--best", default="", help="and the best by this metric")
    prune.add_argument("--mode", choices=("min", "max"), help="which value is the best (default: min)")


def _told(command: Any, options: argparse.Namespace) -> int:
    """A storage's own errors as ours."""
    from graphft.runtime.coordination.runs import weights_source

    options.path = os.fspath(weights_source(options.path))
    try:
        return int(command(options))
    except (GraphftError, BrokenPipeError):  # the latter is of the terminal, not the storage
        raise
    except OSError as error:
        raise GraphftError(
            f"{options.path}: {describe(error)}", rule="storage", help="is the path right, and the storage there?"
        ) from error


def _place(path: str, **options: Any) -> CheckPoints:
    from graphft.runtime.loop.check_points import CheckPoints

    return CheckPoints(path, **options)


def _there(path: str) -> tuple[CheckPoints, list[int]]:
    """The place, and its committed versions, the newest first. Raises UsageError if there are none."""
    place = _place(path)
    versions = place.store.all_committed()
    if not versions:
        _check_root(place, path)
        hint = "give the path that save_check_point was given; of a job, its folder: list, show, verify, export"
        if any(name.startswith("step-") for name in place.fs.list_dirs(path)):
            hint = (
                "these are the checkpoints of a job: give the job's folder, the one above (list, show, verify, export)"
            )
        if place.fs.size(f"{place.path}/job.json") is not None:
            hint = "it is a job: `cp -r` copies its folder, and transpile(keep_checkpoints=) says how many it keeps"
        raise UsageError(f"{path} has no checkpoint of a training loop", rule="no-checkpoint", help=hint)
    return place, versions


def _check_root(place: CheckPoints, path: str) -> None:
    """Raises GraphftError where nothing is: nothing can be said of checkpoints then."""
    if bucket := place.fs.missing_bucket(place.path):
        raise GraphftError(
            f"{path} cannot be read: the bucket {bucket} is not there, or this process may not list it",
            rule="storage",
            help="is the URL right, and are the store's own variables (AWS_ENDPOINT_URL, AWS_PROFILE, ...)?",
        )
    if not place.fs.stat(place.path):
        raise UsageError(
            f"there is nothing at {path}", rule="no-checkpoint", help="is the path right, and what holds it mounted?"
        )


def _chosen(options: argparse.Namespace, versions: list[int]) -> list[int]:
    if options.version is None:
        return versions
    if options.version not in versions:
        raise UsageError(
            f"{options.path} has no checkpoint {options.version}", rule="no-checkpoint", help=f"it has {versions}"
        )
    return [options.version]


def _of_job(options: argparse.Namespace) -> list[JobCheckpoint] | None:
    """The checkpoints of the job whose folder was given; None if it is no job's. Raises UsageError if it has none."""
    from graphft.runtime.interchange.job_checkpoints import job_checkpoints

    folder = _job_folder(options.path)
    if not (folder / "job.json").exists():
        return None
    found = job_checkpoints(folder)
    version = getattr(options, "version", None)
    if version is not None:
        found = [c for c in found if c.manifest is not None and c.manifest.step == version]
    if not found:
        what = "checkpoint" if version is None else f"checkpoint of step {version}"
        raise UsageError(
            f"{options.path} has no {what}", rule="no-checkpoint", help=f"graphft checkpoint list {options.path}"
        )
    return found


def _job_folder(path: str) -> Path:
    """Of a job's storage, a copy of its record for as long as this command runs."""
    from graphft.runtime.coordination.job_storage import is_url, stored_run
    from graphft.runtime.coordination.runs import copy_of

    return copy_of(path) if is_url(path) and stored_run(path) else Path(path)


def _list(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        from graphft.runtime.interchange.job_checkpoints import HEAD

        print("\n".join([HEAD, *(checkpoint.line() for checkpoint in job)]))
        return 0
    from graphft.runtime.checkpoint.store import NO_MANIFEST
    from graphft.runtime.loop.version_store import DamagedVersion, DeletedVersion

    place, versions = _there(options.path)
    lines = []
    for version in versions:
        try:
            lines.append(_line(place.store.manifest(version)))
        except DeletedVersion:
            continue
        except DamagedVersion as error:
            lines.append(f"{version:>8}  DAMAGED: {error.message}")
    if not lines:
        return _list(options)  # there are newer ones by now
    lines += [f"{version:>8}  {NO_MANIFEST}" for version in place.store.without_manifest()]
    whose = "metrics  (as its TrainStatus had them)"
    head = f"{'version':>8}  {'saved':19}  {'epoch':>5} {'step':>9} {'offset':>7}  {'size':>10}  {whose}"
    print("\n".join([head, *lines]))
    return 0


def _line(manifest: VersionManifest) -> str:
    from graphft.runtime.loop.train_status import TrainStatus

    status = TrainStatus.from_json(manifest.status)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.made["at"]))
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in status.metrics.items())
    if manifest.needs:
        metrics = f"{metrics}  {_needs(manifest)}".strip()
    return (
        f"{manifest.version:>8}  {when}  {status.next():>5} {status.step:>9} {status.offset:>7}  "
        f"{size_in_words(manifest.bytes):>10}  {metrics}"
    ).rstrip()


def _needs(manifest: VersionManifest) -> str:
    """Of a delta, the versions that it needs files of."""
    needed = sorted({int(name.partition("/")[0].rpartition("-")[2]) for name in manifest.needs})
    return f"(a delta, needs files of {', '.join(map(str, needed))})"


def _show(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        while (lines := _lines_of(job)) is None:
            job = _of_job(options) or []  # there is a newer one by now
        print("\n".join(lines))
        return 0
    from graphft.runtime.loop.version_store import DeletedVersion

    place, versions = _there(options.path)
    try:
        manifest = _newest_manifest(place.store, _chosen(options, versions))
        tensors = place.store.tensors_in(manifest)
    except DeletedVersion:
        return _show(options)  # there is a newer one by now
    print(_line(manifest).strip())
    print("  ".join(f"{name} {value}" for name, value in manifest.made.items() if name != "at"))
    for name, tensor in tensors.items():
        print(f"  {name}  {tensor.dtype} {tensor.shape}")
    for name, value in _plain(manifest.state["state"]):
        print(f"  {name}  {value}")
    return 0


def _newest_manifest(store: VersionStore, versions: list[int]) -> VersionManifest:
    """Of these, in their order, the first that is whole; those that are not are told. Raises DamagedVersion."""
    from graphft.runtime.loop.version_store import DamagedVersion, DeletedVersion

    for version in versions[:-1]:
        try:
            return store.manifest(version)
        except DeletedVersion:
            raise
        except DamagedVersion as error:
            print(error.message, file=sys.stderr)
    return store.manifest(versions[-1])


def _plain(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a manifest's state that are no tensors; of lists, the short ones."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        yield name, state
    elif isinstance(state, dict) and len(state) == 1 and next(iter(state)).startswith("$"):
        ((kind, inner),) = state.items()
        if kind in ("$float", "$int", "$dtype", "$device"):
            yield name, inner
        elif kind not in ("$tensor", "$parameter"):
            yield from _plain(inner[0] if kind == "$module" else inner, name)
    elif not isinstance(state, list) or len(state) <= SHORT:
        for key, value in items:
            yield from _plain(value, f"{name}.{key}" if name else str(key))


def _lines_of(found: list[JobCheckpoint]) -> list[str] | None:
    """What each part holds of the newest that is whole (or of the step that was asked for). None: the job has deleted
    it meanwhile."""
    from graphft.runtime.checkpoint.described import MADE, place_in_words
    from graphft.runtime.checkpoint.discards import DISCARDED
    from graphft.runtime.checkpoint.store import DamagedCheckpoint

    checkpoint = next((c for c in found if c.manifest is not None), None)
    if checkpoint is None or checkpoint.manifest is None:
        raise GraphftError(found[0].line(), rule="checkpoint", help="none is whole: graphft checkpoint verify")
    meta = checkpoint.manifest.meta
    lines = [
        checkpoint.line().strip(),
        "  ".join(
            [f"run {checkpoint.manifest.run}", *(f"{k} {v}" for k, v in meta.get(MADE, {}).items() if k != "at")]
        ),
    ]
    if place := place_in_words(meta):
        lines.append(f"data  {place}")
    for chunk, discarded in meta.get(DISCARDED, {}).items():
        lines.append(f"discarded of chunk {chunk}  (`records`: their places in the chunk, from 0)  {discarded}")
    for part in checkpoint.manifest.parts:
        try:
            tensors, ledger = checkpoint.store.read_part(checkpoint.manifest, part.shard)
        except DamagedCheckpoint:
            if checkpoint.store.has_manifest(checkpoint.directory):
                raise
            return None
        needs = f"; needs {', '.join(part.entry.needs)}" if part.entry.needs else ""
        lines.append(f"{part.file}  {size_in_words(part.entry.bytes)}{needs}")
        if ledger:
            lines.append(f"  ledger  {ledger}")
        for name, tensor in tensors.items():
            lines.append(f"  {name}  {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
    return lines


def _verify_job(found: list[JobCheckpoint]) -> int:
    from graphft.runtime.checkpoint.store import NO_MANIFEST
    from graphft.runtime.interchange.job_checkpoints import GONE

    damaged = counted = 0
    for checkpoint in found:
        wrong = checkpoint.verify(_Progress(str(checkpoint.path), checkpoint.bytes))
        counted += wrong != NO_MANIFEST
        damaged += wrong not in ("", GONE, NO_MANIFEST)
        print(f"{checkpoint.path}: {wrong or f'good ({size_in_words(checkpoint.bytes)})'}")
    return 1 if damaged or not counted else 0


def _verify_model(path: str) -> int:
    """Of a job that is complete, as far as its folder or storage tells: 1 if its model is damaged."""
    from graphft.runtime.coordination.job_storage import MODEL, is_url
    from graphft.runtime.fs import file_system
    from graphft.runtime.interchange.weights import read_weights

    fs, root = file_system(path)
    if fs.size(f"{root}/{MODEL}") is None:
        return 0
    try:
        size = sum(tensor.nbytes for tensor in read_weights(path if is_url(path) else Path(path)).values())
    except GraphftError as error:
        print(f"{path}/{MODEL}: {error.message}")
        return 1
    print(f"{path}/{MODEL}: good ({size_in_words(size)})")
    return 0


def _verify(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        of_all = options.version is None
        return max(_verify_job(job), _verify_model(options.path) if of_all else 0)
    from graphft.runtime.checkpoint.store import NO_MANIFEST
    from graphft.runtime.loop.version_store import DamagedVersion, DeletedVersion

    place, versions = _there(options.path)
    damaged = 0
    for version in _chosen(options, versions):
        try:
            manifest = place.store.manifest(version)
            place.store.verify(manifest, _Progress(f"checkpoint {version}", manifest.bytes))
            print(f"checkpoint {version}: good ({size_in_words(manifest.bytes)})")
        except DeletedVersion:
            print(f"checkpoint {version}: deleted meanwhile")
        except DamagedVersion as error:
            damaged += 1
            print(f"checkpoint {version}: {error.message}")
    if options.version is None:
        for version in place.store.without_manifest():
            print(f"checkpoint {version}: {NO_MANIFEST}")
    return 1 if damaged else 0


class _Progress:
    """On a terminal: how much of it is done."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, max(total, 1), 0

    def __call__(self, count: int) -> None:
        self.done += count
        if sys.stderr.isatty():
            print(f"\r{self.what}: {100 * self.done // self.total} %  ", end="", file=sys.stderr, flush=True)
            if self.done >= self.total:
                print("\r", end="", file=sys.stderr)


def _copy(options: argparse.Namespace) -> int:
    """What is whole is copied, whatever else is damaged."""
    from graphft.runtime.loop.version_store import DamagedVersion, DeletedVersion

    place, versions = _there(options.path)
    target = _place(options.to)
    copied = not_copied = 0
    for version in sorted(_chosen(options, versions)):
        try:
            said = _copied(place.store.manifest(version), place.store, target.store, options.to)
            copied += not said.startswith("NOT")
        except DeletedVersion:
            print(f"checkpoint {version}: not copied, it was deleted meanwhile")
            continue
        except DamagedVersion as error:
            said = f"NOT copied, {error.message}"
        not_copied += said.startswith("NOT")
        print(f"checkpoint {version}: {said}")
    return 1 if not_copied or not copied else 0


def _copied(manifest: VersionManifest, source: VersionStore, target: VersionStore, to: str) -> str:
    """What became of it. Raises DamagedVersion if it is damaged in `source`."""
    from graphft.runtime.loop.version_store import DamagedVersion

    told, repaired = _Progress(f"checkpoint {manifest.version}", manifest.bytes), ""
    if target.committed(manifest.version):
        if not target.has(manifest):
            return f"NOT copied, {to} has another one of this number"
        try:
            target.verify(target.manifest(manifest.version), told)
            return f"{to} has it already"
        except DamagedVersion as error:
            repaired = f", as {error.message}"
    target.copy(manifest, source, told)
    return f"copied ({size_in_words(manifest.bytes)}){repaired}"


def _prune(options: argparse.Namespace) -> int:
    from graphft.runtime.loop.retention import Keep

    if options.mode and not options.best:
        raise UsageError("--mode is for --best", rule="usage", help="name the metric: --best loss")
    keep = Keep(options.keep, options.every, options.best, options.mode or "min")
    _there(options.path)
    place = _place(options.path, keep=keep)
    gone = place.prune(_Progress(options.path, 0))
    print(f"deleted: {', '.join(map(str, sorted(gone))) or 'nothing'}")
    return 0
