"""Keeps a launcher's own etcd at work: one that has died, or was stopped, or answers nothing, is started again.

Where its disk is full, that is told, and the job goes on when there is room again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import psutil

from graphft.runtime.etcd import EmbeddedEtcd, EtcdError
from graphft.runtime.launcher.tell import tell

log = logging.getLogger("graphft")

TRIES = 5
STOPPED_SECONDS, SILENT_SECONDS, FULL_SECONDS = 5.0, 60.0, 2.0
"""It may answer nothing for so long: stopped by a signal, while the waiting roles' leases still live; and running;
and before a full disk is told, or it is started again on one."""


class EtcdKeeper:
    """To be asked all the time. Its data stay, whatever happens: etcd has written what it has acknowledged."""

    def __init__(self, etcd: EmbeddedEtcd, restarted: Callable[[str], None] = lambda why: None) -> None:
        """`restarted`: is told why, once it answers again."""
        self._etcd, self._restarted = etcd, restarted
        self._silent_since: float | None = None
        self._told, self._again_at = False, 0.0

    def step(self) -> None:
        """Starts it again if it has died."""
        if not self._etcd.running and time.monotonic() >= self._again_at:
            self._restart("died")

    def heard(self, answered: bool) -> None:
        """Takes note: it has `answered` the last question, or has not."""
        if answered:
            self._silent_since, self._told = None, False
            return
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        if now - self._silent_since > FULL_SECONDS and self._etcd.full_disk:
            self._tell_full()
        if self._etcd.running and now - self._silent_since > (STOPPED_SECONDS if self._stopped() else SILENT_SECONDS):
            self._restart(f"has not answered for {now - self._silent_since:.0f} s")

    def _stopped(self) -> bool:
        try:
            return bool(psutil.Process(self._etcd.pid).status() == psutil.STATUS_STOPPED)
        except (psutil.Error, EtcdError):
            return False

    def _tell_full(self) -> None:
        self._again_at = time.monotonic() + FULL_SECONDS
        if not self._told:
            self._told = True
            tell(f"etcd cannot write: {self._etcd.full_disk}; the job waits for room")

    def _restart(self, why: str) -> None:
        """Starts it again with its data; once more if it is killed while it starts."""
        if not self._etcd.has_data:
            raise EtcdError(
                f"etcd {why}, and its data in {self._etcd.data_dir} are gone: this run cannot go on",
                rule="etcd-data-gone",
                help="the job's folder was deleted while it ran? Put a copy of it "
                "back, if there is one, and start the job again: it goes on from its newest checkpoint",
            )
        if not self._told:
            log.warning("etcd %s, starting it again with its data", why)
        self._silent_since = None
        for left in reversed(range(TRIES)):
            try:
                self._etcd.restart()
                self._restarted(why)
                return
            except EtcdError as error:
                if error.rule == "disk-full":
                    self._tell_full()
                    return
                if not left:
                    raise
