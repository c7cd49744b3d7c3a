"""The job's control records as one typed value: who lives, who holds which slot, which generation it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import (
    Asked,
    Barred,
    Committed,
    Failure,
    Generation,
    PassRecord,
    Registration,
    Validated,
    Validating,
    decode_asked,
    decode_committed,
    decode_failure,
    decode_generation,
    decode_pass,
)
from graphft.runtime.etcd.model import KV
from graphft.runtime.protocol.decisions import Decided
from graphft.runtime.transport.address import is_loopback, split_endpoint
from graphft.transpiler.validation import MOST_OPEN

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


@dataclass(frozen=True, slots=True)
class JobView:
    """A snapshot of `/<job>/`."""

    pservers: dict[int, Registration] = field(default_factory=dict)
    trainers: dict[str, Registration] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)
    """By slot, the revision of its claim: the same holder may claim a slot again."""
    barred: dict[str, Barred] = field(default_factory=dict)
    generation: Generation | None = None
    committed: Committed | None = None
    state: str = ""
    run: str = ""
    """The id of the run whose records these are."""
    leases: dict[str, int] = field(default_factory=dict)
    """Lease of each registration's process, by registration id."""
    pass_: PassRecord | None = None
    shard_generations: dict[int, Generation] = field(default_factory=dict)
    """Async: each shard's own."""
    shard_commits: dict[int, Committed] = field(default_factory=dict)
    """Async: each shard's own newest checkpoint."""
    asked: Asked | None = None
    """The checkpoint that was asked for last."""
    failure: Failure | None = None
    coordinators: dict[str, Registration] = field(default_factory=dict)
    """By id: the one that serves, and those that stand by."""
    coordinator: Registration | None = None
    """The one that serves."""
    validating: dict[int, Validating] = field(default_factory=dict)
    """By step, the validations that are not over, the oldest first."""
    validated: Validated | None = None
    """What the validation came to that was over last."""
    decided: Decided = field(default_factory=Decided)
    """What follows from the validations so far."""
    wanted_passes: int = 0
    """Of a job whose passes are on demand: how many are wanted so far."""

    @property
    def registrations(self) -> list[Registration]:
        """Of all processes that are registered."""
        return [*self.pservers.values(), *self.trainers.values(), *self.coordinators.values()]

    @property
    def over(self) -> bool:
        return self.state in ("complete", "failed")


def read_view(keys: Keys, kvs: Iterable[KV]) -> JobView:
    """The view that these records of `/<job>/` give. Records of other kinds are ignored."""
    pservers: dict[int, Registration] = {}
    trainers: dict[str, Registration] = {}
    slots: dict[int, KV] = {}
    barred: dict[str, Barred] = {}
    leases: dict[str, int] = {}
    validating: dict[int, Validating] = {}
    coordinators: dict[str, Registration] = {}
    by_key: dict[str, KV] = {}
    for kv in kvs:
        by_key[kv.key] = kv
        if kv.key.startswith(keys.pservers):
            record = msgspec.json.decode(kv.value, type=Registration)
            pservers[int(kv.key.removeprefix(keys.pservers))] = record
            leases[record.id] = kv.lease
        elif kv.key.startswith(keys.trainers):
            record = msgspec.json.decode(kv.value, type=Registration)
            trainers[record.id] = record
            leases[record.id] = kv.lease
        elif kv.key.startswith(keys.coordinators):
            record = msgspec.json.decode(kv.value, type=Registration)
            coordinators[record.id] = record
            leases[record.id] = kv.lease
        elif kv.key.startswith(keys.slots):
            slots[int(kv.key.removeprefix(keys.slots))] = kv
        elif kv.key.startswith(keys.all_validating):
            validating[int(kv.key.removeprefix(keys.all_validating))] = msgspec.json.decode(kv.value, type=Validating)
        elif kv.key.startswith(keys.all_barred):
            barred[kv.key.removeprefix(keys.all_barred)] = msgspec.json.decode(kv.value, type=Barred)
    generations = {
        s: e for s, k in _by_shard(by_key, keys.generation) if (e := decode_generation(by_key[k])) is not None
    }
    commits = {s: c for s, k in _by_shard(by_key, keys.committed) if (c := decode_committed(by_key[k])) is not None}
    address, validated = by_key.get(keys.coordinator_addr), by_key.get(keys.newest_validated)
    decided = by_key.get(keys.decided)
    state, run, wanted = by_key.get(keys.state), by_key.get(keys.run), by_key.get(keys.wanted_passes)
    return JobView(
        pservers,
        trainers,
        {v: kv.value.decode() for v, kv in slots.items()},
        {v: kv.create_revision for v, kv in slots.items()},
        barred,
        decode_generation(by_key.get(keys.generation)),
        decode_committed(by_key.get(keys.committed)),
        state.value.decode() if state else "",
        run.value.decode() if run else "",
        leases,
        decode_pass(by_key.get(keys.pass_)),
        generations,
        commits,
        decode_asked(by_key.get(keys.checkpoint_at)),
        decode_failure(by_key.get(keys.failure)),
        coordinators,
        msgspec.json.decode(address.value, type=Registration) if address is not None else None,
        dict(sorted(validating.items())),
        msgspec.json.decode(validated.value, type=Validated) if validated is not None else None,
        msgspec.json.decode(decided.value, type=Decided) if decided is not None else Decided(),
        int(wanted.value) if wanted is not None else 0,
    )


def wanted_steps(config: JobConfig, view: JobView) -> int:
    """Steps that are wanted so far: all of them, unless the job's passes are on demand, or wait for a validation."""
    until = asked_steps(config, view)
    if config.waits_for_validations:
        known = view.decided.step
        until = min(until, known if view.decided.stopped else config.next_validated(known))
    elif config.validate is not None:
        over = view.validated.step if view.validated is not None else 0
        begun = view.generation.step if view.generation is not None else 0  # an etcd that was lost knows of none before
        until = min(until, config.next_validated(max(over, begun), MOST_OPEN))
    return until


def asked_steps(config: JobConfig, view: JobView) -> int:
    """Steps of the passes that are asked for so far."""
    passes = min(view.wanted_passes, config.passes) if config.passes_on_demand else config.passes
    return config.plan.start_steps[passes]


def _by_shard(by_key: Mapping[str, KV], key: str) -> list[tuple[int, str]]:
    """(shard, key) of the records that shards have below `key`."""
    return [(int(k.removeprefix(f"{key}/")), k) for k in by_key if k.startswith(f"{key}/")]


def out_of_reach(me: Registration, view: JobView) -> str:
    """Why this process and another of the job cannot exchange messages, in words; "" when all is well.

    Others send to pservers and coordinators. One that listens on loopback is reached only by processes of its own
    network.
    """
    pservers = ((f"pserver {shard}", record) for shard, record in sorted(view.pservers.items()))
    coordinators = ((f"coordinator {name}", record) for name, record in sorted(view.coordinators.items()))
    for name, record in (*pservers, *coordinators):
        if record.id != me.id and _apart(me, record) and _local(record):
            return (
                f"{name} listens at {record.address} on {record.host} (pid {record.pid}), which cannot be "
                f"reached from another host or network namespace: this process runs on {me.host} (pid {me.pid})"
            )
    others = (r for r in view.registrations if r.id != me.id and _apart(me, r))
    other = next(others, None) if _local(me) else None
    return (
        ""
        if other is None
        else (
            f"this process listens at {me.address} on {me.host} (pid {me.pid}), which {other.id} on {other.host} "
            f"(pid {other.pid}) cannot reach: it runs on another host or in another network namespace"
        )
    )


def _apart(one: Registration, other: Registration) -> bool:
    """Of a process that does not say where it is, nothing is known."""
    return bool(one.network and other.network) and one.network != other.network


def _local(record: Registration) -> bool:
    return bool(record.address) and is_loopback(split_endpoint(record.address)[0])
