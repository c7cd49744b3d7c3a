"""Whether the processes of a job can reach each other, as far as their registrations tell."""

from __future__ import annotations

from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.records import Registration
from graphft.runtime.transport.address import is_loopback, split_endpoint


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
