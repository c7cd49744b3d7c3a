"""One contribution computed in this process, by the trainer's own block step; and what of it is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphft.ir import Block, Kind
from graphft.ir.printer import format_operator
from graphft.ir.registry import writes_of
from graphft.ops.context import ChunkWork, Context, Slices
from graphft.plan import Located, batch_seed
from graphft.runtime.data import BatchKey, Reader
from graphft.runtime.execute.finite import is_finite, nonfinite_of
from graphft.runtime.execute.lowering import Observe, lower
from graphft.runtime.replay.shards import LocalShards
from graphft.runtime.roles.proof import undisturbed
from graphft.runtime.roles.trainer.scope import trainer_scope
from graphft.runtime.roles.trainer.step_trial import TrialBatch, TrialComm
from graphft.transpiler.layout import gradient_of

if TYPE_CHECKING:
    from graphft.transpiler import Job


class LocalComm(TrialComm):
    """Gives the parameters of shards in this process. `finite`: as the job's own check would find."""

    def __init__(self, job: Job, shards: LocalShards) -> None:
        super().__init__(job)
        self.shards, self.finite = shards, True

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        super().push(shard, bucket, tensors, slices, check)
        self.finite = self.finite and (not check or is_finite(self.pushed[shard, bucket]))

    def check_loss(self, loss: Tensor) -> None:
        self.finite = self.finite and is_finite(loss)

    def values_of(self, shard: int, bucket: int) -> Tensor:
        return self.shards.bucket(shard, bucket)


@dataclass(frozen=True)
class Origin:
    """An op, as text, that makes values that are not finite of operands that are; and which."""

    op: str
    what: str


@dataclass
class Computed:
    """A contribution. `gradients`: by parameter; `origins`: in the order of computation; both when observed."""

    work: Located
    columns: Mapping[str, Tensor]
    loss: float
    pushed: Mapping[tuple[int, int], Tensor]
    finite: bool
    numbers: Sequence[int]
    """Which records of the data the batch has."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    """Of those that were received, how many values are not finite, where any."""
    origins: list[Origin] = field(default_factory=list)


class LocalTrainer:
    """Computes any (step, slot) on the shards' values of now."""

    def __init__(self, job: Job, reader: Reader, shards: LocalShards) -> None:
        self.job, self.reader, self.shards = job, reader, shards
        self.program, self.config = job.trainer_program(), job.config
        self.loss = str(self.program.attrs["loss"])
        self._quiet = lower(self.program.blocks["step"], fetch=(self.loss,), device=self.config.device)

    def compute(self, step: int, slot: int, observer: Observer | None = None) -> Computed | None:
        """None: the slot has no batch at this step."""
        found = self.config.plan.locate(step, slot)
        if found is None:
            return None
        key = BatchKey(found.pass_index, found.chunk, found.batch, self.config.batch_size)
        columns = self.reader.batch(*key)
        seed = batch_seed(self.config.seed, step, slot)
        batch = TrialBatch(ChunkWork(found.pass_index, found.chunk, found.batch, found.samples, seed), columns)
        comm = LocalComm(self.job, self.shards)
        ctx = Context(trainer_scope(self.program), step, slot, self.config.device)
        ctx.queue, ctx.slots, ctx.data, ctx.comm = batch, batch, batch, comm
        run = self._quiet if observer is None else self._observed(observer.look)
        with undisturbed():
            (loss,) = run(ctx, ctx.scope)
        computed = Computed(found, columns, float(loss), comm.pushed, comm.finite, self.reader.numbers(key))
        if observer is not None:
            computed.gradients, computed.origins = observer.gradients, observer.origins
            computed.parameters = nonfinite_of({v.name: ctx.scope[v.name] for v in self.program.of_kind(Kind.PARAM)})
        return computed

    def _observed(self, look: Observe) -> Any:
        return lower(self.program.blocks["step"], fetch=(self.loss,), device=self.config.device, observe=look)


class Observer:
    """Is told of each op that has run. Infinities may be meant (a mask's), so they are told apart from NaN: an op is
    an origin of NaN if none of its operands has any."""

    def __init__(self, job: Job) -> None:
        parameters = job.trainer_program().of_kind(Kind.PARAM)
        self._parameter = {gradient_of(v): v.name for v in parameters}
        self._nan: set[str] = set()
        self._infinite: set[str] = set()
        self.gradients: dict[str, Tensor] = {}
        self.origins: list[Origin] = []

    def look(self, block: Block, index: int, values: Mapping[str, Any]) -> None:
        op = block.ops[index]
        tensors = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()}
        if op.type == "send":
            sent = ((self._parameter[n], v) for n, v in tensors.items() if n in self._parameter)
            self.gradients |= {name: value.detach().clone() for name, value in sent}
        written = [n for n in writes_of(op) if n in tensors]
        clean = not any(n in self._nan | self._infinite for n in op.reads)
        made = []
        for name in written:
            nan, infinite = int(tensors[name].isnan().sum()), int(tensors[name].isinf().sum())
            new = (nan and not self._nan.intersection(op.reads)) or (infinite and clean)
            if new:
                made.append(f"%{name}: {_counted(nan, infinite)} of {tensors[name].numel()} values")
        for name in written:
            self._note(name, tensors[name])
        if made:
            self.origins.append(Origin(format_operator(op, block.program), ", ".join(made)))

    def _note(self, name: str, value: Tensor) -> None:
        for known, found in ((self._nan, value.isnan().any()), (self._infinite, value.isinf().any())):
            (known.add if found else known.discard)(name)


def _counted(nan: int, infinite: int) -> str:
    return " and ".join(f"{n} {what}" for n, what in ((nan, "nan"), (infinite, "infinite")) if n)
