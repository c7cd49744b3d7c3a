"""The engine of Ray: each process of a role is the child of an actor, which Ray places by what it takes.

Who starts what again: the launcher's supervisor does it with roles, as on every engine, for it alone tells a failure
from a preemption, and counts. Ray does it with members of etcd (`ray_etcd.py`), which nobody counts. An actor without
room waits, so an autoscaler sees what is wanted.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from graphft.runtime.engines.base import Engine, EngineError, Listed, Order, Process, Run
from graphft.runtime.engines.ray_address import choose_address
from graphft.runtime.engines.ray_etcd import RayEtcd, alive_nodes
from graphft.runtime.engines.ray_process import RayProcess
from graphft.runtime.engines.ray_role import RoleActor
from graphft.runtime.engines.ray_room import describe, is_among, what_lacks
from graphft.runtime.etcd.open import FOLLOW
from graphft.runtime.process.log_tail import last_lines
from graphft.transpiler import read_record

Resources = Mapping[str, Mapping[str, float]]
OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
CLOSE_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""Between two looks at what the nodes have, while a process waits for room."""
PLACE_SECONDS = 3.0
"""For how long Ray may take to place an actor for which there is room."""

log = logging.getLogger("graphft")


class RayEngine(Engine):
    """Made by `Ray.open`. `resources`: by role, what one process takes."""

    reaches_loopback = False

    def __init__(self, run: Run, address: str, resources: Resources, etcd_members: int) -> None:
        self.run, self._resources, self._etcd_members = run, resources, etcd_members
        self._connected = not ray.is_initialized()
        """Whether the connection to Ray is this engine's own."""
        if self._connected:
            ray.init(choose_address(address), log_to_driver=False)
        self._namespace = f"graphft-{read_record(run.job_dir).run_id}"
        self._folder = os.path.join(tempfile.gettempdir(), "graphft-ray", self._namespace)
        self._processes: list[tuple[Order, RayProcess]] = []
        self._numbers = itertools.count()
        self._etcd: RayEtcd | None = None
        self._closing = False
        self._look_at = 0.0
        self._lacks: set[tuple[str, str]] = set()
        """What was said of roles that no node can take."""

    def prepare(self) -> None:
        pass

    def start(self, order: Order) -> RayProcess:
        if self._closing:
            raise EngineError("the engine is being closed", rule="engine")
        self._check_refused(order)
        try:
            actor = self._actor(order).remote(order.name, self._folder)
        except (exceptions.RayError, RuntimeError, ConnectionError) as error:
            raise EngineError(f"Ray takes no actor now: {error}", rule="engine") from error
        log_file = self.run.log(order)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        wants = describe({name: amount for name, amount in self._resources[order.role].items() if amount})
        process = RayProcess(order.name, actor, f"{{{wants}}}", log_file, lambda made: self._begin(order, made))
        self._look_at = 0.0
        self._processes = [(o, p) for o, p in self._processes if p.poll() is None] + [(order, process)]
        return process

    def _check_refused(self, order: Order) -> None:
        """Once, if the last one could not be made: it is tried again after a while, not at once."""
        for other, process in self._processes:
            if other.name == order.name and process.refusal:
                refusal, process.refusal = process.refusal, ""
                raise EngineError(f"Ray cannot make its actor: {refusal}", rule="engine", help="see its log")

    def list(self) -> Sequence[Listed]:
        return [
            Listed(o.role, o.index, p.place, "running" if p.pid else "waiting", p.pid)
            for o, p in self._processes
            if p.poll() is None
        ]

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        return last_lines(self.run.log(order), lines)

    def step(self) -> None:
        waiting = [(order, process) for order, process in self._processes if process.poll() is None and not process.pid]
        if not waiting or self._closing or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except (exceptions.RayError, RuntimeError, ConnectionError):
            return
        for order, process in waiting:
            process.lacks = what_lacks(self._resources[order.role], nodes)
            if process.lacks and (order.role, process.lacks) not in self._lacks:
                self._lacks.add((order.role, process.lacks))
                log.warning("%s has no room: %s. It waits until a node joins that has it", order.name, process.lacks)

    def provide_etcd(self) -> str:
        if self._etcd is None:
            self._etcd = RayEtcd(self._namespace, self._folder, self._etcd_members, self._end_leaseless)
            self._etcd.open()
        return ",".join(self._etcd.endpoints)

    def follow_etcd(self, move: Callable[[Sequence[str]], None]) -> None:
        if self._etcd is not None:
            self._etcd.follow(move)

    def lacks_room(self, process: Process) -> bool:
        """As Ray tells its autoscaler. It does not say of which actor, but what it takes."""
        found = next(((order.role, p) for order, p in self._processes if p is process), None)
        if found is None or found[1].waits_for < PLACE_SECONDS or found[1].lacks:
            return False
        try:
            return is_among(self._resources[found[0]], demands())
        except (exceptions.RayError, RuntimeError, ConnectionError, TimeoutError):
            return False

    def cancel_orders(self) -> None:
        self._closing = True
        for _, process in self._processes:
            if process.poll() is None and not process.pid:
                process.kill()

    def close(self) -> None:
        self._closing = True
        for _, process in self._processes:
            process.kill()
        if self._etcd is not None:
            self._etcd.close()
        end = time.monotonic() + CLOSE_SECONDS
        for _, process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if self._connected and ray.is_initialized():
            ray.shutdown()

    def _end_leaseless(self) -> None:
        """Their leases are lost with etcd's data: they would end when they find that, some of them after a minute."""
        for _, process in self._processes:
            if process.begun:
                process.kill()

    def _begin(self, order: Order, process: RayProcess) -> Any:
        """For an actor that stands: in a thread of its own."""
        etcd, environment = order.etcd, dict(self.run.environment)
        if self._etcd is not None:
            etcd = ",".join(self._etcd.await_answer(lambda: bool(process.taken_back)))
            environment[FOLLOW] = "1"
        command = ["start", order.role, "--job", self.run.job, "--etcd", etcd, "--index", str(order.index)]
        return process.actor.begin.remote(command, environment)

    def _actor(self, order: Order) -> Any:
        wanted = self._resources[order.role]
        custom = {name: amount for name, amount in wanted.items() if name not in OWN_OPTIONS}
        return ray.remote(RoleActor).options(
            name=f"{order.name} #{next(self._numbers)}",
            namespace=self._namespace,
            max_restarts=0,
            max_concurrency=8,
            resources=custom,
            scheduling_strategy=self._strategy(order.role),
            **{option: wanted[name] for name, option in OWN_OPTIONS.items() if name in wanted},
        )

    def _strategy(self, role: str) -> str | NodeAffinitySchedulingStrategy:
        """Shards on nodes far apart, trainers together where there is room: both are wishes, for one process each. A
        placement group would have all of them wait for the last one's room."""
        if role == "pserver":
            return "SPREAD"
        counted = Counter(p.node for o, p in self._processes if o.role == role == "trainer" and p.poll() is None)
        alive = set(alive_nodes())
        node = next((node for node, _ in counted.most_common() if node in alive), "")
        return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True) if node else "DEFAULT"


def demands() -> list[Mapping[str, float]]:
    """What actors and tasks take that have no room, as an autoscaler is told."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address, timeout=1)
    return [b.bundle for d in status.resource_demands.ray_task_actor_demand for b in d.bundles_by_count]
