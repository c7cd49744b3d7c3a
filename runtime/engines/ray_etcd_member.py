"""A member of a job's etcd, on a node of Ray."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Literal

from ray.util import get_node_ip_address

from graphft.fileio import write_atomically
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError
from graphft.runtime.etcd.embedded import free_ports

HEARTBEAT, ELECTION = 100, 1000
"""Milliseconds: etcd's own, for machines of one network."""
START_SECONDS = 60.0
"""For how long a member may take to start."""
LOOK_SECONDS, PAUSE_SECONDS = 0.5, 1.0
"""Between two looks at it, and before one that has ended is started again."""


class EtcdMember:
    """The actor. One that Ray has started again finds on the disk what it was told before."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, Path(folder) / name
        self._told = self.folder / "member.json"
        self._host = get_node_ip_address()
        self._etcd: EmbeddedEtcd | None = None
        if self._told.exists():
            told = json.loads(self._told.read_bytes())
            self._ports = (told["client"], told["peer"])
            self._start(told["cluster"], told["state"])
        else:
            client, peer = free_ports(2, self._host)
            self._ports = (client, peer)

    def addresses(self) -> tuple[str, str]:
        """Of this member: the endpoint for clients, the URL for its peers."""
        return f"{self._host}:{self._ports[0]}", f"http://{self._host}:{self._ports[1]}"

    def begin(self, cluster: str, state: Literal["new", "existing"]) -> None:
        """Starts it, unless Ray has done so again meanwhile. Returns when it answers, if it is the first; one that
        joins answers when it is promoted. Raises EtcdError."""
        etcd = self._etcd
        if etcd is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            client, peer = self._ports
            told = {"client": client, "peer": peer, "cluster": cluster, "state": state}
            write_atomically(self._told, json.dumps(told).encode())
            etcd = self._start(cluster, state)
        if state == "new":
            etcd.await_healthy(START_SECONDS)

    def stay(self) -> None:
        """Returns never: who waits for it learns of the actor's end."""
        threading.Event().wait()

    def _start(self, cluster: str, state: Literal["new", "existing"]) -> EmbeddedEtcd:
        etcd = self._etcd = EmbeddedEtcd(
            self.folder / "etcd",
            host=self._host,
            name=self.name,
            ports=self._ports,
            cluster=cluster,
            state=state,
            heartbeat=HEARTBEAT,
            election=ELECTION,
        )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                etcd.launch()
                break
            except EtcdError as error:  # the one before it is still ending
                if error.rule != "port-busy" or time.monotonic() > end:
                    raise
                time.sleep(LOOK_SECONDS)
        threading.Thread(target=self._end_with, args=(etcd,), name="etcd", daemon=True).start()
        return etcd

    def _end_with(self, etcd: EmbeddedEtcd) -> None:
        while etcd.running:
            time.sleep(LOOK_SECONDS)
        time.sleep(PAUSE_SECONDS)
        os._exit(1)  # Ray starts the actor again
