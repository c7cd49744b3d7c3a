"""The context of a kernel, and the ports behind it.

A kernel gets everything that is not an operand from `ctx`: the step it works for, and one *port* per outside world
(etcd, ZeroMQ, files, data), whose methods do what the ops that call them say. A port with several implementations is a
Protocol here. No kernel reads a clock, the environment or a global.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

Slices = Sequence[tuple[int, int]]
"""Per operand, the [start, end) range of its flattened elements that travels."""
OnNonfinite = Literal["stop", "skip", "warn"]
"""The fate of a contribution whose loss, or a gradient of which, is not finite."""


class Interrupt(Exception):
    """Control flow out of a running block, on purpose: never an error, passes through the executor untouched."""


class EndOfPass(Interrupt):
    """`etcd_get_chunk`: no work is left in this pass, and all of it is complete."""


class NoData(Interrupt):
    """`etcd_get_chunk`: this slot has no batch at this step; the role closes it as empty with `send_barrier`."""


class NotYet(Interrupt):
    """`etcd_await_pass`, `etcd_await_validation`: this step is not wanted so far. `what` is waited for, in words."""

    def __init__(self, what: str, validation: bool = False) -> None:
        super().__init__(what)
        self.what, self.validation = what, validation


class WorkChanged(Interrupt):
    """A wait ended early because what this role has to do changed (slots gained or lost, a new generation)."""


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One batch to compute: the result of `etcd_get_chunk`, the operand of `read_chunk`."""

    pass_index: int
    chunk: int
    batch: int
    """Index of the batch inside its chunk."""
    samples: int
    seed: int
    """Seeds the step's random numbers: a function of (job seed, step, slot), or (job seed, pass, chunk, batch)."""
    attempt: int = 0
    claim: int = 0
    """etcd revision of the claim: the fence of whatever relies on it."""
    number: int = 0
    """A unit's batch: how many of the job were done before it (see op batch_number)."""
    without: frozenset[int] = frozenset()
    """Positions in the chunk of records that are discarded; `samples` does not count them."""


class ClaimTerms(NamedTuple):
    """The terms of claims: see op `etcd_get_chunk`."""

    max_failures: int = 0
    max_discarded: int = 0


NO_TERMS = ClaimTerms()


class ViewPort(Protocol):
    """The watched view of the job: who lives, who holds which slot, which generation it is."""

    def watch(self) -> None:
        """Takes in what changed since the last call, and wakes what waits for it."""


class SlotsPort(Protocol):
    """The slots (logical trainers) of sync training."""

    def await_pass(self) -> None: ...
    def await_validation(self) -> None: ...
    def claim_slots(self, slots: int, policy: str) -> None: ...
    def release_slots(self) -> None: ...


class ClaimsPort(Protocol):
    """Claims of chunks: the own ones, and those that others have left."""

    def renew(self, timeout: float) -> None: ...


class QueuePort(ClaimsPort, Protocol):
    """The chunk queue, whether its records are in etcd or with a coordinator."""

    def begin_pass(self) -> None:
        """Makes the current pass's records, unless they are there; exactly once, also after a crash half-way."""

    def get(self, terms: ClaimTerms = NO_TERMS) -> ChunkWork:
        """Returns the batch to compute now, its chunk claimed. Raises EndOfPass, NoData or WorkChanged."""

    def complete(self) -> None: ...
    def fail(self) -> None:
        """Reports the batch that has just failed."""


class CommPort(Protocol):
    """The trainer's side of the data plane."""

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None: ...
    def check_loss(self, loss: Tensor) -> None: ...
    def report(self, values: Sequence[Tensor]) -> None: ...
    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None: ...
    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None: ...
    def end_pull(self, shards: int) -> None: ...


class DataPort(Protocol):
    """Reads batches, ahead of use."""

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> Sequence[Tensor]: ...


class LocalPort(Protocol):
    """Several batches between two pushes."""

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None: ...
    def local_batch(self, unit: ChunkWork) -> ChunkWork: ...


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The attributes of `listen_and_serv`: see there."""

    shard: int
    shards: int
    sync: bool
    slots: int
    total_steps: int
    optimize_blocks: tuple[str, ...]
    schedule_block: str = ""
    reduce_block: str = ""
    skip_block: str = ""
    checkpoint_block: str = ""
    checkpoint_every: int = 0
    checkpoint_passes: bool = False
    recovery: bool = False
    recovery_timeout: float = 10.0
    on_barrier_timeout: Literal["rollback", "proceed"] = "rollback"
    max_staleness: int = -1
    metrics: tuple[str, ...] = ()
    validate_every: int = 0
    validate_passes: bool = False
    scaled_rates: bool = False

    @property
    def update_blocks(self) -> tuple[str, ...]:
        """The blocks that apply the gradients: the learning rate's schedule, if there is one, and the optimizers."""
        return (*((self.schedule_block,) if self.schedule_block else ()), *self.optimize_blocks)


class ServerPort(Protocol):
    """A pserver's own services."""

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None: ...
    def load_check_point(self) -> None: ...
    def save_check_point(self, names: Sequence[str], keep: int) -> None: ...
    def notify_checkpoint(self, seconds: float) -> None: ...
    def serve(self, options: ServeOptions) -> None: ...


_ABSENT: Any = None
"""A port that the role does not have: its program holds no op that asks for it."""


@dataclass(slots=True)
class Context:
    """A kernel's world. `step` is, in sync mode, the version of the parameters that it reads."""

    scope: MutableMapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    slot: int = 0
    device: str = "cpu"
    session: Any = _ABSENT
    view: ViewPort = _ABSENT
    slots: SlotsPort = _ABSENT
    queue: QueuePort = _ABSENT
    claims: ClaimsPort = _ABSENT
    comm: CommPort = _ABSENT
    data: DataPort = _ABSENT
    local: LocalPort = _ABSENT
    server: ServerPort = _ABSENT
    coordinator: Any = _ABSENT
    task_server: Any = _ABSENT
    validation: Any = _ABSENT
    modules: dict[int, Any] = field(default_factory=dict)
    """Modules that op `eager_step` has unpickled, by the identity of the constant that holds them."""
