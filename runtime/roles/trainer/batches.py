"""A trainer's data: opened; batches read, noted in its work record, checked; waits for storage.

A read that fails as storage is away is made again. While a trainer waits it looks after its shards, and renews no
claim: after `chunk_timeout` a trainer whose storage works may take them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from graphft.errors import GraphftError, describe
from graphft.ops.context import ChunkWork, DataPort, WorkChanged
from graphft.runtime.coordination.job_files import has_model
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import LoadingStatus
from graphft.runtime.data import BatchKey, Prefetcher, Reader
from graphft.runtime.data.reader import START_SECONDS, WAIT_SECONDS, Patience, is_of_storage
from graphft.runtime.etcd import EtcdError, LeaseLost, Session, TransientEtcdError
from graphft.runtime.execute.input_checks import check_dims
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import EXIT_OK
from graphft.runtime.process.work_record import Phase, Place
from graphft.runtime.roles.session import ProcessEnd
from graphft.runtime.roles.trainer.shard_link import POLL_SECONDS, ShardLink

log = logging.getLogger("graphft")

LOOK_SECONDS = 0.5
"""Between two looks at the job; loading that takes less is not reported."""
AWAY = "storage-away"
"""Rule of the error of a trainer that has waited for storage in vain: no chunk's fault."""
QUIET_SECONDS = 0.5
"""Shorter waits are not told."""
TELL_SECONDS = 15.0
"""Between two log lines of one wait."""
BACK_OFF_SECONDS = 10.0
"""For how long a trainer whose work was taken while it waited claims no slot: another one's storage may work."""


class Loading:
    """Reports that a trainer loads its data, which may take long, and keeps its lease meanwhile.

        with Loading(...): load()

    Its thread ends the process when the job is over, or when it was `asked` to leave.
    """

    def __init__(self, member: Member, end: ProcessEnd, what: str, asked: Callable[[], bool]) -> None:
        self.member, self.end, self._asked, self._told = member, end, asked, False
        self._report = LoadingStatus(member.kind, what, time.time(), os.getpid(), socket.gethostname(), identify())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)

    def __enter__(self) -> None:
        if self.member.session is not None:
            self.member.session.keep(self.member.etcd.urls)  # user code that loads may hold the interpreter's lock
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self._withdraw()

    def _run(self) -> None:
        while not self._done.wait(LOOK_SECONDS):
            try:
                if self._asked() or self.member.over() or has_model(self.end.job_dir):
                    log.info("the job is over, or this process was asked to leave: no need to load")
                    self._exit(EXIT_OK)
                if self.member.session is not None:
                    self._keep(self.member.session)
            except LeaseLost as error:
                self.end.lease_lost(error)
            except TransientEtcdError as error:  # it is away: the next try tells
                log.warning("etcd: %s", error.message)
            except GraphftError as error:  # the job has failed, or another run has taken this one's place
                log.error("%s", error)
                self._exit(error.exit_status)

    def _keep(self, session: Session) -> None:
        session.tick()
        session.keep(self.member.etcd.urls)
        if not self._told:
            self.member.etcd.put(self._key, msgspec.json.encode(self._report), session.lease, deadline=1.0)
            self._told = True

    @property
    def _key(self) -> str:
        return self.member.keys.loading(self.member.kind, self.member.id)

    def _withdraw(self) -> None:
        if self._told:
            with contextlib.suppress(EtcdError):  # it ends with the lease then
                self.member.etcd.delete(self._key)

    def _exit(self, status: int) -> None:
        """Ends the process at once: the main thread is in code that need not come back soon."""
        self._withdraw()
        self.end.now(status)


def open_when_there(make: Callable[[], Reader], tell: Callable[[str], object]) -> Reader:
    """Returns `make()`, which is called again while storage is away, for START_SECONDS. Raises GraphftError then.
    `tell`: called once, with the reason, if the second call fails as well."""
    patience = Patience(time.monotonic(), START_SECONDS)
    while True:
        try:
            return make()
        except GraphftError as error:
            if not is_of_storage(error):
                raise
            if patience.failed(time.monotonic(), None) != "wait":
                raise GraphftError(
                    f"the data could not be opened for {START_SECONDS:.0f} s: {error.message}",
                    rule=AWAY,
                    help=error.help,
                ) from error
            (tell if patience.tries == 2 else log.warning)(f"waiting for storage: {error.message}")
        time.sleep(patience.pause)


@dataclass(eq=False, repr=False)
class Batches(DataPort):
    """The DataPort of a trainer. While it waits for storage, which `state.waiting` tells, it looks after the shards.
    `begin`: called with each batch before it is read. `count`: batches of a unit of local accumulation; 1 without."""

    link: ShardLink
    prefetcher: Prefetcher
    reader: Reader
    begin: Callable[[ChunkWork], object] = id
    count: int = 1

    def __post_init__(self) -> None:
        link = self.link
        self.member, self.program, self.state = link.member, link.program, link.state
        self.work_record, self.check = link.work_record, link.check
        self._no_claims_before = 0.0
        self._told_at = 0.0

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        self.state.work, self.state.batch_samples = work, work.samples
        self.begin(work)
        counted, key, check = self.state.unit or work, self._key(work), self.check  # the queue counts units
        place = Place(counted.pass_index, counted.chunk, counted.batch)
        self.work_record.begin(Phase.READING, place, counted.claim)
        batch = self.read(key)
        check.columns = {c: batch[c] for c in columns}
        check.numbers, check.names = functools.partial(self.reader.numbers, key), self.reader.names
        if "assume" in self.program.attrs:
            check_dims(self.program, check.columns)
        self.work_record.mark(Phase.COMPUTING)
        return list(check.columns.values())

    def read_ahead(self, work: ChunkWork) -> None:
        """Begins to make a batch that will be wanted; of a unit, its first one."""
        self.schedule(replace(work, batch=work.batch * self.count))

    def schedule(self, work: ChunkWork) -> None:
        """Begins to make a batch of the chunk. Not after a process that died at work: then it is known which batch this
        one is at, should it die, too."""
        if work.samples and not self.state.careful:
            self.prefetcher.schedule(self._key(work))

    def _key(self, work: ChunkWork) -> BatchKey:
        return BatchKey(work.pass_index, work.chunk, work.batch, self.member.config.batch_size, work.without)

    # -- storage that is away -----------------------------------------------------------------------------------

    def may_claim(self) -> bool:
        """True if storage is there, as far as this trainer knows. From any thread."""
        return not self.state.waiting and time.monotonic() >= self._no_claims_before

    def read(self, key: BatchKey) -> dict[str, torch.Tensor]:
        """Returns the batch. Raises WorkChanged, or the reader's error: at once when it is none of storage. Files are
        read by no code of the user's, so a read of theirs that takes long waits for storage, and is no hang; storage's
        clients have time-outs of their own, and may take minutes to give up."""
        within = self.member.progress.within
        try:
            files = self.reader.spec.kind == "files"
            with within(WAIT_SECONDS, "reading files") if files else contextlib.nullcontext():
                return self.prefetcher.get(key)
        except GraphftError as error:
            if not is_of_storage(error):
                raise
            with within(WAIT_SECONDS, "waiting for storage"):
                return self._again(key, error)

    def _again(self, key: BatchKey, error: GraphftError) -> dict[str, torch.Tensor]:
        patience = Patience(time.monotonic(), WAIT_SECONDS)
        try:
            while True:
                self._judge(patience, key, error)
                end = time.monotonic() + patience.pause
                while (left := end - time.monotonic()) > 0:
                    if self.link.interrupted:
                        raise WorkChanged
                    self.link.pump(min(left, POLL_SECONDS))
                try:
                    return self.reader.batch(*key)
                except GraphftError as again:
                    if not is_of_storage(again):
                        raise
                    error = again
        except WorkChanged:
            self._no_claims_before = time.monotonic() + BACK_OFF_SECONDS
            raise
        finally:
            if self.state.waiting:
                self.state.waiting = ""
                seconds = time.monotonic() - patience.began
                text = f"trainer {self.member.index} waited for storage for {seconds:.1f} s"
                self.member.events.emit("storage-waited", text, chunk=key.chunk)

    def _judge(self, patience: Patience, key: BatchKey, error: GraphftError) -> None:
        """Returns if the read is to be made again. Raises the error if the chunk is bad, another if storage is away."""
        neighbour = self.reader.probe(key.chunk, patience.tries)
        now = time.monotonic()
        verdict = patience.failed(now, neighbour)
        if verdict == "bad":
            raise error
        if verdict == "away":
            raise GraphftError(
                f"storage has been away for {now - patience.began:.0f} s: {error.message}",
                rule=AWAY,
                help="nothing is lost: start the job again when its data can be read",
            ) from error
        if now - patience.began < QUIET_SECONDS:
            return
        text = f"waiting for storage: {describe(error.__cause__ or error)}"
        if not self.state.waiting:
            self.member.events.emit("storage-wait", f"trainer {self.member.index} is {text}", neighbour=neighbour)
            self._told_at = now
        elif now - self._told_at > TELL_SECONDS:
            self._told_at = now
            log.warning("%s", text)
        self.state.waiting = text
