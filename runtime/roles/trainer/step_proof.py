"""What a trainer proves itself with: block step, once, on values near the initial ones and the first batch of the data.

Not on the initial values themselves: where many are zero (a head, an adapter), every machine computes the same.

The batch is read as any other, so it may fail, hang, or end the process. An error is told, and the trainer goes on
without proof; of a process that ended in the middle a record stays, and when that has happened some times in a row,
and no trainer has computed the batch yet, the others go on without proof, too, and say so. The queue then finds out
what is wrong with the batch, and leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphft.errors import GraphftError, describe
from graphft.ir import Kind
from graphft.ops.context import ChunkWork, Context, Interrupt, Slices
from graphft.plan import batch_seed
from graphft.runtime.data import BatchKey
from graphft.runtime.etcd import delete_op, put_op
from graphft.runtime.execute.lowering import Observe, lower
from graphft.runtime.process.work_record import Phase, Place
from graphft.runtime.queue.units import batches_of
from graphft.runtime.roles.proof import digest, is_recorded, prove, undisturbed
from graphft.runtime.roles.role import log
from graphft.runtime.roles.trainer.scope import trainer_scope
from graphft.runtime.transport.buffers import BucketLayout, byte_view, pack, unpack

if TYPE_CHECKING:
    from graphft.runtime.roles.trainer.trainer import Trainer

DEATHS = 3
"""Attempts in a row that ended with their processes. Those that die together (a machine is preempted) are one."""


def prove_step(trainer: Trainer) -> None:
    """Compares what this trainer makes of the first batch with what the first trainer made of it.

    Raises GraphftError[exactness].
    """
    key = trainer.keys.proof("trainer")
    if trainer.view.over or trainer.leaving or not (is_recorded(trainer, key) or _may_try(trainer)):
        return
    trial = StepTrial(trainer)
    with trainer.progress.within(trainer.progress.usual, "proving itself"):
        trainer.work_record.begin(Phase.PROVING, Place(*trial.key[:3]))
        try:
            prove(trainer, key, trial)
        except _Unusable as error:
            cause = error.__cause__ or error
            if isinstance(cause, Interrupt):
                return
            _tell(
                trainer,
                f"trainer {trainer.index} could not compute the batch that all prove themselves with, and "
                f"goes on without proof: {describe(cause)}",
            )
        finally:  # also when it was interrupted
            trainer.work_record.mark(Phase.IDLE)
            _tried(trainer)


class _Unusable(Exception):
    """The batch cannot be read or computed."""


def _may_try(trainer: Trainer) -> bool:
    """Notes that this process tries, and how many attempts before it failed; not if those were too many."""
    tried, trying = trainer.keys.proof("tried/"), trainer.keys.proof("trying/")
    before = {kv.key.removeprefix(tried): int(kv.value or 0) for kv in trainer.etcd.range(tried).kvs}
    living = {kv.key.removeprefix(trying) for kv in trainer.etcd.range(trying, keys_only=True).kvs}
    failed = max((number + 1 for process, number in before.items() if process not in living), default=0)
    if failed >= DEATHS:
        _tell(
            trainer,
            f"trainer {trainer.index} goes on without proof: {failed} times in a row, trainers ended while "
            "they computed the batch that all prove themselves with",
        )
        return False
    if trainer.lease:
        trainer.etcd.txn(
            [], [put_op(tried + trainer.id, str(failed).encode()), put_op(trying + trainer.id, b"", trainer.lease)]
        )
    return True


def _tell(trainer: Trainer, text: str) -> None:
    log.warning("%s", text)
    trainer.events.emit("unproved", text)


def _tried(trainer: Trainer) -> None:
    if trainer.lease:
        trainer.etcd.txn([], [delete_op(trainer.keys.proof(f"{kind}/{trainer.id}")) for kind in ("tried", "trying")])


class StepTrial:
    """Block step (and block local), with a scope of its own and ports that write down what passes them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.program, config = trainer, trainer.program, trainer.config
        chunk = next(c for c, n in enumerate(config.data.batches(config.batch_size, config.drop_last)) if n)
        self.key = BatchKey(0, chunk, 0, config.batch_size)
        self.what = f"batch 0 of chunk {chunk}"
        self._batch: dict[str, Tensor] = {}
        self._size = 0
        """Records of it that are computed with now."""

    def run(self, observe: Observe | None = None) -> tuple[dict[str, str], str]:
        try:
            with undisturbed():
                initial, results = self._run(observe)
        except (Interrupt, Exception) as error:
            raise _Unusable from error
        inputs = {f"values of column {name}": digest([value]) for name, value in self._batch.items()}
        return inputs | {"initial values": digest(initial)}, digest(results)

    def _run(self, observe: Observe | None) -> tuple[list[Tensor], list[Tensor]]:
        """(what the step begins with, what it gives)."""
        self._batch = self._batch or self.trainer.prefetcher.get(self.key)
        fetch = () if self.program.find_op("local_steps") is not None else (self.loss,)
        initial: list[Tensor] = []
        results: list[Tensor] = []
        for size in self._sizes():
            self._size = size
            ports = _Ports(self, observe)
            results += [*ports.run("step", fetch), *ports.losses, *_in_order(ports.pushed)]
            initial = _in_order(ports.pulled)
        return initial, results

    def _sizes(self) -> list[int]:
        """The batch as it is, and as short as the shortest of the data: libraries choose other kernels for that."""
        config, whole = self.trainer.config, len(next(iter(self._batch.values())))
        short = {c.records % config.batch_size for c in config.data.chunks} - {0} if not config.drop_last else set()
        return [whole, *(size for size in sorted(short)[:1] if size < whole)]

    @property
    def loss(self) -> str:
        return str(self.program.attrs["loss"])

    def work(self) -> ChunkWork:
        """The batch; of units, one of one batch."""
        return ChunkWork(0, self.key.chunk, 0, self._size, batch_seed(self.trainer.config.seed, 0, 0))

    def columns(self, names: Sequence[str]) -> list[Tensor]:
        return [self._batch[name][: self._size].clone() for name in names]


def _in_order(buckets: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
    return [buckets[key] for key in sorted(buckets)]


class _Ports:
    """All ports of block step. Transfers: (shard, bucket) -> values, flat."""

    def __init__(self, trial: StepTrial, observe: Observe | None) -> None:
        self.trial, self.trainer, self._observe = trial, trial.trainer, observe
        self.pulled: dict[tuple[int, int], Tensor] = {}
        self.pushed: dict[tuple[int, int], Tensor] = {}
        self.losses: list[Tensor] = []
        self._work: ChunkWork | None = None
        ports: Any = self
        self.ctx = Context(
            trainer_scope(trial.program),
            device=self.trainer.config.device,
            session=ports,
            members=ports,
            queue=ports,
            comm=ports,
            data=ports,
            local=ports,
        )

    def run(self, name: str, fetch: tuple[str, ...]) -> tuple[Any, ...]:
        block = self.trial.program.blocks[name]
        if self._observe is None:
            return self.trainer.blocks.lowered(block, fetch)(self.ctx, self.ctx.scope)
        return lower(block, fetch=fetch, device=self.ctx.device, observe=self._observe)(self.ctx, self.ctx.scope)

    # -- QueuePort, MembersPort, DataPort -----------------------------------------------------------------------

    def claim_chunk(self, timeout: float, max_failures: int) -> ChunkWork:
        return self.trial.work()

    def planned_chunk(self) -> ChunkWork:
        return self.trial.work()

    def complete_chunks(self) -> None:
        """Nothing was claimed."""

    def release_slots(self) -> None:
        """No slot is held."""

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[Tensor]:
        return self.trial.columns(columns)

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        values = self.pulled.get((shard, bucket))
        if values is None:
            values = self.pulled[shard, bucket] = self._initial(shard, bucket)
        unpack(byte_view(values), tensors, slices)

    def _initial(self, shard: int, bucket: int) -> Tensor:
        program = self.trainer.job.pserver_program(shard)
        (op,) = (op for op in program.blocks["init"].ops if op.type == "bucket" and op.attrs["index"] == bucket)
        generator = torch.Generator().manual_seed(shard << 32 | bucket)
        slices = [(program.variables[ref.name].kind, program.values[ref.name].reshape(-1)) for ref in op.args]
        return torch.cat([_moved(value, generator) if kind is Kind.PARAM else value for kind, value in slices])

    def end_pull(self, shards: int) -> None:
        """Nothing is awaited."""

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices) -> None:
        layout = BucketLayout.of(tensors, slices)
        flat = self.pushed[shard, bucket] = torch.empty(layout.numel, dtype=layout.dtype)
        pack(flat, tensors, layout)

    def end_push(self, shards: int, push_timeout: float, max_skipped: int) -> None:
        """Nothing is awaited."""

    # -- LocalPort ----------------------------------------------------------------------------------------------

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config = self.trainer.config
        for work in batches_of(unit, count=count, batch_size=config.batch_size, seed=config.seed):
            self._work = work
            self.losses += self.run(block, (self.trial.loss,))

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._work is None:
            raise GraphftError("block local runs outside of a unit", rule="local-block")
        return self._work


def _moved(value: Tensor, generator: torch.Generator) -> Tensor:
    """Values near `value`, hardly any of them zero, with the same bits on every machine: the noise comes from integers.
    Integers stay as they are."""
    if not value.is_floating_point():
        return value
    noise = torch.randint(-8, 9, value.shape, generator=generator).to(value.dtype) / 1024
    return value * (1 + noise) + noise
