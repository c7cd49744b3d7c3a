"""Telling the coordinator of a batch that failed: by its trainer, or by the launcher of a dead one."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from graphft.errors import plain_text
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.messages import FailTask, TaskFailed
from graphft.runtime.queue.task_client import LIMITS, TaskClient
from graphft.runtime.transport import Login, make_client

MAX_RECORDS = 1 << 16
"""Records that are told, of a batch; a batch of which more are bad is bad."""


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
    """Counts a failure of the batch, with `rest` of all behind it; what became of it, or None: the task is another's by
    now."""

    def call(number: int) -> FailTask:
        where = pass_index, chunk, attempt, batch
        bad = sorted(records) if len(records) <= MAX_RECORDS else []
        return FailTask(number, client.member.id, *where, plain_text(reason), bad, certain, rest)

    return change_of(client.call(call, TaskFailed))


def change_of(answer: TaskFailed) -> Change | None:
    """What the coordinator has recorded."""
    if not answer.outcome:
        return None
    return msgspec.convert(
        {"outcome": answer.outcome, "reason": answer.reason, "compares": (), "cause": answer.cause}, Change
    )


def report_failed(
    etcd: Store, keys: Keys, login: Login, place: tuple[int, int, int], claim: int, reason: str, deadline: float
) -> Change | None:
    """`fail_task` for a process that is no member of the job: of (pass, chunk, batch), under the claim (the
    attempt) of its trainer, which is dead. None also when no coordinator has answered within `deadline` seconds."""
    end = time.monotonic() + deadline
    client = make_client("launcher", "launcher", LIMITS, login)
    message = FailTask(1, "", place[0], place[1], claim, place[2], plain_text(reason))
    address = ""
    try:
        while (left := end - time.monotonic()) > 0:
            kv = etcd.get(keys.coordinator_addr, deadline=left)
            if kv is not None:
                found = msgspec.json.decode(kv.value, type=Registration).address
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
