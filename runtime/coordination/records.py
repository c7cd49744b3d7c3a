"""The records in etcd; their fields are their JSON. The queue's are in `protocol.chunk_queue` and
`protocol.task_pass`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from graphft.runtime.etcd.model import KV
from graphft.runtime.process.identity import UNKNOWN, Identity
from graphft.runtime.transport.address import with_key

T = TypeVar("T", bound=msgspec.Struct)


def decode(kv: KV | None, kind: type[T]) -> T | None:
    """Returns the record that is this key's value; None without one."""
    return None if kv is None else msgspec.json.decode(kv.value, type=kind)


class RunRecord(msgspec.Struct, frozen=True):
    """The run's record at `/<job>/spec`: `run` is its id, `folder` and `host` are where it was begun. With `on_demand`
    its passes are asked for, one by one, and `passes` is how many there can be."""

    trainers: int
    pservers: int
    sync: bool
    ft: bool
    passes: int
    total_steps: int
    run: str = ""
    folder: str = ""
    host: str = ""
    dispatch: str = "etcd"
    on_demand: bool = False


class Registration(msgspec.Struct, frozen=True):
    """The value of `/<job>/ps/<index>` and `/<job>/trainers/<id>`. `id` is new for every process, `process` tells which
    one it is; `pid` and `host` are for people. In one `network` namespace processes reach each other on loopback; "":
    not known. `key`: its public key."""

    id: str
    address: str
    pid: int
    host: str
    network: str = ""
    process: Identity = UNKNOWN
    key: str = ""

    @property
    def keyed_address(self) -> str:
        """Says where others reach this process, and by which key they know it."""
        return with_key(self.address, self.key)


class Ordered(msgspec.Struct, frozen=True):
    """In the list at `/<job>.status/places/<launcher>`: a process that a launcher has ordered from its engine. `place`
    is "" for the launcher's machine; `pid` is 0 until there is room for it."""

    role: str
    index: int
    place: str
    pid: int


class Barred(msgspec.Struct, frozen=True):
    """The value of `/<job>/barred/<trainer>`: why work should go to others. `by`: id of the process that wrote it."""

    reason: str
    by: str


class Generation(msgspec.Struct, frozen=True):
    """The job's generation, and the step (with its checkpoint's folder; "" for the initial values) it began at."""

    number: int = 0
    step: int = 0
    checkpoint: str = ""
    reason: str = ""


class Committed(msgspec.Struct, frozen=True, omit_defaults=True):
    """The newest committed checkpoint. `passes` (async): so many passes, from the first on, are wholly in it."""

    generation: int
    step: int
    checkpoint: str
    passes: int = 0


class Asked(msgspec.Struct, frozen=True):
    """A checkpoint beside the regular ones, that all shards are to take when they reach `step` in `generation`."""

    generation: int
    step: int


class PassRecord(msgspec.Struct, frozen=True, rename={"pass_index": "pass"}):
    """The value of `/<job>/pass`: the pass that is worked on, whose records are whole. Async: the number of passes
    when all of them are done."""

    pass_index: int
    chunks: int
    start_step: int


class Failure(msgspec.Struct, frozen=True):
    """The value of `/<job>/failure`: why the job has failed, and what to do about it."""

    reason: str
    help: str = ""


class TrainerStatus(msgspec.Struct, frozen=True):
    """A trainer's report. `samples_per_second` is over its last few seconds, `seconds` tells where its time went since
    it began (`process.work_record.Activity`). `waiting` names the storage that it waits for, `unreached` the shards
    that do not answer it. `paused`, `validating`: it waits for the next pass to be asked for, or for a validation.
    `learning_rates` are its optimizers' in mode geo_sgd, by variable.
    """

    step: int = 0
    pass_index: int = 0
    samples: int = 0
    samples_per_second: float = 0.0
    skipped: int = 0
    counters: dict[str, int] = {}
    waiting: str = ""
    unreached: list[str] = []
    seconds: dict[str, float] = {}
    paused: bool = False
    learning_rates: dict[str, float] = {}
    validating: bool = False


class ShardStatus(msgspec.Struct, frozen=True):
    """A pserver's report. `applied` counts updates of its parameters since it started, repeated ones too;
    `skipped_steps`, of the job so far, those (async: batches, units) that were discarded as not finite.
    `checkpoint_seconds`: for so long steps have waited for copies of its state. `checkpoint_age`: seconds since the
    newest committed checkpoint was written (async: the shard's own). `metrics`: shard 0's, of its newest step, means
    over the samples. Async: `staleness[s]` of these gradients were `s` versions behind, the last one: or more.
    """

    version: int = 0
    generation: int = 0
    rounds_per_second: float = 0.0
    applied: int = 0
    counters: dict[str, int] = {}
    staleness: list[int] = []
    staleness_mean: float = 0.0
    staleness_max: int = 0
    skipped_steps: int = 0
    checkpoint_seconds: float = 0.0
    learning_rates: dict[str, float] = {}
    checkpoint_age: float | None = None
    metrics: dict[str, float] = {}


class CoordinatorStatus(msgspec.Struct, frozen=True):
    """A coordinator's report. `serving`: it holds the lock; `reloads`: so often it has read its queues from etcd."""

    serving: bool = False
    reloads: int = 0
    counters: dict[str, int] = {}


class LoadingStatus(msgspec.Struct, frozen=True):
    """The report of a process that is not ready to register: its work, and since when (seconds since 1970)."""

    role: str
    what: str
    since: float
    pid: int
    host: str
    process: Identity = UNKNOWN


class PassMetrics(msgspec.Struct, frozen=True):
    """The result of a pass. `means`: over `samples`, of the loss and each metric that `loss_fn` returns; as text where
    it is not finite, which JSON has no number for. `lacking`: so many steps have no row, as a shard 0 has died, and its
    machine with it. `began`, `ended`: when its first and last step were applied (seconds since 1970)."""

    samples: int
    means: dict[str, float | str]
    lacking: int = 0
    began: float = 0.0
    ended: float = 0.0

    def numbers(self) -> dict[str, float]:
        """Returns the means and `samples`."""
        return {name: float(mean) for name, mean in self.means.items()} | {"samples": self.samples}


class Validating(msgspec.Struct, frozen=True):
    """The value of `/<job>/validating/<step>`: this checkpoint, of this step, is being validated."""

    generation: int
    checkpoint: str


class Validated(msgspec.Struct, frozen=True):
    """The result of a validation. `epoch`: so many passes were done; `means`: over `samples`, of the loss and each
    metric; one that is not finite as text; none of one that could not be made. `at`: seconds since 1970."""

    step: int
    epoch: int
    samples: int
    means: dict[str, float | str]
    at: float


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """`kind` is stable (for counting); `text` is the sentence that people read. `at`: Unix seconds."""

    at: float
    who: str
    kind: str
    text: str
    fields: dict[str, Any] = {}
