"""What a running job looks like from outside: read from etcd, for the display, `graphft status` and tests."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, Validated
from graphft.runtime.etcd.channel import FULL_HELP
from graphft.runtime.etcd.model import KV, Store
from graphft.runtime.process.identity import Identity
from graphft.runtime.protocol.chunk_queue import Discards, chunk_of
from graphft.runtime.protocol.task_pass import TaskCounts

UNKNOWN_JOB = "unknown-job"
"""The rule of the error that etcd knows nothing of a job."""
ETCD_FULL = f"etcd is FULL: its quota is used up, and the job waits; {FULL_HELP}"
_SPEC = re.compile(r"/([A-Za-z0-9_-]{1,64})/spec")


@dataclass(frozen=True)
class JobStatus:
    """One look at a job. `step` is the lowest version among the live shards, or what was committed last where that is
    more: a shard that is being restored tells no version.

    Without fault tolerance there are no slots, and no queue.
    Async: `generation` counts the times that a shard went back, `checkpoint` is the lowest of the shards' own.
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
    """By id: those that are registered. `serving`: whether this is the one that trainers are to ask for tasks."""
    loading: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By id: processes that load something before they register: `role`, `what`, for how many `seconds`, `pid`."""
    places: list[dict[str, Any]] = field(default_factory=list)
    """What launchers tell of processes on other machines: `role`, `index`, `place`, and `pid`, 0 while there is no room
    for it."""
    slots: dict[int, str] = field(default_factory=dict)
    queue: dict[str, int] = field(default_factory=dict)
    discarded: dict[int, Discards] = field(default_factory=dict)
    """By chunk, what is discarded of the data."""
    events: list[Event] = field(default_factory=list)
    failure: str = ""
    """Why the job has failed, and what to do about it."""
    wanted_passes: int = 0
    """How many are asked for so far, where they are on demand."""
    validating: list[int] = field(default_factory=list)
    """After how many steps the models were that are being validated."""
    validated: Validated | None = None
    """What the validation came to that was over last."""
    generation_step: int | None = None
    """Where the generation began; None before the first, and in async mode."""
    etcd_full: bool = False
    """Whether etcd's quota is used up: nothing is recorded, what is told here is old, and the job waits. (As its reader
    has asked; etcd orders that question among its writes.)"""

    @property
    def told(self) -> str:
        """Its state, for people: `running` is what etcd says of a job until it has ended, whoever is there."""
        if self.idle:
            return f"{self.state}, but {'only a coordinator' if self.coordinators else 'no process of it'} is there"
        return self.state

    @property
    def idle(self) -> bool:
        """Not over, and nobody works on it: a coordinator gives out work, and does none."""
        return self.state == "running" and not (self.pservers or self.trainers or self.loading)

    @property
    def on_demand(self) -> bool:
        """Whether its passes are asked for one by one: then nobody knows how many steps it will have."""
        return bool(self.spec.get("on_demand"))

    @property
    def total_steps(self) -> int | None:
        """None where that is not known."""
        return None if self.on_demand else int(self.spec.get("total_steps", 0))

    @property
    def passes(self) -> int:
        """Of the job; of one whose passes are on demand, those that are asked for so far."""
        return self.wanted_passes if self.on_demand else int(self.spec.get("passes", 0))

    @property
    def has_coordinator(self) -> bool:
        """Whether its tasks are given out by a coordinator, if one is there."""
        return bool(self.spec.get("dispatch") == "coordinator")

    @property
    def waiting(self) -> str:
        """What a job that runs cannot go on without, in words: "a coordinator" that serves, when trainers have worked
        off what they hold. "" if nothing is missing, or nobody is there to wait."""
        serves = any(coordinator["serving"] for coordinator in self.coordinators.values())
        lacks = self.has_coordinator and self.state == "running" and not self.idle and not serves
        return "a coordinator" * lacks

    @property
    def without_room(self) -> dict[str, list[str]]:
        """By what they wait for, the processes that the engine has no room for."""
        found: dict[str, list[str]] = {}
        for place in self.places:
            if not place["pid"]:
                found.setdefault(place["place"], []).append(f"{place['role']} {place['index']}")
        return found

    def place_of(self, role: str, index: int, pid: int) -> str:
        """Of a process that is registered; "" if no launcher tells one."""
        wanted = (role, index, pid)
        return next((p["place"] for p in self.places if (p["role"], p["index"], p["pid"]) == wanted), "")

    @property
    def skipped_steps(self) -> int:
        """Steps (async: batches, units) that were left out because a loss or gradient was not finite."""
        return max((p.get("skipped_steps", 0) for p in self.pservers.values()), default=0)

    @property
    def loss(self) -> float | None:
        """Of the newest step that shard 0 has applied; None before the first."""
        return self._newest.get("loss")

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss_fn` returned beside the loss, of that step."""
        return {name: value for name, value in self._newest.items() if name != "loss"}

    @property
    def _newest(self) -> dict[str, float]:
        """Without what is not finite."""
        found = self.pservers.get(0, {}).get("metrics", {})
        return {name: value for name, value in found.items() if value is not None}

    @property
    def learning_rates(self) -> dict[str, float]:
        """By name, as the optimizers used them last; several where parameter groups differ. Empty before the first
        step."""
        found: dict[str, float] = {}
        for member in (*self.trainers.values(), *self.pservers.values()):
            found |= {name: rate for name, rate in member.get("learning_rates", {}).items() if rate is not None}
        return dict(sorted(found.items()))

    @property
    def checkpoint_age(self) -> float | None:
        """Seconds since `checkpoint` was written; async: since the oldest of the shards' newest was. None: there is
        none, or no shard has told."""
        ages = [age for shard in self.pservers.values() if (age := shard.get("checkpoint_age")) is not None]
        if not ages or self.checkpoint is None:
            return None
        return float(min(ages) if self.spec["sync"] else max(ages))

    @property
    def samples_per_second(self) -> float:
        return sum(t.get("samples_per_second", 0.0) for t in self.trainers.values())

    def in_brief(self, etcd: str = "") -> dict[str, Any]:
        """What every JSON of a job has, whether it runs or not (`FolderStatus.to_json`). `etcd`: its endpoints."""
        return {
            "job": self.job,
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "pass": self.pass_index,
            "passes": self.passes,
            "loss": self.loss,
            "waiting": self.waiting,
            "failure": self.failure,
            "folder": self.spec.get("folder", ""),
            "etcd": etcd,
        }

    def to_json(self, etcd: str = "", left: float | None = None) -> str:
        """`in_brief`, and all that is known. `etcd`: its endpoints; `left`: seconds until its last step."""
        data = (
            asdict(self)
            | self.in_brief(etcd)
            | {
                "metrics": self.metrics,
                "learning_rates": self.learning_rates,
                "checkpoint_age": self.checkpoint_age,
                "samples_per_second": self.samples_per_second,
                "skipped_steps": self.skipped_steps,
                "seconds_left": left,
            }
        )
        data["validated"] = msgspec.to_builtins(self.validated)
        data["events"] = [msgspec.to_builtins(e) for e in self.events]
        data["discarded"] = {chunk: msgspec.to_builtins(found) for chunk, found in self.discarded.items()}
        return json.dumps(data, indent=1, sort_keys=True, default=str)


def list_jobs(etcd: Store) -> list[str]:
    """Names of the jobs that this etcd knows."""
    found = (_SPEC.fullmatch(kv.key) for kv in etcd.range("/", keys_only=True).kvs)
    return sorted(match[1] for match in found if match is not None)


def read_status(
    etcd: Store, keys: Keys, deadline: float | None = None, *, brief: bool = False, begins: int = 0
) -> JobStatus:
    """One look, in a few reads of at most `deadline` seconds each; what it counts is of the pass that it tells.

    `brief`: without the queue's counts and the events, for a reader that looks all the time and shows nothing.
    `begins`: at which step the job goes on, as its reader knows; it counts until a pserver has told etcd.
    Raises GraphftError when etcd knows no such job, EtcdUnreachable when it does not answer.
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
        known = ", ".join(list_jobs(etcd)) or "none"
        raise GraphftError(f"etcd knows no job named {keys.job}", rule=UNKNOWN_JOB, help=f"jobs that it knows: {known}")
    spec = json.loads(control[keys.spec].value)
    view = read_view(keys, control.values())
    generation = view.generation.number if view.generation else sum(g.number for g in view.shard_generations.values())
    reports = {kv.key: json.loads(kv.value) for kv in etcd.range(keys.status, deadline=deadline).kvs}
    pservers = _members(control, keys.pservers, reports, f"{keys.status}pserver/")
    trainers = _members(control, keys.trainers, reports, f"{keys.status}trainer/")
    slots = {
        int(k.removeprefix(keys.slots)): kv.value.decode() for k, kv in control.items() if k.startswith(keys.slots)
    }
    versions = [p["version"] for p in pservers.values() if "version" in p]
    saved = _saved(view, spec["pservers"])
    pass_index = (
        view.pass_.pass_index if view.pass_ else min((t.get("pass_index", 0) for t in trainers.values()), default=0)
    )
    if not spec["sync"]:  # which records the number of passes when all are done
        pass_index = min(pass_index, spec["passes"] - 1)
    coordinators = _members(control, keys.coordinators, reports, f"{keys.status}coordinator/")
    for name, coordinator in coordinators.items():
        coordinator["serving"] = view.coordinator is not None and view.coordinator.id == name
    dispatch, chunks = spec.get("dispatch", "etcd"), view.pass_.chunks if view.pass_ else 0
    counts = count_queue(etcd, keys, dispatch, pass_index, chunks, deadline) if spec["ft"] and not brief else None
    return JobStatus(
        keys.job,
        control[keys.state].value.decode() if keys.state in control else "running",
        spec,
        generation,
        pass_index,
        max(min(versions, default=0), _begun(view, saved, begins)),
        saved,
        {int(k): v for k, v in sorted(pservers.items(), key=lambda kv: int(kv[0]))},
        trainers,
        coordinators,
        _loading(reports, f"{keys.status}loading/"),
        [place for key, told in reports.items() if key.startswith(keys.places) for place in told],
        dict(sorted(slots.items())),
        msgspec.to_builtins(counts) if counts is not None else {},
        {} if brief else read_discards(etcd, keys, deadline),
        [] if brief else [event for _, event in read_events(etcd, keys, deadline)],
        f"{view.failure.reason}\nhelp: {view.failure.help}" if view.failure is not None else "",
        view.wanted_passes,
        list(view.validating),
        view.validated,
        view.generation.step if view.generation is not None else None,
    )


def read_discards(etcd: Store, keys: Keys, deadline: float | None = None) -> dict[int, Discards]:
    """By chunk, what is discarded of the data."""
    kvs = etcd.range(keys.all_discarded, deadline=deadline).kvs
    return {chunk_of(kv.key): msgspec.json.decode(kv.value, type=Discards) for kv in kvs}


def read_metrics(etcd: Store, keys: Keys) -> dict[str, float]:
    """Returns `loss`, and each metric that `loss_fn` returned, of a step at most some seconds ago, as shard 0 has
    reported it last; without those that are not finite. Raises EtcdError."""
    kv = etcd.get(f"{keys.status}pserver/0")
    found: dict[str, Any] = json.loads(kv.value).get("metrics", {}) if kv is not None else {}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _loading(reports: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Reports below `prefix`, by the id of their process, but for those that are seen to be dead: leases are long."""
    return {
        key.rsplit("/", 1)[1]: report | {"seconds": max(0.0, time.time() - report["since"])}
        for key, report in reports.items()
        if key.startswith(prefix) and not msgspec.convert(report.get("process", {}), Identity).dead
    }


def _saved(view: JobView, shards: int) -> int | None:
    """Step of the newest checkpoint; async, until the last one: the lowest of the shards' own."""
    if view.committed is not None:
        return view.committed.step
    return min(c.step for c in view.shard_commits.values()) if len(view.shard_commits) == shards else None


def _begun(view: JobView, saved: int | None, begins: int) -> int:
    """The step that the job does not go back behind: of its newest checkpoint, or the one that a later generation began
    with. A pserver that has not loaded it yet says 0."""
    begun, committed = view.generation, view.committed
    if begun is not None and (committed is None or begun.number > committed.generation):
        return begun.step
    of_shards = min((generation.step for generation in view.shard_generations.values()), default=begins)
    return of_shards if saved is None else saved


def _members(
    control: Mapping[str, KV], prefix: str, reports: Mapping[str, Any], reported: str
) -> dict[str, dict[str, Any]]:
    """Registrations below `prefix`, each with what its process reports of itself."""
    members = {}
    for key, kv in control.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            members[name] = json.loads(kv.value) | reports.get(reported + name, {})
    return members


def count_queue(
    store: Store, keys: Keys, dispatch: str, pass_index: int, chunks: int, deadline: float | None = None
) -> TaskCounts | None:
    """Of a pass of `chunks` chunks: as the records tell that trainers claim their chunks with, or as the coordinator
    does (`dispatch`). None: no coordinator has said anything so far. `deadline`: in seconds, for each read.

    Raises EtcdError.
    """
    if dispatch == "coordinator":
        return _as_told(store, keys, pass_index, chunks, deadline)
    prefix = keys.queue(pass_index)
    todo, pending, done = (store.count(f"{prefix}{name}/", deadline=deadline) for name in ("todo", "pending", "done"))
    return TaskCounts(max(0, todo - pending), pending, done)  # the todo record stays until its chunk is done


def _as_told(store: Store, keys: Keys, pass_index: int, chunks: int, deadline: float | None) -> TaskCounts | None:
    """By the coordinator, which drops the passes that are over: all of their chunks are done."""
    kv = store.get(keys.task_counts, deadline=deadline)
    if kv is None:
        return None
    return msgspec.json.decode(kv.value, type=dict[int, TaskCounts]).get(pass_index, TaskCounts(0, 0, chunks))
