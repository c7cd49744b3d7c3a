"""A real Ray of several nodes on this machine, whose nodes are killed and added."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

QUICK = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""After how long a node counts as dead that does not answer: 2 s, not 15 to 30."""


class Nodes:
    """A head, which stays, and workers of 2 CPUs each. To be used from the main thread."""

    def __init__(self, head_cpus: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {"num_cpus": head_cpus, "include_dashboard": False, "_system_config": QUICK}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers: list[Any] = []

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        self.workers.append(self.cluster.add_node(num_cpus=2))
        return self.workers[-1]

    def kill(self, worker: Any) -> None:
        """Its raylet, by SIGKILL; its workers end when they see that."""
        self.workers.remove(worker)
        self.cluster.remove_node(worker, allow_graceful=False)

    def set(self, count: int) -> None:
        """Adds and kills workers until there are so many."""
        while len(self.workers) > count:
            self.kill(self.workers[-1])
        while len(self.workers) < count:
            self.add()

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@contextmanager
def nodes_of_ray(folder: Path, head_cpus: int = 1) -> Iterator[Nodes]:
    """A head alone. `folder`: for what its nodes write beside Ray's own files."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:
        patch.setenv("RAY_TMPDIR", short)  # it has sockets, whose paths are at most 107 bytes long
        patch.setenv("TMPDIR", str(folder))
        nodes = Nodes(head_cpus)
        try:
            yield nodes
        finally:
            nodes.close()
