"""Calls of the coordinator, repeated until the one that serves, as etcd says, has answered."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

import msgspec

from graphft.errors import GraphftError, plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.messages import TASK_ANSWERS, TASK_CALLS, FailTask, Refused, TaskFailed, TasksRefused
from graphft.runtime.transport import ClientTransport, Limits, Login, ServerTransport, ZmqClient

if TYPE_CHECKING:
    from graphft.runtime.coordination.member import Member

log = logging.getLogger("graphft")

LIMITS = Limits(max_frame=4096, max_header=64 << 20)
"""Limits of answers; the coordinator takes in much less."""
MAX_TASKS = 4096
"""Tasks that one call names."""
ASK_AGAIN_SECONDS = 1.0
"""A call without an answer is sent again after so long."""
LOOK_SECONDS = 0.25
LEAVE_SECONDS = 5.0
"""A process that was asked to leave waits no longer for an answer: its lease gives back what it holds."""
WAIT_SECONDS, TELL_SECONDS = 5.0, 60.0
"""After so long without a coordinator there is a warning, and then one each `TELL_SECONDS`."""
UNKNOWN_SECONDS = 0.05
"""A coordinator whose view of etcd does not have this process yet is asked again so much later."""
MAX_RECORDS = 1 << 16
"""Bad records of a batch that are named; a batch with more of them is bad as a whole."""
A = TypeVar("A", bound=TASK_ANSWERS)


def waking(transport: ServerTransport | ClientTransport, client: TaskClient) -> Callable[[], None]:
    """Returns a function that wakes a role's main thread, and the thread that waits for the coordinator."""

    def wake() -> None:
        transport.wake()
        client.wake()

    return wake


class CallRefused(GraphftError):
    """The coordinator has refused a call. `code`: see TasksRefused."""

    def __init__(self, refused: TasksRefused) -> None:
        super().__init__(
            f"the coordinator refuses a call: {refused.reason}",
            rule=f"task-{refused.code}",
            help="name tasks as they were given by get; all processes of a job need one version of graphft",
        )
        self.code = refused.code


class TaskClient:
    """The calls of one process, one after the other, from any of its threads. Repeated calls are answered alike: see
    `protocol.task_queue`. `leaving`: no answer is waited for longer than `LEAVE_SECONDS`."""

    def __init__(self, member: Member) -> None:
        self.member, self.leaving = member, False
        self.transport = ZmqClient(member.id, LIMITS, member.login)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._address, self._waiting = "", False

    def wake(self) -> None:
        """Has a waiting call look for the coordinator, as the view has changed. From any thread."""
        if self._waiting:
            self.transport.wake()

    def close(self) -> None:
        self.transport.close()

    def call(self, message: TASK_CALLS, answer: type[A]) -> A | None:
        """Gives the call a number and returns its answer; None when the job is over, or when this process was asked to
        leave and there is no answer for a while. Raises CallRefused, LeaseLost."""
        with self._lock:
            message = msgspec.structs.replace(message, call=next(self._numbers))
            sent, began = float("-inf"), time.monotonic()
            tell_at = began + WAIT_SECONDS
            self._waiting = True
            try:
                while True:
                    ended = self._ended(began)
                    if time.monotonic() > tell_at and self.member.view.coordinator is None:
                        self._tell_of_wait()
                        tell_at = time.monotonic() + TELL_SECONDS
                    if not ended and (self._find() or time.monotonic() - sent > ASK_AGAIN_SECONDS):
                        self.transport.send(0, message)
                        sent = time.monotonic()
                    # The answer to a call that ends the job follows the news of its end.
                    found = self._answer(message.call, through_wakes=ended) if sent > float("-inf") else None
                    if isinstance(found, answer):
                        return found
                    if isinstance(found, TasksRefused):
                        if found.code != "unknown":
                            raise CallRefused(found)
                        time.sleep(UNKNOWN_SECONDS)
                        sent = float("-inf")
                    if ended:
                        return None
            finally:
                self._waiting = False

    def cast(self, message: TASK_CALLS) -> None:
        """Sends a call that is not answered, if there is a coordinator, while another call may wait."""
        if self._address:
            self.transport.send(0, message)

    def _tell_of_wait(self) -> None:
        log.warning(
            "%s waits: no coordinator of job %s serves; start one: graphft start coordinator --job DIR --etcd ...",
            f"{self.member.kind} {self.member.index}",
            self.member.keys.job,
        )

    def _ended(self, began: float) -> bool:
        """True if nothing is to be waited for any more. Raises LeaseLost."""
        member = self.member
        member.check_lease()
        member.progress.beat()  # a wait for another process, which the lease limits
        leaving = self.leaving or member.leaving()
        return member.view.over or (leaving and time.monotonic() - began > LEAVE_SECONDS)

    def _find(self) -> bool:
        """Connects to the coordinator that serves now. True if it is another one than before."""
        serving = self.member.view.coordinator
        address = serving.keyed_address if serving is not None else ""
        if address in ("", self._address):
            return False
        self.transport.connect(0, address)
        if self._address:
            log.info("the coordinator is another one: %s", address)
        self._address = address
        return True

    def _answer(self, number: int, through_wakes: bool) -> TASK_ANSWERS | None:
        """Returns the answer to this call, if it comes within a moment. Answers to earlier ones are dropped: what they
        gave is not named by the next renewal, and so given back. `through_wakes`: goes on waiting when woken."""
        end = time.monotonic() + LOOK_SECONDS
        while (left := end - time.monotonic()) > 0:
            reply = self.transport.receive(left)
            if reply is None and not through_wakes:
                return None
            if reply is not None and isinstance(reply.message, Refused) and reply.message.code == "malformed":
                return TasksRefused(number, "malformed", "it cannot be read")
            if reply is not None and isinstance(reply.message, TASK_ANSWERS) and reply.message.call == number:
                return reply.message
        return None


def fail_task(
    client: TaskClient,
    pass_index: int,
    chunk: int,
    attempt: int,
    batch: int,
    reason: str,
    records: Collection[int] = (),
    certain: bool = False,
    rest: bool = False,
) -> Change | None:
    """Counts a failure of the batch, with `rest` of all behind it, and returns what was recorded; None: the task is
    another's by now, or the job is over."""
    bad = sorted(records) if len(records) <= MAX_RECORDS else []
    where = pass_index, chunk, attempt, batch
    call = FailTask(0, client.member.id, *where, plain_text(reason), bad, certain, rest)
    return change_of(client.call(call, TaskFailed))


def change_of(answer: TaskFailed | None) -> Change | None:
    if answer is None or not answer.outcome:
        return None
    return msgspec.convert({"outcome": answer.outcome, "reason": answer.reason, "cause": answer.cause}, Change)


def report_failed(
    etcd: Store, keys: Keys, login: Login, place: tuple[int, int, int], claim: int, reason: str, deadline: float
) -> Change | None:
    """Does as `fail_task` for a process that is no member of the job: of (pass, chunk, batch), under the claim (the
    attempt) of a dead trainer. None also if no coordinator has answered within `deadline` seconds."""
    end = time.monotonic() + deadline
    client = ZmqClient("launcher", LIMITS, login)
    message = FailTask(1, "", place[0], place[1], claim, place[2], plain_text(reason))
    address = ""
    try:
        while (left := end - time.monotonic()) > 0:
            kv = etcd.get(keys.coordinator_addr, deadline=left)
            if kv is not None:
                found = msgspec.json.decode(kv.value, type=Registration).keyed_address
                if found != address:  # else a late answer still counts: who is asked again says that it knew
                    client.connect(0, found)
                    address = found
                client.send(0, message)
                reply = client.receive(min(left, 1.0))
                if reply is not None and isinstance(reply.message, TaskFailed):
                    return change_of(reply.message)
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        return None
    finally:
        client.close()
