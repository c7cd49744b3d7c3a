"""The status of a running job, read from etcd: for the display, `graphft status` and tests."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, Validated
from graphft.runtime.etcd.channel import FULL_HELP
from graphft.runtime.etcd.model import KV, EtcdUsageError, Store
from graphft.runtime.process.identity import Identity
from graphft.runtime.protocol.chunk_queue import Discards, chunk_of
from graphft.runtime.protocol.task_pass import TaskCounts

UNKNOWN_JOB = "unknown-job"
"""The rule of the error that etcd knows nothing of a job."""
ETCD_FULL = f"etcd is FULL: its quota is used up, and the job waits; {FULL_HELP}"
_SPEC = re.compile(r"/([A-Za-z0-9_-]{1,64})/spec")


@dataclass(frozen=True)
class JobStatus:
    """One look at a job. Without fault tolerance there are no slots, and no queue.

    `step` is the lowest version among the live shards, or that of the newest checkpoint where that is more: a shard
    that is being restored reports no version. In async mode `generation` counts the times that a shard went back, and
    `checkpoint` is the lowest of the shards' own. `pservers` (by index), `trainers` and `coordinators` (by id) have
    registrations with reports; `loading`, processes that load something before they register; `places`, processes on
    other machines as their launchers tell: `pid` is 0 while there is no room. `etcd_full`, if its reader has asked:
    etcd's quota is used up, the records are old, and the job waits.
    """

    job: str
    state: str
    spec: dict[str, Any]
    generation: int
    pass_index: int
    step: int
    checkpoint: int | None
    pservers: dict[int, dict[str, Any]] = field(default_factory=dict)
    trainers: dict[str, dict[str, Any]] = field(default_factory=dict)
    coordinators: dict[str, dict[str, Any]] = field(default_factory=dict)
    loading: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: list[dict[str, Any]] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    discarded: dict[int, Discards] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    failure: str = ""
    wanted_passes: int = 0
    validating: list[int] = field(default_factory=list)
    validated: Validated | None = None
    etcd_full: bool = False

    @property
    def told(self) -> str:
        """The state, for people: etcd says `running` until the job has ended, whoever is there."""
        if self.idle:
            return f"{self.state}, but {'only a coordinator' if self.coordinators else 'no process of it'} is there"
        return self.state

    @property
    def idle(self) -> bool:
        """True if it is not over, and nobody works on it: a coordinator gives out work, and does none."""
        return self.state == "running" and not (self.pservers or self.trainers or self.loading)

    @property
    def on_demand(self) -> bool:
        return bool(self.spec.get("on_demand"))

    @property
    def total_steps(self) -> int | None:
        return None if self.on_demand else int(self.spec.get("total_steps", 0))

    @property
    def passes(self) -> int:
        """The passes of the job; where they are on demand, those that are asked for so far."""
        return self.wanted_passes if self.on_demand else int(self.spec.get("passes", 0))

    @property
    def has_coordinator(self) -> bool:
        return bool(self.spec.get("dispatch") == "coordinator")

    @property
    def waiting(self) -> str:
        """ "a coordinator", if the job waits for one that serves; else ""."""
        serves = any(coordinator["serving"] for coordinator in self.coordinators.values())
        lacks = self.has_coordinator and self.state == "running" and not self.idle and not serves
        return "a coordinator" * lacks

    @property
    def without_room(self) -> dict[str, list[str]]:
        """The processes that the engine has no room for, by the resources that they wait for."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if not place["pid"]:
                found.setdefault(place["place"], []).append(f"{place['role']} {place['index']}")
        return found

    @property
    def skipped_steps(self) -> int:
        return max((p.get("skipped_steps", 0) for p in self.pservers.values()), default=0)

    @property
    def loss(self) -> float | None:
        """Returns that of the newest step of shard 0; None before the first, and where it is not finite."""
        found: float | None = self.pservers.get(0, {}).get("metrics", {}).get("loss")
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the other results of `loss_fn` for that step, but for those that are not finite."""
        found = self.pservers.get(0, {}).get("metrics", {})
        return {name: value for name, value in found.items() if name != "loss" and value is not None}

    @property
    def learning_rates(self) -> dict[str, float]:
        """The optimizers' last ones, by name; several where parameter groups differ."""
        found: dict[str, float] = {}
        for member in (*self.trainers.values(), *self.pservers.values()):
            found |= {name: rate for name, rate in member.get("learning_rates", {}).items() if rate is not None}
        return dict(sorted(found.items()))

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since `checkpoint` was written; async: since the oldest of the shards' newest was. None: nobody
        tells."""
        ages = [age for shard in self.pservers.values() if (age := shard.get("checkpoint_age")) is not None]
        if not ages or self.checkpoint is None:
            return None
        return float(min(ages) if self.spec["sync"] else max(ages))

    @property
    def samples_per_second(self) -> float:
        return sum(t.get("samples_per_second", 0.0) for t in self.trainers.values())

    def in_brief(self, etcd: str = "") -> dict[str, Any]:
        """Returns the part of the JSON that a job's folder has, too (`FolderStatus.to_json`). `etcd`: its endpoints."""
        return {
            "job": self.job,
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.pass_index,
            "epochs": self.passes,
            "loss": self.loss,
            "waiting": self.waiting,
            "failure": self.failure,
            "folder": self.spec.get("folder", ""),
            "etcd": etcd,
        }

    def to_json(self, etcd: str = "", left: float | None = None) -> str:
        """Returns all that is known. `etcd`: its endpoints; `left`: seconds until its last step."""
        names = ("metrics", "learning_rates", "checkpoint_age", "samples_per_second", "skipped_steps")
        more = {name: getattr(self, name) for name in names} | {"seconds_left": left}
        return json.dumps(msgspec.to_builtins(self) | self.in_brief(etcd) | more, indent=1, sort_keys=True, default=str)


def list_jobs(etcd: Store) -> list[str]:
    found = (_SPEC.fullmatch(kv.key) for kv in etcd.range("/", keys_only=True).kvs)
    return sorted(match[1] for match in found if match is not None)


def unknown_job(etcd: Store, keys: Keys) -> GraphftError:
    try:
        known = ", ".join(list_jobs(etcd)) or "none"
    except EtcdUsageError:
        known = "this user may not see them"  # but one job's records
    return GraphftError(f"etcd knows no job named {keys.job}", rule=UNKNOWN_JOB, help=f"jobs that it knows: {known}")


def read_status(
    etcd: Store, keys: Keys, deadline: float | None = None, *, brief: bool = False, begins: int = 0
) -> JobStatus:
    """Reads the status, in a few reads of at most `deadline` seconds each; the counts are of the pass that it names.

    `brief`: without the queue's counts and the events. `begins`: the step at which the job goes on, as its reader
    knows; it counts until a pserver has reported. Raises GraphftError when etcd knows no such job, EtcdError.
    """
    while True:
        control = {kv.key: kv for kv in etcd.range(keys.control, deadline=deadline).kvs}
        status = _status(etcd, keys, control, deadline, brief, begins)
        if brief or etcd.get(keys.pass_, deadline=deadline) == control.get(keys.pass_):
            return status


def _status(
    etcd: Store, keys: Keys, control: Mapping[str, KV], deadline: float | None, brief: bool, begins: int
) -> JobStatus:
    if keys.spec not in control:
        raise unknown_job(etcd, keys)
    spec = json.loads(control[keys.spec].value)
    view = read_view(keys, control.values())
    generation = view.generation.number if view.generation else sum(g.number for g in view.shard_generations.values())
    reports = {kv.key: json.loads(kv.value) for kv in etcd.range(keys.status, deadline=deadline).kvs}
    pservers = _members(control, keys.pservers, reports, keys.status_of("pserver", ""))
    trainers = _members(control, keys.trainers, reports, keys.status_of("trainer", ""))
    coordinators = _members(control, keys.coordinators, reports, keys.status_of("coordinator", ""))
    for name, coordinator in coordinators.items():
        coordinator["serving"] = view.coordinator is not None and view.coordinator.id == name
    versions = [p["version"] for p in pservers.values() if "version" in p]
    prefix = keys.loading("", "").removesuffix("/")
    loading = {
        key.rsplit("/", 1)[1]: report | {"seconds": max(0.0, time.time() - report["since"])}
        for key, report in reports.items()
        if key.startswith(prefix) and not msgspec.convert(report.get("process", {}), Identity).dead
    }
    own = view.shard_commits.values()
    saved = view.committed.step if view.committed is not None else None
    if saved is None and len(own) == spec["pservers"]:  # async
        saved = min(committed.step for committed in own)
    slowest = min((t.get("pass_index", 0) for t in trainers.values()), default=0)
    pass_index = view.pass_.pass_index if view.pass_ else slowest
    if not spec["sync"]:  # which records the number of passes when all are done
        pass_index = min(pass_index, spec["passes"] - 1)
    dispatch, chunks = spec.get("dispatch", "etcd"), view.pass_.chunks if view.pass_ else 0
    counts = count_queue(etcd, keys, dispatch, pass_index, chunks, deadline) if spec["ft"] and not brief else None
    return JobStatus(
        keys.job,
        view.state or "running",
        spec,
        generation,
        pass_index,
        max(min(versions, default=0), _begun(view, saved, begins)),
        saved,
        dict(sorted((int(index), pserver) for index, pserver in pservers.items())),
        trainers,
        coordinators,
        loading,
        [place for key, told in reports.items() if key.startswith(keys.places) for place in told],
        dict(sorted(view.slots.items())),
        msgspec.to_builtins(counts) if counts is not None else {},
        {} if brief else read_discards(etcd, keys, deadline),
        [] if brief else [event for _, event in read_events(etcd, keys, deadline)],
        f"{view.failure.reason}\nhelp: {view.failure.help}" if view.failure is not None else "",
        view.wanted_passes,
        list(view.validating),
        view.validated,
    )


def read_discards(etcd: Store, keys: Keys, deadline: float | None = None) -> dict[int, Discards]:
    kvs = etcd.range(keys.all_discarded, deadline=deadline).kvs
    return {chunk_of(kv.key): msgspec.json.decode(kv.value, type=Discards) for kv in kvs}


def _begun(view: JobView, saved: int | None, begins: int) -> int:
    """Returns the step that the job does not go back behind: of its newest checkpoint, or of a later generation."""
    begun, committed = view.generation, view.committed
    if begun is not None and (committed is None or begun.number > committed.generation):
        return begun.step
    of_shards = min((generation.step for generation in view.shard_generations.values()), default=begins)
    return of_shards if saved is None else saved


def _members(
    control: Mapping[str, KV], prefix: str, reports: Mapping[str, Any], reported: str
) -> dict[str, dict[str, Any]]:
    found = {key.removeprefix(prefix): json.loads(kv.value) for key, kv in control.items() if key.startswith(prefix)}
    return {name: member | reports.get(reported + name, {}) for name, member in found.items()}


def count_queue(
    store: Store, keys: Keys, dispatch: str, pass_index: int, chunks: int, deadline: float | None = None
) -> TaskCounts | None:
    """Counts the chunks of a pass of `chunks` chunks: by the records that trainers claim them with, or by the
    coordinator (`dispatch`). None: no coordinator has counted so far. Raises EtcdError."""
    if dispatch == "coordinator":
        kv = store.get(keys.task_counts, deadline=deadline)
        if kv is None:
            return None  # it drops the passes that are over: all of their chunks are done
        return msgspec.json.decode(kv.value, type=dict[int, TaskCounts]).get(pass_index, TaskCounts(0, 0, chunks))
    prefix = keys.queue(pass_index)
    todo, pending, done = (store.count(f"{prefix}{name}/", deadline=deadline) for name in ("todo", "pending", "done"))
    return TaskCounts(max(0, todo - pending), pending, done)  # the todo record stays until its chunk is done
