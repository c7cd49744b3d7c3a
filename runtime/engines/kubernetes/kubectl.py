"""Calls of kubectl, which knows the way to the cluster and who may do what there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

from graphft.runtime.engines.base import EngineError
from graphft.runtime.engines.kubernetes.cluster_job import Object

SECONDS = 30.0
"""For which a call may take."""


class Kubectl:
    """`command`: the program, and what stands before its verbs. All raise EngineError with what kubectl says."""

    def __init__(self, command: Sequence[str], namespace: str = "") -> None:
        self._command = [*command, *(["--namespace", namespace] if namespace else [])]

    def create(self, item: Object) -> None:
        self._run("create", "--filename", "-", given=json.dumps(item))

    def pods(self, selector: str) -> list[Object]:
        found = json.loads(self._run("get", "pods", "--selector", selector, "--output", "json"))
        return list(found["items"])

    def kill(self, pod: str, signum: int) -> None:
        """Signals the first process of a pod's container, which is the role's."""
        self._run("exec", pod, "--", "sh", "-c", f"kill -{int(signum)} 1")

    def delete(self, *what: str) -> None:
        """Pods at once, without a grace period: those of these names, or `--selector SELECTOR`."""
        options = ("--ignore-not-found", "--grace-period=0", "--force", "--wait=false")
        self._run("delete", "pods", *what, *options)

    def logs(self, pod: str, lines: int) -> list[str]:
        """The last lines; -1: all of them."""
        return self._run("logs", pod, f"--tail={lines}").splitlines()

    def _run(self, *arguments: str, given: str = "") -> str:
        try:
            done = subprocess.run(
                [*self._command, *arguments], input=given, capture_output=True, text=True, check=True, timeout=SECONDS
            )
        except subprocess.CalledProcessError as error:
            raise self._failed(arguments[0], error.stderr.strip()) from error
        except subprocess.TimeoutExpired as error:
            raise self._failed(arguments[0], f"no answer for {SECONDS:.0f} s") from error
        except OSError as error:
            raise self._failed(arguments[0], str(error)) from error
        return done.stdout

    def _failed(self, verb: str, why: str) -> EngineError:
        return EngineError(
            f"kubectl {verb}: {why}", rule="kubectl", help="see whether kubectl reaches the cluster, and may do that"
        )
