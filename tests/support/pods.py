"""One pod of a manifest as a local process: what its kubelet would do. It is no cluster.

What is real: command, arguments, environment, fields of the pod in it, volumes (as folders), probes over HTTP, restart
policy with its back-off, the signals and the grace period of a pod's end. What is not: images, users and capabilities,
limits of resources, process and network namespaces. In their place each pod has a loopback address of its own, and so
each may listen on the same ports; "every interface" (0.0.0.0) becomes that address. Names of Services and of pods are
replaced by addresses where they are hosts of URLs, and paths of mounts by folders; a claim that all pods mount is this
machine's folder of that path. Waits between probes, and before a
restart, are a tenth of what they are on a cluster; a probe's patience is not.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.runtime.etcd.embedded import find_etcd
from graphft.runtime.process.role_process import tied

ROOT = Path(__file__).parents[2]
HURRY = 10
BACK_OFF, LONGEST_BACK_OFF = 10.0 / HURRY, 300.0 / HURRY
HOST = re.compile(r"(?<=//)[a-z0-9-]+(\.[a-z0-9-]+)?(?=[:/])")
VARIABLE = re.compile(r"\$\$|\$\((\w+)\)")
KILLED, ASKED = 128 + signal.SIGKILL, 128 + signal.SIGTERM

Object = Mapping[str, Any]


def program(name: str) -> list[str]:
    """The image's program, as this machine has it."""
    if name == "graphft":
        return [sys.executable, "-m", "graphft"]
    if Path(name).name == "etcd":
        return [str(find_etcd())]
    return [shutil.which(name) or name]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replaces names of variables as a kubelet does."""
    return VARIABLE.sub(lambda m: "$" if m[0] == "$$" else variables.get(m[1], m[0]), text)


class Pod:
    """Used by one thread, but for `signal`. `resolve`: a name's address. `claims`: folders of its claims."""

    def __init__(
        self,
        name: str,
        template: Object,
        fields: Mapping[str, str],
        folder: Path,
        address: str,
        resolve: Callable[[str], str],
        claims: Mapping[str, Path],
    ) -> None:
        self.name, self.template, self.folder, self.address = name, template, folder, address
        self.labels: Mapping[str, str] = template["metadata"]["labels"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.fields = {"metadata.name": name, "status.podIP": address, **fields}
        self.resolve = resolve
        mounts = self.container["volumeMounts"]
        shared = {v["name"] for v in self.spec.get("volumes", []) if "persistentVolumeClaim" in v}
        self.mounts = {m["mountPath"]: claims.get(m["name"], folder / m["name"]) for m in mounts}
        self.mounts |= {m["mountPath"]: Path(m["mountPath"]) for m in mounts if m["name"] in shared}
        for place in (folder, *self.mounts.values()):
            place.mkdir(parents=True, exist_ok=True)
        self.log = folder.parent / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.finished: int | None = None
        """The exit status of a pod that does not start again."""
        self._restart_at = 0.0
        self._kill_at: float | None = None
        self._probe: Probe | None = None

    @property
    def ready(self) -> bool:
        """The last probes have passed."""
        alive = self.process is not None and self.finished is None and self._kill_at is None
        return alive and self._probe is not None and self._probe.ready

    @property
    def leaving(self) -> bool:
        return self._kill_at is not None

    def step(self) -> None:
        """Does what a kubelet does now and then."""
        now = time.monotonic()
        if self.finished is not None:
            return
        if self.process is None:
            if self.leaving:
                self.finished = ASKED
            elif now >= self._restart_at:
                self._start()
            return
        status = self.process.poll()
        if status is not None:
            self._ended(status if status >= 0 else 128 - status)
        elif self._kill_at is not None:
            if now >= self._kill_at:
                self.process.kill()
        else:
            assert not (self._probe and self._probe.dead), f"{self.name} was alive, and does not say so any more"

    def _ended(self, status: int) -> None:
        self._note(f"ended with {status}")
        if self._probe is not None:
            self._probe.close()
        self.process = None
        if self.spec.get("restartPolicy") == "Never" or self.leaving:
            self.finished = status
            return
        pause = min(LONGEST_BACK_OFF, BACK_OFF * 2 ** (self.restarts - 1)) if self.restarts else 0.0
        self.restarts += 1
        self._restart_at = time.monotonic() + pause

    def delete(self) -> None:
        """SIGTERM, and SIGKILL when its grace period is over."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + float(self.spec["terminationGracePeriodSeconds"])
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        process = self.process
        if process is not None:
            process.send_signal(number)

    def end(self) -> None:
        """At once."""
        if self._probe is not None:
            self._probe.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process, self.finished = None, self.finished or KILLED

    # -- the container's process --------------------------------------------------------------------------------

    def _start(self) -> None:
        variables: dict[str, str] = {}
        for variable in self.container.get("env", []):
            value = variable.get("value")
            if value is None:
                value = self.fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            variables[variable["name"]] = self._here(expanded(value, variables))
        words = [expanded(word, variables) for word in self.container["command"]]
        command = [*program(words[0]), *map(self._here, words[1:])]
        given = {n: v for n, v in os.environ.items() if not n.startswith("GRAPHFT_") or n == "GRAPHFT_TEST_SESSION"}
        environment = {**given, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder), **variables}
        self._note("starts")
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                tied(command),
                cwd=self._here(self.container.get("workingDir", str(self.folder))),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._probe = Probe(self.address, self.container)

    def _here(self, text: str) -> str:
        """A text of the manifest, with this machine's folders and addresses."""
        mounts = "|".join(map(re.escape, sorted(self.mounts, key=len, reverse=True)))
        # In one go: a folder of this machine may itself begin like a mount (/tmp).
        text = re.sub(rf"(?<![\w./])({mounts})(?=/|$)", lambda m: str(self.mounts[m[0]]), text)
        return HOST.sub(lambda m: self.resolve(m[0]), text.replace("0.0.0.0", self.address))

    def _note(self, what: str) -> None:
        with self.log.open("a") as out:
            out.write(f"-- {time.strftime('%H:%M:%S')} {self.name} at {self.address} {what}\n")


class Probe:
    """Asks again and again, on a thread. `ready`: as of the last answer; `dead`: it was alive, and has not
    answered so for as long as a kubelet would wait."""

    def __init__(self, address: str, container: Object) -> None:
        self.ready = self.dead = False
        self._closed = threading.Event()
        self._address, self._ports = address, {port["name"]: port["containerPort"] for port in container["ports"]}
        work = (container["readinessProbe"], container["livenessProbe"])
        threading.Thread(target=self._run, args=work, name="probe", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self, readiness: Object, liveness: Object) -> None:
        lived, failures = False, 0
        while not self._closed.wait(readiness["periodSeconds"] / HURRY):
            self.ready, alive = self._passes(readiness), self._passes(liveness)
            lived, failures = lived or alive, 0 if alive else failures + 1
            self.dead = lived and failures > liveness["failureThreshold"] * HURRY

    def _passes(self, probe: Object) -> bool:
        port, path = self._ports[probe["httpGet"]["port"]], probe["httpGet"]["path"]
        try:
            with urllib.request.urlopen(f"http://{self._address}:{port}{path}", timeout=probe["timeoutSeconds"]):
                return True
        except OSError:
            return False
