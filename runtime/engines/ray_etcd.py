"""An etcd of the job's own on Ray: members on several nodes, and replaced on others when their nodes are lost.

A member is an actor that Ray starts again as long as its node lives (`max_restarts=-1`): its data are on that node's
disk. One that is lost with its node is replaced by etcd's own means: the cluster is told to do without it, and then of
a new member, which gets the data from the others as a learner, and then its vote: etcd answers all the while. When a
majority is lost at once, so are the data: a new etcd begins with none, and the job goes on from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from graphft.runtime.engines.base import EngineError
from graphft.runtime.engines.etcd_members import Change, next_change
from graphft.runtime.engines.ray_etcd_member import START_SECONDS, EtcdMember
from graphft.runtime.engines.ray_process import kill
from graphft.runtime.etcd import Etcd, EtcdError

log = logging.getLogger("graphft")

ROUND_SECONDS, PROMOTE_SECONDS = 0.5, 0.1
OPEN_SECONDS = 180.0
ANSWER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    node: str
    actor: Any
    end: Any
    """Of the actor, for `ray.wait`."""
    client: str
    peer: str
    number: int
    """etcd's id of it."""
    learner: bool = False

    @property
    def gone(self) -> bool:
        return bool(ray.wait([self.end], timeout=0)[0])


class RayEtcd:
    """The launcher's end: keeps `wanted` members at work, from a thread. `folder`: for their data, on each node.
    `on_loss` is called when all data were lost, and another etcd stands.
    """

    def __init__(self, namespace: str, folder: str, wanted: int, on_loss: Callable[[], None]) -> None:
        self._namespace, self._folder, self._wanted, self._on_loss = namespace, folder, wanted, on_loss
        self._members: list[_Member] = []
        self._admin: Etcd | None = None
        self._moves: list[Callable[[list[str]], None]] = []
        self._lock = threading.Lock()
        self._stands, self._closed = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="ray: etcd", daemon=True)

    def open(self) -> None:
        """Returns when all members that there is room for answer. Raises EngineError."""
        self._thread.start()
        if not self._stands.wait(OPEN_SECONDS) or self._error is not None:
            raise EngineError(
                f"etcd could not be started on Ray: {self._error or f'no answer in {OPEN_SECONDS:.0f} s'}",
                rule="ray-etcd",
                help="see the logs of its actors (ray logs); each node needs the program: graphft etcd --install",
            )

    @property
    def endpoints(self) -> list[str]:
        """Of the members that are there now, and answer."""
        with self._lock:
            return clients(self._members)

    def await_answer(self, enough: Callable[[], bool]) -> list[str]:
        """Its endpoints, once it answers there, or it is `enough` of waiting. To be called after `open`."""
        assert self._admin is not None
        while not enough() and not self._closed.is_set():
            endpoints = self.endpoints
            with contextlib.suppress(EtcdError):
                self._admin.ping(ANSWER_SECONDS)
                if set(endpoints) == set(self._admin.endpoints) == set(self.endpoints):
                    return endpoints
        return self.endpoints

    def follow(self, move: Callable[[list[str]], None]) -> None:
        """Has `move` called with the endpoints, now and whenever they have changed. From another thread."""
        with self._lock:
            self._moves.append(move)
        move(self.endpoints)

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(2 * START_SECONDS)
        for member in self._members:
            kill(member.actor)
        if self._admin is not None:
            self._admin.close()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed.wait(0.0 if not self._stands.is_set() else ROUND_SECONDS):
            try:
                change = self._next()
                if change is not None:
                    self._carry_out(change)
                elif self._members:
                    self._stands.set()
                    self._error = None
            except (exceptions.RayError, EtcdError, RuntimeError) as error:
                self._error = error
                log.info("etcd's members cannot be changed now: %s", error)
                self._closed.wait(ROUND_SECONDS)

    def _next(self) -> Change | None:
        nodes, members = alive_nodes(), self._members
        learners = [member.name for member in members if member.learner]
        return next_change({m.name: m.node for m in members}, self._lost(nodes), nodes, self._wanted, learners)

    def _lost(self, nodes: list[str]) -> set[str]:
        return {member.name for member in self._members if member.node not in nodes or member.gone}

    def _carry_out(self, change: Change) -> None:
        log.info("etcd: %s %s: %s", change.kind, change.subject[:14], change.reason)
        if change.kind == "begin":
            self._begin(change)
        elif change.kind == "add":
            self._add(change.subject)
        else:
            self._remove(next(member for member in self._members if member.name == change.subject))

    def _begin(self, change: Change) -> None:
        lost = bool(self._members)
        if lost:
            log.warning(
                "etcd is lost (%s): a new one begins; the job goes on from its newest checkpoint", change.reason
            )
        for member in self._members:
            kill(member.actor)
        name, actor, client, peer = self._make(change.subject)
        try:
            ray.get(actor.begin.remote(f"{name}={peer}", "new"), timeout=START_SECONDS)
            if self._admin is None:
                self._admin = Etcd([client])
            self._admin.move([client])
            number = next(m.id for m in self._admin.members() if m.name == name)
        except BaseException:
            kill(actor)
            raise
        self._set([_Member(name, change.subject, actor, actor.stay.remote(), client, peer, number)])
        if lost:
            self._on_loss()

    def _add(self, node: str) -> None:
        assert self._admin is not None
        self._forget_strangers()
        name, actor, client, peer = self._make(node)
        try:
            number = self._admin.member_add(peer, learner=True)
        except EtcdError:
            kill(actor)
            raise
        others = self._members
        member = _Member(name, node, actor, actor.stay.remote(), client, peer, number, learner=True)
        self._set([*others, member])
        cluster = ",".join(f"{m.name}={m.peer}" for m in self._members)
        try:
            ray.get(actor.begin.remote(cluster, "existing"), timeout=START_SECONDS)
            self._promote(member)
        except (exceptions.RayError, TimeoutError, EtcdError):
            kill(actor)  # so it is lost, and removed
            raise
        self._set([*others, replace(member, learner=False)])

    def _promote(self, member: _Member) -> None:
        """Returns when it has its vote; etcd gives none to a member that lacks data. Raises EtcdError."""
        assert self._admin is not None
        end = time.monotonic() + START_SECONDS
        while any(each.learner for each in self._admin.members() if each.id == member.number):
            try:
                self._admin.member_promote(member.number)
            except EtcdError:
                if time.monotonic() > end or self._closed.is_set() or self._lost(alive_nodes()):
                    raise
                time.sleep(PROMOTE_SECONDS)

    def _remove(self, member: _Member) -> None:
        assert self._admin is not None
        left = [m for m in self._members if m is not member]
        self._admin.move(clients(left))
        self._admin.member_remove(member.number)
        self._set(left)
        kill(member.actor)

    def _forget_strangers(self) -> None:
        """Removes members that were added though the answer was lost: they would count, and never start."""
        assert self._admin is not None
        known = {member.peer for member in self._members}
        for stranger in self._admin.members():
            if not known & set(stranger.peer_urls):
                self._admin.member_remove(stranger.id)

    def _make(self, node: str) -> tuple[str, Any, str, str]:
        name = f"etcd-{uuid.uuid4().hex[:8]}"
        # `soft`: nowhere else, for its data are there.
        actor = (
            ray.remote(EtcdMember)
            .options(
                name=name,
                namespace=self._namespace,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,  # so that `stay` outlives a restart
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(name, self._folder)
        )
        try:
            client, peer = ray.get(actor.addresses.remote(), timeout=START_SECONDS)
        except BaseException:
            kill(actor)
            raise
        return name, actor, client, peer

    def _set(self, members: list[_Member]) -> None:
        with self._lock:
            self._members = members
            moves = list(self._moves)
        endpoints = self.endpoints
        if self._admin is not None:
            self._admin.move(endpoints)
        for move in moves:
            with contextlib.suppress(EtcdError):
                move(endpoints)


def clients(members: list[_Member]) -> list[str]:
    """The endpoints of those that answer clients."""
    return [member.client for member in members if not member.learner]


def alive_nodes() -> list[str]:
    """Their ids, this process's own node first: if that is lost, so is the launcher."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
    return sorted(nodes, key=lambda node: (node != own, node))
