"""What a kernel may touch: its context, and the ports behind it.

A kernel of ours gets everything that is not an operand from `ctx`: the step it works for, and one *port* per
outside world (etcd, ZeroMQ, files, data). Roles give ports that are real; the simulation gives simulated ones.
No kernel reads a clock, the environment or a global.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Slices = Sequence[tuple[int, int]]
"""Per operand, the [start, end) range of its flattened elements that travels."""


OnNonfinite = Literal["stop", "skip", "warn"]
"""What becomes of a contribution whose loss, or a gradient of which, is not finite."""


class Interrupt(Exception):
    """Control flow out of a running block, on purpose: never an error, passes through the executor untouched."""


class EndOfPass(Interrupt):
    """`etcd_get_chunk`: no work is left in this pass, and all of it is complete."""


class NoData(Interrupt):
    """`etcd_get_chunk`: this slot has no batch at this step; the role closes it as empty with `send_barrier`."""


class NotYet(Interrupt):
    """`etcd_await_pass`, `etcd_await_validation`: this step is not wanted so far."""

    def __init__(self, what: str, validation: bool = False) -> None:
        """`what` is waited for, in words; whether it is a `validation`."""
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


class SessionPort(Protocol):
    """This process's lease."""

    def register(self, *, role: str, index: int, lease: bool) -> None:
        """Claims this process's key (`/<job>/ps/<index>`, `/<job>/trainers/<id>`) with its address as the value."""

    def keep_alive(self, progress_timeout: float) -> None:
        """Renews the lease while the main thread makes progress. Raises LeaseLost when it cannot be relied on."""

    def wait_pservers(self, count: int, timeout: float) -> None:
        """Waits until `count` pservers are registered, and connects to them."""

    def find_coordinator(self, timeout: float) -> None:
        """Waits until a coordinator serves."""

    def report_status(self) -> None:
        """Writes what this process has reached where displays read it."""


class ViewPort(Protocol):
    """The watched view of the job: who lives, who holds which slot, which generation it is."""

    def watch(self) -> None:
        """Takes in what changed since the last call, and wakes what waits for it."""


class SlotsPort(Protocol):
    """The slots (logical trainers) of sync training."""

    def await_pass(self) -> None:
        """Raises NotYet when the pass of the current step is not wanted so far."""

    def await_validation(self, every: int, passes: bool) -> None:
        """Raises NotYet when what the current step depends on is not decided so far."""

    def claim_slots(self, slots: int, policy: str) -> None:
        """Claims free slots up to this trainer's share."""

    def release_slots(self) -> None:
        """Hands surplus slots over. Called at step boundaries only."""


class ClaimTerms(NamedTuple):
    """The terms of claims: see op `etcd_get_chunk`."""

    timeout: float = math.inf
    max_failures: int = 0
    max_discarded: int = 0


NO_TERMS = ClaimTerms()


class ClaimsPort(Protocol):
    """Claims of chunks: the own ones, and those that others have left."""

    def renew(self, timeout: float) -> None:
        """Some times in `timeout` seconds: says that the own ones are worked on. Takes away what others do not renew
        (a coordinator does that itself)."""


class QueuePort(ClaimsPort, Protocol):
    """The chunk queue, whoever keeps its records."""

    def begin_pass(self) -> None:
        """Makes the current pass's records, unless they are there; exactly once, also after a crash half-way."""

    def get(self, terms: ClaimTerms = NO_TERMS) -> ChunkWork:
        """Returns the batch to compute now, its chunk claimed. Raises EndOfPass, NoData or WorkChanged."""

    def complete(self) -> None:
        """Completes the chunks whose last batch every shard has applied."""

    def fail(self) -> None:
        """Reports the batch that has just failed."""


class CommPort(Protocol):
    """The trainer's side of the data plane."""

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None: ...
    def check_loss(self, loss: Tensor) -> None: ...
    def report(self, values: Sequence[Tensor]) -> None:
        """What the contribution at hand tells beside its gradients."""

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None: ...
    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None: ...
    def end_pull(self, shards: int) -> None: ...


class DataPort(Protocol):
    """Reads batches, ahead of use."""

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> Sequence[Tensor]: ...


class LocalPort(Protocol):
    """Several batches between two pushes."""

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        """Runs the block for each of the unit's batches."""

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        """The batch that it runs for now."""


class ValidationPort(Protocol):
    """Validations, and what this process does for them."""

    def get_range(self, timeout: float, max_failures: int) -> ChunkWork:
        """The batch to compute now. Raises NoData."""

    def weights(self, names: Sequence[str]) -> Sequence[Tensor]:
        """Of the model that is validated."""

    def complete_range(self, work: ChunkWork, results: Sequence[Tensor]) -> None:
        """Takes in the results of a batch."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The attributes of `listen_and_serv`: see there."""

    shard: int
    shards: int
    sync: bool
    slots: int
    total_steps: int
    optimize_blocks: tuple[str, ...]
    schedule_block: str
    reduce_block: str
    skip_block: str
    checkpoint_block: str
    checkpoint_every: int
    checkpoint_passes: bool
    recovery: bool
    recovery_timeout: float
    on_barrier_timeout: Literal["rollback", "proceed"]
    max_staleness: int
    idle_timeout: float
    metrics: tuple[str, ...]
    validate_every: int
    validate_passes: bool
    scaled_rates: bool

    @property
    def update_blocks(self) -> tuple[str, ...]:
        """What applies the gradients: the learning rate's schedule, if there is one, and the optimizers."""
        return (*((self.schedule_block,) if self.schedule_block else ()), *self.optimize_blocks)


class ServerPort(Protocol):
    """A pserver's own services."""

    def make_bucket(self, index: int, names: Sequence[str], reduce: str) -> None:
        """Lays the named variables out in one flat buffer; the scope then holds views of it."""

    def load_check_point(self) -> None: ...
    def save_check_point(self, names: Sequence[str], keep: int) -> None: ...
    def notify_checkpoint(self, seconds: float) -> None: ...
    def serve(self, options: ServeOptions) -> None: ...


class CoordinatorPort(Protocol):
    """The coordinator's services."""

    def put_job(self, pservers: int) -> None: ...
    def await_job(self) -> None: ...


class TaskServerPort(Protocol):
    """What a coordinator does that gives out tasks."""

    def acquire_lock(self) -> None: ...
    def load_tasks(self) -> None: ...
    def publish(self) -> None: ...
    def serve(self, timeout: float, max_failures: int, max_discarded: int) -> None: ...


@dataclass(slots=True)
class Context:
    """A kernel's world. Ports that a role does not have are None; its program then holds no op that asks for them."""

    scope: MutableMapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    """The step (sync: equal to the version of the parameters that it reads)."""
    slot: int = 0
    device: str = "cpu"
    session: SessionPort | None = None
    view: ViewPort | None = None
    slots: SlotsPort | None = None
    queue: QueuePort | None = None
    claims: ClaimsPort | None = None
    comm: CommPort | None = None
    data: DataPort | None = None
    local: LocalPort | None = None
    server: ServerPort | None = None
    coordinator: CoordinatorPort | None = None
    task_server: TaskServerPort | None = None
    validation: ValidationPort | None = None
    modules: dict[int, object] = field(default_factory=dict)
    """Modules that op `eager_step` has unpickled, by the identity of the constant that holds them."""
