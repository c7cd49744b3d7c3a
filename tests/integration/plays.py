"""Running jobs with all their real parts, while something happens to them; and looking at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.connect import read_note
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import supervise
from graphft.runtime.launcher.launch import run_job
from graphft.runtime.launcher.result import Result
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.transpiler.job import Job
from graphft.transpiler.layout import slices_of
from tests.integration.training import LOOKED
from tests.support.files import put
from tests.support.nursery import Nursery
from tests.support.waiting import command_line

LOOK_SECONDS = 0.1
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script.py")
RUN = Path("jobs", "blobs", "runs", "1")
"""The folder of the script, where it is started."""


@dataclass(frozen=True)
class Act:
    """Something that is done to a running job, once, when its status is so; again, if `do` returns False."""

    when: Callable[[JobStatus], bool]
    do: Callable[[Supervisor], Any]


def send(signum: int, role: str, *indices: int) -> Callable[[Supervisor], bool]:
    """Returns what sends a signal to these processes of a role, when all are there."""

    def do(supervisor: Supervisor) -> bool:
        if not all(supervisor.children[role, index].alive for index in indices):
            return False
        for index in indices:
            supervisor.signal(role, index, signum)
        return True

    return do


def kill(role: str, *indices: int) -> Callable[[Supervisor], bool]:
    """Returns what SIGKILLs these processes of a role."""
    return send(signal.SIGKILL, role, *indices)


def at(step: int) -> Callable[[JobStatus], bool]:
    """All shards are alive and at `step` or beyond."""
    return lambda status: status.step >= step and len(status.pservers) == status.spec["pservers"]


def kill_first(members: Mapping[Any, Mapping[str, Any]]) -> bool:
    """SIGKILLs the first of these processes of a status; False if it has just ended: the next status tells another."""
    try:
        os.kill(next(iter(members.values()))["pid"], signal.SIGKILL)
    except (StopIteration, ProcessLookupError):
        return False
    return True


def settled(status: JobStatus) -> bool:
    """All trainers are there, and every slot is held by one of them, by as many as there can be."""
    holders = set(status.slots.values())
    wanted = min(len(status.trainers), status.spec["trainers"])
    return len(status.slots) == status.spec["trainers"] and holders <= status.trainers.keys() and len(holders) == wanted


class Pace:
    """The seconds that a batch takes, in a file that the running job's trainers read."""

    SLOW, SLOWEST = 0.7, 2.5

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0.05)

    def set(self, seconds: float) -> None:
        put(self.file, str(seconds))
        if not seconds:  # nothing more is waited for
            self.file.with_suffix(LOOKED).unlink(missing_ok=True)


def note_look(config: Mapping[str, Any], status: JobStatus | None, waits: bool) -> None:
    """Tells the job's trainers that it is looked at. While a test `waits` for something, and the job nears its end, it
    goes slowly: on a busy machine what is seen of it is older. `config`: the job's, as JSON."""
    if not (pace := config["data"]["source"].get("args", {}).get("pace", "")):
        return
    file, seconds = Path(pace), max(Pace.SLOWEST, config["chunk_timeout"] / 8)
    if not waits:
        file.with_suffix(LOOKED).unlink(missing_ok=True)
        return
    file.with_suffix(LOOKED).touch()
    late = status is not None and 3 * status.step >= 2 * status.spec["total_steps"]
    if late and float(file.read_text()) < seconds:
        put(file, str(seconds))


@dataclass
class Played:
    """A run that is over. `statuses`: what was seen on the way."""

    job: Job
    folder: Path
    result: Result
    statuses: list[JobStatus]

    @property
    def events(self) -> list[str]:
        """Kinds of the events, in order."""
        return [event.kind for event in self.statuses[-1].events]

    @property
    def state(self) -> dict[str, Tensor]:
        return whole_state(self.job, self.folder)


def play(job: Job, folder: Path, acts: Sequence[Act] = (), **options: Any) -> Played:
    """Runs the job with all roles on this machine; the acts are done one after the other. All must have been done."""
    left, statuses = list(acts), []
    config = job.config.to_json()

    def look(supervisor: Supervisor, status: JobStatus) -> None:
        statuses.append(status)
        acts = bool(left) and left[0].when(status)
        note_look(config, None if acts else status, bool(left))
        if acts and left[0].do(supervisor) is not False:
            del left[0]

    usual, supervise.STATUS_EVERY_SECONDS = supervise.STATUS_EVERY_SECONDS, LOOK_SECONDS
    try:
        result = run_job(job, on_status=look, job_dir=str(folder), **{"quiet": True, **options})
    finally:
        supervise.STATUS_EVERY_SECONDS = usual
    assert not left, f"the job was over before {len(left)} of {len(acts)} acts: {statuses[-1:]}"
    return Played(job, folder, result, statuses)


class Program:
    """A process that a test starts in a folder: `python ARGUMENTS`. Its output goes to a file there."""

    nursery: ClassVar[Nursery]

    def __init__(self, folder: Path, *arguments: str | Path, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self.arguments = [str(a) for a in arguments]
        self.file = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        with self.file.open("wb") as out:
            self.process = self.nursery.python(self.arguments, folder, env, out)

    @property
    def output(self) -> str:
        return self.file.read_text()

    def wait(self, seconds: float = 240.0) -> int:
        """Returns its exit status. A process that takes longer is killed, and the test fails."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.arguments} hangs: {self.output}") from None

    def says(self, text: str, seconds: float = 300.0) -> None:
        """Waits until its output has `text`, while it runs."""
        end = time.monotonic() + seconds
        while True:
            over = self.process.poll() is not None or time.monotonic() > end  # before its last words are read
            if text in self.output:
                return
            if over:
                raise AssertionError(f"{self.arguments} does not say {text!r}, but {self.output}")
            time.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def until(
        self, job_dir: Path, condition: Callable[[JobStatus], bool], etcd: str = "", seconds: float = 300.0
    ) -> JobStatus:
        """Waits for a status of the job in this folder, while this process runs.

        From then on the job is not looked at, so that it goes slowly, until this is called again, or its pace is 0.
        """
        end, file = time.monotonic() + seconds, job_dir / "job.json"
        while self.process.poll() is None and time.monotonic() < end:
            status = look(job_dir, etcd)
            found = status is not None and condition(status)
            if file.exists():
                note_look(json.loads(file.read_bytes())["config"], None if found else status, True)
            if found and status is not None:
                return status
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"{self.arguments}: not seen what was waited for; its output: {self.output}")


def look(job_dir: Path, etcd: str = "") -> JobStatus | None:
    """Returns the status of the job in a folder; None when it has no etcd that answers, or has not begun."""
    endpoints = etcd or read_note(job_dir).endpoints
    if not endpoints or not (job_dir / "job.json").exists():
        return None
    name = json.loads((job_dir / "job.json").read_bytes())["config"]["name"]
    try:
        with Etcd(endpoints.split(","), deadline=1.0) as client:
            return read_status(client, Keys(name), deadline=1.0)
    except GraphftError:
        return None


def whole_state(job: Job, folder: Path) -> dict[str, Tensor]:
    """Returns the newest checkpoint's state by the names that parameters, buffers etc. have in one process."""
    store = checkpoints_of(folder)
    newest = next(iter(store.manifests()))
    assert newest.step == job.config.total_steps
    shards = [store.read_part(newest, i)[0] for i in range(job.config.pservers)]
    state: dict[str, Tensor] = {}
    for variable in job.trainer_program().of_kind(Kind.PARAM, Kind.BUFFER):
        slices = slices_of(variable)
        for name in shards[slices[0].shard]:
            kind = name.removeprefix(slices[0].name)
            if name.startswith(slices[0].name) and (kind == "" or kind.startswith("@")):
                parts = [shards[s.shard][s.name + kind].reshape(-1) for s in slices]
                same = all(p.numel() == 1 for p in parts) and len(parts) > 1  # a counter that every slice has
                state[variable.name + kind] = parts[0] if same else torch.cat(parts)
    return state


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [n for n in one if not torch.equal(one[n], other[n])]
    assert not different, f"not bit-identical: {different}"


def assert_model(model: Path, eager: Mapping[str, Tensor]) -> None:
    """It was trained in one process: gradients are summed in another order there, some 80 steps of Adam long."""
    torch.testing.assert_close(graphft.read_weights(model), dict(eager), rtol=1e-3, atol=1e-4)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Returns the processes that run in `folder`, or have it in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in part for part in [process.cwd(), *process.cmdline()]):
                found.append(process)
        except psutil.Error:
            continue
    return found


def etcds_of(folder: Path) -> list[psutil.Process]:
    """Returns those of them that are etcd."""
    found = []
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error, OSError):
            found += [process] if "etcd" in Path(process.exe()).name else []
    return found


def await_gone(folder: Path, seconds: float = 60.0) -> list[str]:
    """Returns the command lines of the processes of `folder` that are there after so long; they are killed then."""
    end = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    lines = [" ".join(command_line(p)) for p in left]
    for process in left:
        process.kill()
    return lines
