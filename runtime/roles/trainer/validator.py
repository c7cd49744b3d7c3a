"""Validation beside the steps: a thread that runs block `validate` of the job's evaluation, batch by batch.

It takes part in the oldest validation that is open (`/<job>/validating/<step>`). It reads a checkpoint and its own
data, and shares nothing with the main thread: programs that draw random numbers are refused.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError, describe
from graphft.ops.context import ChunkWork, Context, DataPort, NoData
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint, StorageUnavailable
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Failure, Validating
from graphft.runtime.coordination.run_record import tell_failed
from graphft.runtime.data import IN_ORDER, NeedsCallingThread, Reader
from graphft.runtime.data.reader import Patience, is_of_storage
from graphft.runtime.etcd import EtcdError, LeaseLost, TransientEtcdError
from graphft.runtime.execute.input_checks import check_dims
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.role_process import EXIT_FAILED
from graphft.runtime.roles.role import Blocks
from graphft.runtime.roles.session import ProcessEnd
from graphft.runtime.validation.open_validation import OpenValidation
from graphft.transpiler.layout import VALIDATE

log = logging.getLogger("graphft")

IDLE_SECONDS = 0.2
LEAVE_SECONDS = 10.0
TRIES = 3
"""Attempts at work that may have failed by chance."""
PAUSE_SECONDS = 1.0
"""After a failure that may pass: etcd or a storage that does not answer."""


class Validator(DataPort):
    """The ports of block `validate`, and the thread. `close` ends it after the batch at hand."""

    def __init__(self, member: Member, job_dir: Path, reader: Reader, end: ProcessEnd, device: str = "cpu") -> None:
        """`reader`: of the held-out data."""
        assert member.job.programs.evaluation is not None
        assert member.config.validate is not None
        self.member, self.job_dir, self.reader, self.end = member, job_dir, reader, end
        self.program, self.config = member.job.programs.evaluation, member.config.validate
        self._device = device
        self._open: OpenValidation | None = None
        self._chunk = -1
        """The chunk that is being read."""
        self._patience: Patience | None = None
        """For a read that fails as storage is away."""
        self._damaged = self._inconclusive = 0
        """Times that the checkpoint at hand was found damaged, and that the result could not be computed."""
        self._waits, self._max_failures = False, 1
        self.progress = Progress()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="validator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_SECONDS)  # a batch that takes longer ends with the process

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ctx = Context(device=self._device, validation=self, data=self)
        ctx.scope.update(self.program.values)
        self.progress.thread = threading.current_thread()
        blocks = Blocks(self.program, ctx, self.progress)
        try:
            while not self._closing.is_set():
                self._closing.wait(self._try(blocks))
        except BaseException:
            if self.end.closing.is_set():  # a batch outlasted `close`: the process leaves in order
                log.info("validation: its last batch counts for nothing", exc_info=True)
            else:
                log.exception("validation: this thread failed; a process without it must not go on")
                self.end.now(EXIT_FAILED)
        try:
            if self._open is not None:
                self._open.give_back()
        except GraphftError as error:
            log.info("validation: %s", error.message)  # the lease's end gives it back

    def _try(self, blocks: Blocks) -> float:
        """Computes a batch. Returns for how many seconds nothing is to be tried then."""
        try:
            with self.progress.within(self.progress.usual, "validating"):
                blocks.run(VALIDATE)
            self._waits, self._damaged, self._patience = False, 0, None
            return 0.0
        except NoData:
            return IDLE_SECONDS
        except LeaseLost as error:
            self.end.lease_lost(error)
        except TransientEtcdError as error:
            log.warning("validation: etcd: %s", error.message)
        except StorageUnavailable as error:
            self._wait_for(error)
        except DamagedCheckpoint as error:
            self._damaged += 1  # its copy here may have been deleted at this moment
            if self._damaged >= TRIES:
                self._abandon(error)
        except Exception as error:
            if self.end.closing.is_set():
                raise
            if isinstance(error, UsageError) and error.rule == "foreign-job":
                self._closing.set()
            elif self._may_pass(error):
                self._wait_for(error)
            else:
                self._failed(error)
        return PAUSE_SECONDS

    def _may_pass(self, error: Exception) -> bool:
        """True if storage is away, as for a batch that is trained on: records around it cannot be read either, and not
        for too long."""
        if self._chunk < 0 or not is_of_storage(error):
            return False
        self._patience = self._patience or Patience(time.monotonic())
        neighbour = self.reader.probe(self._chunk, self._patience.tries)
        return self._patience.failed(time.monotonic(), neighbour) == "wait"

    def _wait_for(self, error: Exception) -> None:
        """Gives the range back, as another process may be able to read it."""
        if not self._waits:
            self.member.events.emit("storage-away", f"validation waits: {describe(error)}")
        self._waits = True
        self._give_back()

    def _failed(self, error: Exception) -> None:
        """Counts a failure of a range: another process tries, and the one after the last says why."""
        cause = error.__cause__ if isinstance(error, GraphftError) and error.__cause__ is not None else error
        if isinstance(cause, NeedsCallingThread):
            cause = UsageError("the held-out Dataset draws random numbers", rule="data", help="it must not")
        why = describe(cause)
        step = self._open.step if self._open is not None else -1
        log.warning("validation of step %d failed", step, exc_info=error)
        self.member.events.emit("validation-failed", f"validation of step {step} failed: {why}", step=step)
        self._give_back(why)

    def _give_back(self, why: str = "") -> None:
        """Gives the range back. `why`: it has failed; after too many failures the job ends."""
        opened = self._open
        if opened is None:
            return
        try:
            failures = opened.give_back(bool(why))
            if why and failures >= self._max_failures:
                tried = f"{failures} that tried have failed; the last failure: {why}"
                self._fail_job(opened.step, f"a range cannot be computed: {tried}")
        except LeaseLost as error:
            self.end.lease_lost(error)
        except TransientEtcdError as error:  # then it is a stale claim
            log.warning("validation: etcd: %s", error.message)

    def hung(self, what: str) -> None:
        """Counts a failure of the range at hand: this thread is stuck, and the process ends. From the daemon thread."""
        self._give_back(what)

    def _abandon(self, error: DamagedCheckpoint) -> None:
        """Gives a checkpoint up that cannot be read. Where training waits for the result, everyone goes back to an
        older one, and comes there again."""
        opened, self._open, self._damaged = self._open, None, 0
        if opened is None:
            return
        try:
            if self.config.waits:
                self._go_back(opened.step, error)
            elif opened.abandon():
                text = f"the validation of step {opened.step} is DISCARDED: {error.message}"
                self.member.events.emit("validation-lost", text, step=opened.step)
        except (TransientEtcdError, StorageUnavailable) as trouble:  # it is found damaged again
            log.warning("validation: %s", trouble.message)

    def _go_back(self, step: int, error: DamagedCheckpoint) -> None:
        member, store = self.member, checkpoints_of(self.job_dir)
        commits = Commits(member.etcd, member.keys, store, 0, member.config.pservers, member.job.run_id, member.id)
        committed = commits.committed()
        if committed is not None and committed.step == step:
            raised = commits.rollback("the checkpoint that is to be validated is damaged", below=step)
            text = f"the checkpoint of step {step} is damaged, going back to step {raised.step}: {error.message}"
            member.events.emit("damaged-checkpoint", text, step=raised.step)

    # -- the port --------------------------------------------------------------------------------------------------

    def get_range(self, timeout: float, max_failures: int) -> ChunkWork:
        opened, self._max_failures = self._current(), max_failures
        work = opened.work(timeout) if opened is not None else None
        if work is not None:
            return work
        if opened is not None:
            self._conclude(opened)
        raise NoData

    def weights(self, names: Sequence[str]) -> list[Tensor]:
        assert self._open is not None
        with self.progress.within(math.inf, "reading a checkpoint"):
            return self._open.weights(names)

    def complete_range(self, work: ChunkWork, results: Sequence[Tensor]) -> None:
        assert self._open is not None
        self._open.add(work.samples, results)

    def _current(self) -> OpenValidation | None:
        """Returns the oldest validation that is open."""
        view, member = self.member.view, self.member
        step = next(iter(view.validating), None)
        if step is None or view.over:
            self._open = None
        elif self._open is None or (self._open.step, self._open.of) != (step, view.validating[step]):
            opened = member.etcd.get(member.keys.validating(step))
            if opened is None or msgspec.json.decode(opened.value, type=Validating) != view.validating[step]:
                return None  # the view is to show what it is now
            self._open = OpenValidation(member, self.job_dir, self.program, step, opened)
        return self._open

    def _conclude(self, opened: OpenValidation) -> None:
        try:
            with self.progress.within(math.inf, "adding up"):
                opened.conclude()
            self._inconclusive = 0
        except (EtcdError, StorageUnavailable, DamagedCheckpoint):
            raise
        except Exception as error:  # a reducer's, or that entries are lost
            self._inconclusive += 1
            if self._inconclusive >= TRIES:
                self._fail_job(opened.step, f"its result cannot be computed: {describe(error.__cause__ or error)}")
            raise

    def _fail_job(self, step: int, why: str) -> None:
        """Ends the job: no process can compute a range."""
        reason = f"the validation of step {step} cannot be made: {why}"
        help = "see its events (graphft status); mend the held-out data, the model or the checkpoints, and run again"
        tell_failed(self.member.etcd, self.member.keys, Failure(reason, help))
        self.member.events.emit("failed", reason)

    # -- DataPort -----------------------------------------------------------------------------------------------------

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        """Reads on this thread, which does not draw random numbers: a dataset that does is an error."""
        self._chunk = work.chunk
        found = self.reader.batch(IN_ORDER, work.chunk, work.batch, self.config.size, ahead=True)
        self._chunk = -1
        if "assume" in self.program.attrs:
            check_dims(self.program, {name: found[name] for name in columns})
        return [found[name] for name in columns]
