"""Reads a map-style Dataset; one that draws random numbers is given the same ones whenever a batch is read.

Reads ahead of use share torch's generator with the thread that trains, so they must not touch it: a `DrawWatch` stops a
read at its first draw, before the generator moves. It is made again on the calling thread, seeded per batch.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.data import default_collate

from graphft.data import ChunkInfo, DataSpec, Reference, python_states, seeded
from graphft.data.datasets import MADE_ANEW, compare, named, torch_threads
from graphft.data.randomness import is_own, own_generators, seed_generators
from graphft.data.urls import CHANGED
from graphft.errors import GraphftError, UsageError, describe, listed
from graphft.plan import mix
from graphft.runtime.data.reader import BadRecords, Batch, BatchKey, NeedsCallingThread, Reader, is_of_storage
from graphft.runtime.execute.determinism import SETTINGS_CHANGED, process_settings, thread_settings

log = logging.getLogger("graphft")
T = TypeVar("T")


class DatasetReader(Reader):
    """Makes the Dataset when it is opened; all code of the user's runs on `thread`, if there is one.

    Generators that the dataset keeps are seeded before every batch. Every read is watched for draws from the global
    ones. Once there was one, the thread that uses a batch waits for it, seeded.
    """

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int, thread: ThreadPoolExecutor | None = None) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._thread = thread
        self.calling_thread = bool(spec.source["random"])
        self._call(self._open)

    def _call(self, function: Callable[[], T]) -> T:
        return function() if self._thread is None else self._thread.submit(function).result()

    def _open(self) -> None:
        reference, before = Reference.from_json(self.spec.source), thread_settings()
        with torch_threads(1):  # as it was described with
            self._dataset = reference.make()
            self._own = own_generators(self._dataset)
            _check_settings(before, thread_settings(), "making the dataset")
            if reference.code_digest() != self.spec.fingerprint()["code"]:
                what = f"the source of the dataset, {reference.file or reference.module}, was changed since then"
                help = "put it back as it was; or run the changed script again, which begins a run of its own"
                raise UsageError(what, rule=CHANGED, help=help)
            if (records := len(self._dataset)) != self.spec.records:
                what = f"the dataset of {reference} has {records} records, the job expects {self.spec.records}"
                raise UsageError(what, rule=CHANGED, help=MADE_ANEW)
            self.differs = compare(reference, self._dataset, self.spec)
        if self.differs:
            log.warning("%s", self.differs)
        self._settings = process_settings() | before  # a thread of its own begins with the same

    def _read(self, info: ChunkInfo, order: np.ndarray, key: BatchKey, ahead: bool) -> Batch:
        indices = [int(i) + info.start for i in order]
        seed = mix(self.seed, key.pass_index, key.chunk, key.batch_index)

        def checked() -> Batch:
            try:
                return self._make(info, indices, seed, ahead)
            finally:  # also when it raised: else this process's bits would depend on who read what, and when
                what = f"reading some of the records {min(indices)} to {max(indices)}"
                _check_settings(self._settings, process_settings() | thread_settings(), what)

        return self._call(checked)

    def _make(self, info: ChunkInfo, indices: list[int], seed: int, ahead: bool) -> Batch:
        if not self.calling_thread:
            watch = DrawWatch()
            batch = watch.read(lambda: self._batch(info, indices, seed))
            if batch is not None and not watch.drew:
                return batch
            log.info("the dataset draws random numbers (chunk %d): from now on no batch is made ahead", info.id)
            self.calling_thread = True
        if ahead:
            raise NeedsCallingThread
        with seeded(seed):
            return self._batch(info, indices, seed)

    def _batch(self, info: ChunkInfo, indices: list[int], seed: int) -> Batch:
        seed_generators(self._own, seed)
        try:
            return self._collate(self._items(indices))
        except Exception as error:
            # Which may be read, asked for one by one? Storage may answer again in between.
            bad = [] if is_of_storage(error) else [i for i in indices if not self._works(i)]
            if not bad or len(bad) == len(indices):
                raise
            text = f"of {len(indices)} records only {listed(bad)} cannot be read: {describe(error)}"
            raise BadRecords(text, [i - info.start for i in bad]) from error

    def _items(self, indices: list[int]) -> Sequence[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        found: Sequence[Any] = many(indices) if many else [self._dataset[i] for i in indices]
        return found

    def _works(self, index: int) -> bool:
        try:
            self._items([index])
        except Exception:
            return False
        return True

    def _collate(self, items: Sequence[Any]) -> Batch:
        batch: Batch = default_collate([named(item, self.spec.columns) for item in items])
        for column, tensor in batch.items():
            shape, dtype = [len(items), *self.spec.record_shape(column)], f"torch.{self.spec.types[column].dtype}"
            if list(tensor.shape) != shape or str(tensor.dtype) != dtype:
                what = f"column {column} is {tensor.dtype}{list(tensor.shape)}, described as {dtype}{shape}"
                raise GraphftError(what, rule="columns", help="make all records alike")
        return batch


def _check_settings(before: Mapping[str, object], now: Mapping[str, object], what: str) -> None:
    """Raises GraphftError[settings-changed] if user code has changed what all of this process computes with."""
    if changed := [f"{n}: {before[n]} -> {now[n]}" for n in now if now[n] != before[n]]:
        help = "set them where the dataset's module is loaded, or set them back before it returns"
        raise UsageError(f"{what} changed settings: {', '.join(changed)}", rule=SETTINGS_CHANGED, help=help)


def reset_signals_in_forks() -> None:
    """From now on forks of this process take signals as any process does: multiprocessing ends its workers by SIGTERM,
    which the handler of a trainer would ignore."""

    def reset() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=reset)


# -- draws --------------------------------------------------------------------------------------------------------


class _Drawn(BaseException):
    """Ends a read at its first draw. No Exception: user code that handles errors is not to handle this one."""


class DrawWatch(TorchDispatchMode):
    """`read(call)` returns what `call` returns. `drew`: it drew from a global generator, so that the result is worth
    nothing (None, if it was stopped): from torch's by an operator that this thread called, or a function that seeds it;
    from Python's or NumPy's if their states differ."""

    drew = False

    def read(self, call: Callable[[], T]) -> T | None:
        before = python_states()
        try:
            with self:
                made = call()
        except _Drawn:
            return None
        self.drew = self.drew or before != python_states()
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler: 1.3 s of CPU, and 60 MB, at the start of each trainer."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_random(func) and not any(map(is_own, (*args, *kwargs.values()))):
            self.stop()
        return func(*args, **kwargs)

    def stop(self) -> None:
        self.drew = True
        raise _Drawn


def _guarded(original: Callable[..., T]) -> Callable[..., T]:
    """Has a function of torch that sets the global generator, and is no operator, end a read that is watched."""

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> T:
        for watch in _get_current_dispatch_mode_stack():
            if isinstance(watch, DrawWatch):
                watch.stop()
        return original(*args, **kwargs)

    return guarded


torch.manual_seed = torch.random.manual_seed = _guarded(torch.manual_seed)
torch.seed = torch.random.seed = _guarded(torch.seed)
torch.set_rng_state = torch.random.set_rng_state = _guarded(torch.set_rng_state)


@functools.cache
def _is_random(func: Any) -> bool:
    """Not all of them have the tag; those that take a generator draw from one."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(
        argument.name == "generator" for argument in func._schema.arguments
    )
