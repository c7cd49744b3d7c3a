"""What a trainer proves itself with: block step, once, on values near the initial ones and the first batch of the data.

Not on the initial values themselves: where many are zero (a head, an adapter), every machine computes the same.

The batch is read as any other, so it may fail, hang, or end the process. An error is told, and the trainer goes on
without proof; of a process that ended in the middle a record stays, and when that has happened some times in a row,
and no trainer has computed the batch yet, the others go on without proof, too, and say so. The queue then finds out
what is wrong with the batch, and leaves it out.
"""

from __future__ import annotations

import logging

import msgspec

from graphft.errors import describe
from graphft.ops.context import Interrupt
from graphft.runtime.coordination.member import Member
from graphft.runtime.data import Prefetcher
from graphft.runtime.etcd import delete_op, put_op
from graphft.runtime.process.identity import identify
from graphft.runtime.process.work_record import Phase, Place, WorkRecord
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.proof import is_recorded, prove
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.roles.trainer.step_trial import StepTrial, Unusable

log = logging.getLogger("graphft")

DEATHS = 3
"""Attempts in a row that ended with their processes. Those that die together (a machine is preempted) are one."""


def prove_step(
    member: Member, blocks: Blocks, state: TrainerState, work_record: WorkRecord, prefetcher: Prefetcher
) -> None:
    """Compares what this trainer makes of the first batch with what the first trainer made of it.

    Raises GraphftError[determinism].
    """
    key = member.keys.proof("trainer")
    if member.view.over or state.leaving or not (is_recorded(member, key) or _may_try(member)):
        return
    trial = StepTrial(member, blocks, prefetcher)
    with member.progress.within(member.progress.usual, "proving itself"):
        work_record.begin(Phase.PROVING, Place(*trial.key[:3]))
        try:
            prove(member, key, trial)
        except Unusable as error:
            cause = error.__cause__ or error
            if isinstance(cause, Interrupt):
                return
            _tell(
                member,
                f"trainer {member.index} could not compute the batch that all prove themselves with, and "
                f"goes on without proof: {describe(cause)}",
            )
        finally:  # also when it was interrupted
            work_record.mark(Phase.IDLE)
            _tried(member)


def _may_try(member: Member) -> bool:
    """Notes that this process tries, and how many attempts before it failed; not if those were too many."""
    tried, trying = member.keys.tried, member.keys.trying
    before = {kv.key.removeprefix(tried): int(kv.value or 0) for kv in member.etcd.range(tried).kvs}
    living = {kv.key.removeprefix(trying) for kv in member.etcd.range(trying, keys_only=True).kvs}
    failed = max((number + 1 for process, number in before.items() if process not in living), default=0)
    if failed >= DEATHS:
        _tell(
            member,
            f"trainer {member.index} goes on without proof: {failed} times in a row, trainers ended while "
            "they computed the batch that all prove themselves with",
        )
        return False
    if member.lease:
        me = msgspec.json.encode(identify())  # so that a launcher that sees this process die can end its lease
        member.etcd.txn(
            [], [put_op(tried + member.id, str(failed).encode()), put_op(trying + member.id, me, member.lease)]
        )
    return True


def _tell(member: Member, text: str) -> None:
    log.warning("%s", text)
    member.events.emit("unproved", text)


def _tried(member: Member) -> None:
    if member.lease:
        member.etcd.txn([], [delete_op(key + member.id) for key in (member.keys.tried, member.keys.trying)])
