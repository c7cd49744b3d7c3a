"""`graphft checkpoint`: looks at the checkpoints of a loop, checks, copies and deletes them; takes weights out and in.

Safe to run beside a loop that saves: what it writes counts when it is whole, and the newest is never deleted.
"""

from __future__ import annotations

import argparse
import atexit
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError, describe

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.runtime.interchange.job_checkpoints import JobCheckpoint
    from graphft.runtime.loop.check_points import CheckPoints
    from graphft.runtime.loop.version_store import VersionManifest

MEGABYTE = 1e6
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
        ("export", _export, "a model's weights, for plain torch, Hugging Face or torch.distributed.checkpoint"),
        ("copy", _copy, "to another place, checked on the way"),
    ):
        where = EXPORTED if name == "export" else LOOPS if name == "copy" else EITHER
        parser = action(name, command, help, where)
        which = "all" if name in ("verify", "copy") else "the newest that is whole"
        parser.add_argument("--version", type=int, help=f"which one; of a job: its step (default: {which})")
        if name == "export":
            parser.add_argument("file", type=Path, metavar="TO", help="the file, or the new folder, to write")
            parser.add_argument("--object", default="model", help="the name it was saved under (default: model)")
            parser.add_argument(
                "--format",
                choices=("safetensors", "huggingface", "dcp"),
                help="one file (default for TO that ends in .safetensors), a folder as save_pretrained writes it "
                "(default otherwise), or a directory of torch.distributed.checkpoint",
            )
            parser.add_argument(
                "--shard-mb", type=float, default=5000.0, help="huggingface: megabytes of a file (default: 5000)"
            )
        elif name == "copy":
            parser.add_argument("to", metavar="TO", help="a folder or URL")
    into = action("import", _import, "weights as the first checkpoint of a new place: for load_check_point", EXPORTED)
    into.add_argument("to", metavar="TO", help="where the loop will save: a folder or URL without checkpoints")
    into.add_argument("--object", default="model", help="the name it has in the loop, and in FROM (default: model)")
    into.add_argument("--version", type=int, help="of what a loop or a job saved: which one (default: the newest)")
    prune = action("prune", _prune, "delete what is not to be kept, and what crashes left")
    prune.add_argument("--keep", type=int, required=True, help="how many of the newest to keep")
    prune.add_argument("--every", type=int, default=0, help="and each whose version is a multiple of this")
    prune.add_argument("--best", default="", help="and the best by this metric")
    prune.add_argument("--mode", choices=("min", "max"), default="min", help="which value is the best")


def _told(command: Any, options: argparse.Namespace) -> int:
    """A storage's own errors as ours."""
    try:
        return int(command(options))
    except BrokenPipeError:  # of the terminal, not the storage
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
    versions = [v for v in place.store.versions() if place.store.committed(v)]
    if not versions:
        hint = "give the path that save_check_point was given; of a job, its folder: list, show, verify, export"
        if any(name.startswith("step-") for name in place.fs.list_dirs(path)):
            hint = (
                "these are the checkpoints of a job: give the job's folder, the one above (list, show, verify, export)"
            )
        raise UsageError(f"{path} has no checkpoint of a training loop", rule="no-checkpoint", help=hint)
    return place, versions


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
    from graphft.runtime.coordination.job_storage import fetch, is_url, stored_run

    if not is_url(path) or not stored_run(path):
        return Path(path)
    scratch = tempfile.mkdtemp(prefix="graphft-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    fetch(path, Path(scratch, "job"), whole=False)
    return Path(scratch, "job")


def _list(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        from graphft.runtime.interchange.job_checkpoints import HEAD

        print("\n".join([HEAD, *(checkpoint.line() for checkpoint in job)]))
        return 0
    from graphft.runtime.loop.version_store import DamagedVersion

    place, versions = _there(options.path)
    print(f"{'version':>8}  {'saved':19}  {'epoch':>5} {'step':>9} {'offset':>7}  {'MB':>10}  metrics")
    for version in versions:
        try:
            manifest = place.store.manifest(version)
        except DamagedVersion as error:
            print(f"{version:>8}  DAMAGED: {error.message}")
            continue
        print(_line(manifest))
    return 0


def _line(manifest: VersionManifest) -> str:
    from graphft.runtime.loop.train_status import TrainStatus

    status = TrainStatus.from_json(manifest.status)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.made["at"]))
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in status.metrics.items())
    return (
        f"{manifest.version:>8}  {when}  {status.next():>5} {status.step:>9} {status.offset:>7}  "
        f"{manifest.bytes / MEGABYTE:>10.1f}  {metrics}"
    ).rstrip()


def _show(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        return _show_job(job)
    place, versions = _there(options.path)
    manifest = place.store.manifest(_chosen(options, versions)[0])
    print(_line(manifest).strip())
    print("  ".join(f"{name} {value}" for name, value in manifest.made.items() if name != "at"))
    for name, tensor in place.store.tensors_in(manifest).items():
        print(f"  {name}  {tensor.dtype} {tensor.shape}")
    return 0


def _show_job(found: list[JobCheckpoint]) -> int:
    """The newest that is whole (or of the step that was asked for), with what each part holds."""
    checkpoint = next((c for c in found if c.manifest is not None), None)
    if checkpoint is None or checkpoint.manifest is None:
        raise GraphftError(found[0].damage, rule="checkpoint", help="none is whole: graphft checkpoint verify")
    print(checkpoint.line().strip())
    made = checkpoint.manifest.meta.get("made", {})
    print("  ".join([f"run {checkpoint.manifest.run}", *(f"{k} {v}" for k, v in made.items() if k != "at")]))
    for part in checkpoint.manifest.parts:
        tensors, _ = checkpoint.store.read_part(checkpoint.manifest, part.shard)
        needs = f"; needs {', '.join(part.entry.needs)}" if part.entry.needs else ""
        print(f"{part.file}  {part.entry.bytes / MEGABYTE:.1f} MB{needs}")
        for name, tensor in tensors.items():
            print(f"  {name}  {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
    return 0


def _verify_job(found: list[JobCheckpoint]) -> int:
    from graphft.runtime.interchange.job_checkpoints import GONE

    damaged = 0
    for checkpoint in found:
        wrong = checkpoint.verify(_Progress(str(checkpoint.path), checkpoint.bytes))
        damaged += bool(wrong) and wrong != GONE
        print(f"{checkpoint.path}: {wrong or f'good ({checkpoint.bytes / MEGABYTE:.1f} MB)'}")
    return 1 if damaged else 0


def _verify(options: argparse.Namespace) -> int:
    if (job := _of_job(options)) is not None:
        return _verify_job(job)
    from graphft.runtime.loop.version_store import DamagedVersion

    place, versions = _there(options.path)
    damaged = 0
    for version in _chosen(options, versions):
        try:
            manifest = place.store.manifest(version)
            place.store.verify(manifest, _Progress(f"checkpoint {version}", manifest.bytes))
            print(f"checkpoint {version}: good ({manifest.bytes / MEGABYTE:.1f} MB)")
        except DamagedVersion as error:
            damaged += 1
            print(f"checkpoint {version}: {error.message}")
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


def _export(options: argparse.Namespace) -> int:
    """Any source that `read_weights` knows; with --version, what a training loop saved."""
    tensors = _tensors(options)
    target: Path = options.file
    form = options.format or ("safetensors" if target.suffix == ".safetensors" else "huggingface")
    if form == "safetensors":
        from graphft.tensor_file import write_tensors

        write_tensors(target, tensors, {"format": "pt"})
        written = [target.name]
    elif form == "huggingface":
        from graphft.runtime.interchange.huggingface import write_weights

        if not 0 < options.shard_mb < float("inf"):
            raise UsageError(f"--shard-mb is {options.shard_mb}", rule="usage", help="give megabytes: --shard-mb 5000")
        written = write_weights(target, tensors, round(options.shard_mb * MEGABYTE))
    else:
        from graphft.runtime.interchange.distributed import write_distributed

        write_distributed(target, tensors, options.object)
        written = [f"a directory of torch.distributed.checkpoint, with {options.object!r}"]
    size = sum(t.nbytes for t in tensors.values()) / MEGABYTE
    print(f"{target}: {len(tensors)} tensors of {options.object!r}, {size:.1f} MB, in {', '.join(written)}")
    return 0


class _Weights:
    """What was read, as an object that a loop would save."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.tensors = state_dict


def _import(options: argparse.Namespace) -> int:
    """What `_export` reads, in the other direction; the loop begins at its epoch 0, with new random states."""
    from graphft.runtime.loop.train_status import TrainStatus

    place = _place(options.to)
    is_file = place.fs.size(place.path) is not None
    if found := ["a file"] if is_file else place.fs.ls_dir(place.path):
        raise UsageError(
            f"{options.to} is not a new place: there is {', '.join(found[:3])}{', ...' * (len(found) > 3)}",
            rule="usage",
            help="give one that is not there yet; a loop that has saved already takes weights by "
            "model.load_state_dict(graphft.read_weights(...))",
        )
    tensors = _tensors(options)
    state = {options.object: _Weights(tensors)}
    version = place.save(state, TrainStatus(), random_states=False)
    size = sum(t.nbytes for t in tensors.values()) / MEGABYTE
    print(f"{options.to}: checkpoint {version}, {len(tensors)} tensors as {options.object!r}, {size:.1f} MB")
    return 0


def _tensors(options: argparse.Namespace) -> dict[str, Tensor]:
    from graphft.runtime.interchange.weights import read_weights

    return read_weights(options.path, options.object, options.version)


def _copy(options: argparse.Namespace) -> int:
    place, versions = _there(options.path)
    target = _place(options.to)
    others = 0
    for version in sorted(_chosen(options, versions)):
        manifest = place.store.manifest(version)
        if not target.store.committed(version):
            target.store.copy(manifest, place.store, _Progress(f"checkpoint {version}", manifest.bytes))
            print(f"checkpoint {version}: copied ({manifest.bytes / MEGABYTE:.1f} MB)")
        elif target.store.manifest(version) == manifest:
            print(f"checkpoint {version}: {options.to} has it already")
        else:
            others += 1
            print(f"checkpoint {version}: NOT copied, {options.to} has another one of this number")
    return 1 if others else 0


def _prune(options: argparse.Namespace) -> int:
    from graphft.runtime.loop.retention import Keep

    keep = Keep(options.keep, options.every, options.best, options.mode)
    _there(options.path)
    place = _place(options.path, keep=keep)
    gone = place.prune(_Progress(options.path, 0))
    print(f"deleted: {', '.join(map(str, sorted(gone))) or 'nothing'}")
    return 0
