"""The job's control records as one typed value: who lives, who holds which slot, which generation it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

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
    decode,
)
from graphft.runtime.etcd.model import KV
from graphft.runtime.protocol.decisions import Decided
from graphft.runtime.transport.address import is_loopback, split_endpoint
from graphft.transpiler.validation import MOST_OPEN

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class JobView:
    """A snapshot of `/<job>/`. `run` is the id of the run whose records these are; `claims` has the revision of each
    slot's claim, as the same holder may claim a slot again; `leases` those of the registered processes, by id.
    `shard_generations` and `shard_commits` are the shards' own, in async mode. `asked`: the checkpoint that was asked
    for last. `coordinator`: the one of the `coordinators` that serves. `validating`: those that are not over, by step,
    the oldest first; `decided`: what follows from those that are. `guests`: public keys of processes that are no
    members, and talk to servers of the job."""

    pservers: dict[int, Registration] = field(default_factory=dict)
    trainers: dict[str, Registration] = field(default_factory=dict)
    slots: dict[int, str] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)
    barred: dict[str, Barred] = field(default_factory=dict)
    generation: Generation | None = None
    committed: Committed | None = None
    state: str = ""
    run: str = ""
    leases: dict[str, int] = field(default_factory=dict)
    pass_: PassRecord | None = None
    shard_generations: dict[int, Generation] = field(default_factory=dict)
    shard_commits: dict[int, Committed] = field(default_factory=dict)
    asked: Asked | None = None
    failure: Failure | None = None
    coordinators: dict[str, Registration] = field(default_factory=dict)
    coordinator: Registration | None = None
    validating: dict[int, Validating] = field(default_factory=dict)
    validated: Validated | None = None
    decided: Decided = field(default_factory=Decided)
    wanted_passes: int = 0
    guests: frozenset[str] = frozenset()

    @property
    def public_keys(self) -> set[str]:
        """Returns the keys of all processes that may talk to this job's servers."""
        return {*self.guests, *(member.key for member in self.registrations)} - {""}

    @property
    def registrations(self) -> list[Registration]:
        return [*self.pservers.values(), *self.trainers.values(), *self.coordinators.values()]

    @property
    def over(self) -> bool:
        return self.state in ("complete", "failed")


def read_view(keys: Keys, kvs: Iterable[KV]) -> JobView:
    """Returns the view of these records of `/<job>/`. Records of other kinds are ignored."""
    by_key = {kv.key: kv for kv in kvs}
    leases: dict[str, int] = {}

    def below(prefix: str) -> Iterator[tuple[str, KV]]:
        return ((key.removeprefix(prefix), kv) for key, kv in by_key.items() if key.startswith(prefix))

    def records(prefix: str, kind: type[T]) -> dict[str, T]:
        found = {}
        for name, kv in below(prefix):
            found[name] = record = msgspec.json.decode(kv.value, type=kind)
            if isinstance(record, Registration):
                leases[record.id] = kv.lease
        return found

    def numbered(prefix: str, kind: type[T]) -> dict[int, T]:
        return {int(name): record for name, record in sorted(records(prefix, kind).items())}

    def text(key: str) -> str:
        return by_key[key].value.decode() if key in by_key else ""

    slots = {int(name): kv for name, kv in below(keys.slots)}
    return JobView(
        numbered(keys.pservers, Registration),
        records(keys.trainers, Registration),
        {v: kv.value.decode() for v, kv in slots.items()},
        {v: kv.create_revision for v, kv in slots.items()},
        records(keys.all_barred, Barred),
        decode(by_key.get(keys.generation), Generation),
        decode(by_key.get(keys.committed), Committed),
        text(keys.state),
        text(keys.run),
        leases,
        decode(by_key.get(keys.pass_), PassRecord),
        numbered(f"{keys.generation}/", Generation),
        numbered(f"{keys.committed}/", Committed),
        decode(by_key.get(keys.checkpoint_at), Asked),
        decode(by_key.get(keys.failure), Failure),
        records(keys.coordinators, Registration),
        decode(by_key.get(keys.coordinator_addr), Registration),
        numbered(keys.all_validating, Validating),
        decode(by_key.get(keys.newest_validated), Validated),
        decode(by_key.get(keys.decided), Decided) or Decided(),
        int(text(keys.wanted_passes) or 0),
        frozenset(name for name, _ in below(keys.guests)),
    )


def wanted_steps(config: JobConfig, view: JobView) -> int:
    """Returns the steps that are wanted so far: all of them, unless the job's passes are on demand, or wait for a
    validation."""
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
    """Returns the steps of the passes that are asked for so far."""
    passes = min(view.wanted_passes, config.epochs) if config.passes_on_demand else config.epochs
    return config.plan.start_steps[passes]


def out_of_reach(me: Registration, view: JobView) -> str:
    """Returns why this process and another of the job cannot exchange messages, in words; "" when all is well. One that
    listens on loopback is reached only by processes of its own network."""
    apart = [r for r in view.registrations if r.id != me.id and me.network and r.network not in ("", me.network)]
    servers = {r.id: f"pserver {shard}" for shard, r in view.pservers.items()}
    servers |= {name: f"coordinator {name}" for name in view.coordinators}
    for record in apart:
        if record.id in servers and _local(record):
            return (
                f"{servers[record.id]} listens at {record.address} on {record.host} (pid {record.pid}), which cannot "
                f"be reached from another host or network namespace: this process runs on {me.host} (pid {me.pid})"
            )
    if apart and _local(me):
        return (
            f"this process listens at {me.address} on {me.host} (pid {me.pid}), which {apart[0].id} on {apart[0].host} "
            f"(pid {apart[0].pid}) cannot reach: it runs on another host or in another network namespace"
        )
    return ""


def _local(record: Registration) -> bool:
    return bool(record.address) and is_loopback(split_endpoint(record.address)[0])
