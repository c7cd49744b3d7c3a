"""The coordinator's services: the lock, its address, and the loop that answers.

One round of the loop takes all calls that have come, lets the machine (`protocol.task_queue`) decide, saves what has
changed in one transaction, and answers then: group commit. While etcd writes, the next calls gather.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from graphft.ops.context import ClaimTerms
from graphft.runtime.coordination.connect import JobEnded
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Barred, CoordinatorStatus
from graphft.runtime.etcd import Compare, Session, Watch, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.etcd.fencing import Lock
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import LOST_CLAIMS, Change, ChunkDiscards, Discards, Known, Todo
from graphft.runtime.protocol.events import Tick
from graphft.runtime.protocol.machine import Effect
from graphft.runtime.protocol.messages import (
    TASK_ANSWERS,
    TASK_CALLS,
    FailTask,
    FinishTasks,
    GetTasks,
    TaskFailed,
    Tasks,
    TasksRefused,
)
from graphft.runtime.protocol.task_events import (
    Answer,
    Asked,
    Fenced,
    Hopeless,
    Living,
    QueueOptions,
    TookAway,
    fences_of,
)
from graphft.runtime.protocol.task_queue import TaskQueue
from graphft.runtime.queue.transactions import going_back, or_end, tell_discarded
from graphft.runtime.roles.coordinator.task_store import Fence, TaskStore
from graphft.runtime.roles.session import ProcessEnd
from graphft.runtime.transport import ServerTransport

log = logging.getLogger("graphft")

POLL_SECONDS = 0.25
SEEN_SECONDS = 5.0
"""For how long the watch may be behind."""
LOOKS = 20
"""Per time-out, for tasks that are not renewed."""
MAX_FENCES = 48
"""Fences of one transaction, at most."""


class TaskServer:
    """The main thread's. `session`: what the lock hangs on."""

    def __init__(self, member: Member, session: Session, transport: ServerTransport, end: ProcessEnd) -> None:
        self.member, self.keys, self.transport, self.end = member, member.keys, transport, end
        self.lock = Lock(session, self.keys.coordinator_lock)
        self.store = TaskStore(member, self.lock)
        config = member.config
        self.options = QueueOptions(config.plan, config.sync, config.pservers)
        self.queue = TaskQueue(self.options)
        self.terms = ClaimTerms()
        self.serving = False
        self.counters: Counter[str] = Counter()
        self._discarded: Watch | None = None
        self._discarded_here: dict[str, Discards] = {}
        """By key, as this process has written it: the watch may be behind."""
        self._loaded_at = 0
        self._told_unsaved = False
        self._next_look = 0.0

    def acquire_lock(self) -> None:
        self.member.progress.begin("standing by")
        self.lock.acquire(while_waiting=self._stand_by)
        log.info("holds %s", self.keys.coordinator_lock)
        self._check_not_over()

    def _check_not_over(self) -> None:
        """Raises JobEnded if the job is over, also if the watch has not seen that so far: the holder of the lock may
        have left it for that reason."""
        key = self.keys.state
        state = self.member.retry_while_leased(lambda: self.member.etcd.get(key))
        if state is not None and state.value != b"running":
            self.member.watcher.wait(lambda seen: key in seen and seen[key].value == state.value, SEEN_SECONDS)
            self._stand_by()

    def _stand_by(self) -> None:
        self.member.progress.beat()
        if self.member.over():
            raise JobEnded(f"job {self.keys.job} is over", rule="job-complete")
        if self.member.leaving():
            raise JobEnded("left: SIGTERM asked this coordinator to", rule="left")

    def load_tasks(self) -> None:
        self._discarded = Watch(self.member.etcd, self.keys.all_discarded)
        self.queue, self._loaded_at = self.store.load(self.options)
        log.info("queues read from etcd: %s", self.queue.counts() or "none so far")

    def _reload(self) -> None:
        """Reads etcd again: something could not be saved. What is kept in memory alone stays."""
        before = self.queue
        self.queue, _ = self.store.load(self.options)
        self.queue.go_on_from(before, time.monotonic())
        log.info("queues read from etcd again: %s", self.queue.counts() or "none so far")

    def publish(self) -> None:
        self._check_not_over()  # to read the queues may have taken a while
        record = msgspec.json.encode(self.member.registration())
        self.store.commit([put_op(self.keys.coordinator_addr, record, self.member.lease)], ())
        self.serving = True
        self.member.events.emit("coordinator", f"coordinator {self.member.index} gives out tasks")

    # -- the loop ---------------------------------------------------------------------------------------------------

    def serve(self, timeout: float, max_failures: int, max_discarded: int) -> None:
        self.terms = ClaimTerms(max_failures, max_discarded)
        self.options.timeout, self.options.max_lost = timeout, LOST_CLAIMS * max_failures
        member = self.member
        member.progress.begin("giving out tasks")
        while not member.over() and not member.leaving():
            member.progress.beat()
            received = self.transport.poll(POLL_SECONDS)
            self.end.check_lease()
            calls = [(r.peer, r.message) for r in received if isinstance(r.message, TASK_CALLS)]
            self._round(calls)

    def _round(self, calls: Sequence[tuple[bytes, TASK_CALLS]]) -> None:
        """Takes in the calls, in order; a batch that failed has a transaction of its own."""
        waiting: list[tuple[bytes, TASK_CALLS]] = []
        self._check_lock()
        self._look_around()
        for peer, call in calls:
            self.counters[type(call).__name__] += 1
            if isinstance(call, FailTask):
                self._answer(waiting)
                waiting = []
                self._fail(peer, call)
            else:
                waiting.append((peer, call))
        self._answer(waiting)

    def _check_lock(self) -> None:
        """Raises LeaseLost as soon as the view lacks the lock: not every answer is saved before, which would tell."""
        watcher, lock = self.member.watcher, self.lock
        if watcher.revision >= lock.revision:
            held = watcher.snapshot().get(lock.key)
            if held is None or held.create_revision != lock.revision:
                self.store.lost()

    def _look_around(self) -> None:
        """Looks who lives, and whose tasks are overdue. Saves that before any call is taken in: if one of these has a
        fence that does not hold, memory is read anew."""
        now, view, effects = time.monotonic(), self.member.view, []
        told = self.queue.met and view.trainers.keys() == self.queue.living
        if self.member.watcher.revision >= self._loaded_at and not told:
            self.queue.step(Living(frozenset(view.trainers)), now)
        if now >= self._next_look:
            self._next_look = now + self.options.timeout / LOOKS
            effects = self.queue.step(Tick(), now)
            self.store.check()
        self._answer(())
        took: defaultdict[tuple[str, int], list[TookAway]] = defaultdict(list)
        for effect in effects:
            if isinstance(effect, TookAway):
                took[effect.trainer, effect.slot].append(effect)
        for (trainer, slot), tasks in took.items():
            self._quarantine(trainer, slot, tasks)
        if self.queue.complete and not (view.trainers or view.pservers or view.over):
            self._end()

    def _answer(self, calls: Sequence[tuple[bytes, TASK_CALLS]]) -> None:
        """Lets the machine decide, saves, and answers. Calls whose fence does not hold are taken in once more as such,
        after etcd is read again."""
        bad: set[Fence] = set()
        while True:
            effects = self._step(calls, bad)
            answers = [effect for effect in effects if isinstance(effect, Answer)]
            fences = sorted({fence for answer in answers for fence in answer.fences})
            if len(fences) > MAX_FENCES and len(calls) > 1:
                self._reload()
                self._answer(calls[: len(calls) // 2])
                self._answer(calls[len(calls) // 2 :])
                return
            changes = self.queue.take_changes()
            if changes is None and not fences:
                break
            failed = self.store.save(self.queue, changes, fences)
            if not failed:
                break
            bad |= set(failed)
            self._reload()
        for answer in answers:
            self.transport.send(answer.peer, self._with_discarded(answer))
        for effect in effects:
            if isinstance(effect, Hopeless):
                self._discard_rest(effect)

    def _step(self, calls: Sequence[tuple[bytes, TASK_CALLS]], bad: set[Fence]) -> list[Effect]:
        now, wall = time.monotonic(), time.time()
        effects: list[Effect] = []
        for peer, call in calls:
            if isinstance(call, FinishTasks | GetTasks) and bad.intersection(fences_of(call)):
                effects += self.queue.step(Fenced(peer, call), now)
            else:
                effects += self.queue.step(Asked(peer, call, wall), now)
        return effects

    def _with_discarded(self, answer: Answer) -> TASK_ANSWERS:
        message = answer.message
        if not isinstance(message, Tasks) or not message.tasks or self._discarded is None:
            return message
        known, here = self._discarded.snapshot(), self._discarded_here
        if not known and not here:
            return message
        found = []
        for chunk, _ in message.tasks:
            key = self.keys.discarded(chunk)
            seen = msgspec.json.decode(known[key].value, type=Discards) if key in known else Discards()
            found.append((chunk, max(seen, here.get(key, Discards()), key=lambda what: len(what.discards))))
        discarded = [(chunk, what.without_reasons()) for chunk, what in found if what.discards]
        return msgspec.structs.replace(message, discarded=discarded)

    def _fail(self, peer: bytes, call: FailTask) -> None:
        if problem := self.queue.problem(call):
            self.transport.send(peer, TasksRefused(call.call, "malformed", problem))
            return
        change = self.member.retry_while_leased(functools.partial(self._failed, call))
        answer = TaskFailed(call.call, change.outcome, change.reason, change.cause) if change else None
        self.transport.send(peer, answer or TaskFailed(call.call, ""))

    def _failed(self, call: FailTask) -> Change | None:
        """Does as `fail_batch`, of a task in memory."""
        keys, terms = self.keys, self.terms
        while True:
            task = self.queue.task(call.pass_index, call.chunk)
            if task is None or not task.holder or task.attempt != call.attempt:
                return None
            names = (keys.discarded(call.chunk), keys.generation, keys.committed, keys.pass_)
            read = self.member.etcd.txn([], [get_op(name) for name in names])
            known = Known(names[0], call.pass_index, read.kv(0))
            gone = ChunkDiscards(self.options.plan, call.chunk, known.discarded()).batches(call.pass_index)
            todo, change = chunk_queue.failed(
                call.chunk,
                task.todo,
                known,
                batch=call.batch,
                reason=call.reason,
                max_failures=1 if call.certain else terms.max_failures,
                records=call.records,
                rest=call.rest or call.batch in gone,
            )
            change = or_end(self.member.etcd, keys, self.options.plan, known, change, terms.max_discarded)
            back, same = going_back(keys, change, *map(read.kv, range(1, 4))) if task.slot >= 0 else ([], [])
            if self._carry_out(call.pass_index, call.chunk, todo, [change, *back], same):
                return change

    def _discard_rest(self, effect: Hopeless) -> None:
        """Discards the rest of a task of which too many holders have vanished."""
        index, chunk, etcd = effect.pass_index, effect.chunk, self.member.etcd

        def discard() -> Change | None:
            task, key = self.queue.task(index, chunk), self.keys.discarded(chunk)
            known = Known(key, index, etcd.get(key))
            limit = int(self.options.max_lost)
            found = chunk_queue.vanished(chunk, task.todo, task.todo.progress, limit, known) if task else None
            if found is None:
                return None
            change = or_end(etcd, self.keys, self.options.plan, known, found[1], self.terms.max_discarded)
            return change if self._carry_out(index, chunk, found[0], [change]) else None

        change = self.member.retry_while_leased(discard)
        if change is None:
            self._reload()
        else:
            tell_discarded(self.member.events, index, chunk, change)

    def _carry_out(
        self, index: int, chunk: int, todo: Todo, changes: Sequence[Change], same: Sequence[Compare] = ()
    ) -> bool:
        """Saves a task that has failed, in one transaction with its changes; False: a record had changed."""
        if changes[0].outcome != "job-failed":
            self.queue.put(index, chunk, todo)
        saved = self.queue.take_changes()
        groups, heads = self.store.ops(self.queue, saved) if saved is not None else ([], [])
        beside = [put_op(put.key, put.value) for change in changes for put in change.puts]
        compares = [mod_is(compare.key, compare.revision) for change in changes for compare in change.compares]
        if self.store.commit([*groups, *heads, *beside], (), [*compares, *same]):
            self._reload()
            return False
        for put in changes[0].puts:
            if put.key.startswith(self.keys.all_discarded):
                self._discarded_here[put.key] = msgspec.json.decode(put.value, type=Discards)
        return True

    def _end(self) -> None:
        """Ends the job: loops of a user's own have done all passes, and the last of them has left."""
        if self.queue.unsaved:
            if not self._told_unsaved:
                self._told_unsaved = True
                what = "the loop that was to save the model has died: start one again, which ends the job"
                self.member.events.emit("unsaved-model", f"all passes are done, but {what}")
            return
        self.store.commit([put_op(self.keys.state, b"complete")], ())
        self.member.events.emit("complete", "all passes are done, by loops of their own, and the last one has left")
        self.member.watcher.wait(lambda kvs: self.member.view.over, 5.0)

    def _quarantine(self, trainer: str, slot: int, took: Sequence[TookAway]) -> None:
        """Puts a trainer that was not heard of into quarantine. One record and one event for all of its tasks (of a
        slot): there may be thousands."""
        self.member.progress.beat()
        age, chunk = max(task.age for task in took), took[0].chunk
        chunks = f"chunk {chunk}" if len(took) == 1 else f"{len(took)} chunks"
        reason = f"it made no progress with {chunks} for {age:.0f} s"
        lease = self.member.view.leases.get(trainer, 0)
        if lease:
            bar = put_op(self.keys.barred(trainer), msgspec.json.encode(Barred(reason, self.member.id)), lease)
            key = self.keys.slot(slot)
            mine = [value_is(key, trainer.encode())] if slot >= 0 else []
            self.store.commit([bar, *([delete_op(key)] if mine else [])], (), mine)
        self.member.events.emit(
            "stale-claim",
            f"{f'slot {slot}' if slot >= 0 else chunks} {'was' if slot >= 0 or len(took) == 1 else 'were'} taken from "
            f"trainer {trainer}: no progress for {age:.0f} s",
            chunk=chunk,
            slot=slot,
            trainer=trainer,
        )

    def status(self) -> CoordinatorStatus:
        counters = {**self.counters, **self.transport.counters}
        return CoordinatorStatus(self.serving, self.store.loads, counters)

    def close(self) -> None:
        if self._discarded is not None:
            self._discarded.close()
