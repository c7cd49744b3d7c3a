"""Measures the memory of the coordinator's queues: `python benchmarks/queue_memory.py [TASKS]`."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import sys
from array import array
from typing import Any

import psutil

from graphft.plan import Plan
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, Tasks
from graphft.runtime.protocol.task_events import Answer, Asked, Living, QueueOptions
from graphft.runtime.protocol.task_pass import QueueState
from graphft.runtime.protocol.task_queue import MAX_GIVEN, TaskQueue


def queue_memory(tasks: int) -> str:
    """A line that says it, of a process of its own."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    process = context.Process(target=_measure, args=(tasks, found))
    process.start()
    todo, pending, done = found.get()
    process.join()
    return f"queues of {tasks:,} tasks: {todo:.0f} MB to do, {pending:.0f} MB all pending, {done:.0f} MB all done"


def _resident() -> float:
    gc.collect()
    return float(psutil.Process(os.getpid()).memory_info().rss) / 2**20


def _measure(tasks: int, found: Any) -> None:
    plan = Plan([1] * tasks, slots=1, batch_size=1, passes=2)
    before, sizes = _resident(), []
    queue = TaskQueue(QueueOptions(plan, sync=False, shards=1))
    queue.begin(QueueState())
    trainers = [f"{i}-0123abcd" for i in range(1000)]
    queue.step(Living(frozenset(trainers)), 0.0)
    sizes.append(_resident() - before)
    given, trainer = array("Q"), itertools.cycle(trainers)  # in pairs: what trainers know takes little here
    while queue.passes[0].todo:
        call = GetTasks(len(given) + 1, next(trainer), 0, MAX_GIVEN)
        (answer,) = queue.step(Asked(b"", call), 0.0)
        assert isinstance(answer, Answer)
        assert isinstance(answer.message, Tasks)
        given.extend(itertools.chain.from_iterable(answer.message.tasks))
        queue.take_changes()
    sizes.append(_resident() - before - given.itemsize * len(given) / 2**20)
    for i in range(0, len(given), 2):
        chunk, attempt = given[i : i + 2]
        holder = queue.passes[0].open[chunk].holder
        queue.step(Asked(b"", FinishTasks(len(given), holder, 0, [(chunk, attempt)])), 0.0)
    sizes.append(_resident() - before - given.itemsize * len(given) / 2**20)
    found.put(sizes)


if __name__ == "__main__":
    print(queue_memory(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
