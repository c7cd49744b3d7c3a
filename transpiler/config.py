"""The options of a job, and what its bits depend on."""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from msgspec import Meta

from graphft.data import DataSpec
from graphft.errors import GraphftError, UsageError
from graphft.options import check_values
from graphft.plan import Plan
from graphft.transpiler.validation import ValidationConfig

log = logging.getLogger("graphft")
MAX_ASYNC_PSERVERS = 112
"""Up to 16 chunks are completed by one etcd transaction, which compares every shard's generation: etcd takes 128
compares."""
_ONE, _ZERO, _POSITIVE, _ANY_OR = Meta(ge=1), Meta(ge=0), Meta(gt=0), Meta(ge=-1)
_LIMITS: dict[str, Meta] = {
    "name": Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z"),
    "storage": Meta(pattern=r"^\Z|^(?!memory:).+://"),
    "slice_unit": Meta(ge=64, multiple_of=64),  # vector kernels then give the same bits
    "bucket_bytes": Meta(ge=1024),
    "seed": Meta(ge=-(2**63), le=2**63 - 1),
    "dc_decay": Meta(ge=0, lt=1),
    "max_discarded": Meta(ge=0, le=1),
    **dict.fromkeys(("trainers", "pservers", "batch_size", "epochs", "local_steps", "threads", "min_block"), _ONE),
    **dict.fromkeys(("keep_checkpoints", "max_failures", "lease_ttl"), _ONE),
    **dict.fromkeys(("checkpoint_every", "checkpoint_seconds"), _ZERO),
    **dict.fromkeys(("recovery_timeout", "chunk_timeout", "daemon_interval", "push_timeout", "dc_lambda"), _POSITIVE),
    **dict.fromkeys(("max_staleness", "max_skipped"), _ANY_OR),
}
"""Limits of the values of options, beyond their types."""
NEEDS = (
    ("ft", True, ("storage", "dispatch", "passes_on_demand", "validate")),
    ("sync", True, ("passes_on_demand", "validate", "on_trainer_loss", "on_barrier_timeout", "recovery_timeout")),
    ("sync", False, ("push_timeout", "max_skipped", "max_staleness", "dc_lambda", "dc_decay")),
    ("mode", "dc_asgd", ("dc_lambda", "dc_decay")),
    ("on_bad_data", "discard", ("max_discarded",)),
)
"""(option, value, options that have an effect only with it): given without it they are refused, not ignored."""
NEEDS_FT: tuple[str, ...] = ("checkpoint_every", "checkpoint_seconds", "keep_checkpoints", "max_failures", "lease_ttl")
NEEDS_FT += ("on_trainer_loss", "on_barrier_timeout", "recovery_timeout", "chunk_timeout", "on_bad_data")
NEEDS_FT += ("max_discarded",)
"""Options that lack their effect without `ft`: a warning, as a script may be run with it and without it."""
_NOT_HASHED = ("name", "etcd_endpoints", "storage", "exact", "torch_version", "cpu_capability", "onednn_isa")


@dataclass(frozen=True)
class JobConfig:
    """The options of a job. The programs are a function of the source program and these; times are seconds."""

    name: str
    """The job's name, in etcd and of its folder: 1 to 64 letters, digits, `_` and `-`. By default the program's."""
    data: DataSpec
    """The records to train on: `data=graphft.arrays(...)`, `dataset(...)` or `files(...)`."""
    batch_size: int
    """Samples of a batch. A sync step applies `trainers` batches, an async one each by itself."""
    trainers: int = 1
    """Logical trainers (slots)."""
    pservers: int = 1
    """Parameter servers; each holds its share of the parameters, and of the optimizer's state."""
    sync: bool = True
    """Each step waits for the gradients of all slots, and its bits are exact; else see `mode`."""
    mode: Literal["async", "dc_asgd", "half_async", "geo_sgd"] = "async"
    """A job that is not `sync` pushes and applies each batch's gradient as it is, or delay-compensated; the mean
    gradient of `local_steps` batches; or by how much these moved the trainer's own copy of the parameters."""
    local_steps: int = 1
    """Modes half_async and geo_sgd: batches of a chunk between two pushes (its last unit may have fewer)."""
    dc_lambda: float = 0.04
    """Mode dc_asgd: the strength of the compensation."""
    dc_decay: float = 0.0
    """Mode dc_asgd: dc_lambda is divided by the root of the mean square of the gradients, which decays by this factor
    per batch; 0: it is constant."""
    ft: bool = True
    """Fault tolerance: the job survives whatever dies, and can be resumed. Without it, it ends at the first death."""
    dispatch: Literal["etcd", "coordinator"] = "etcd"
    """Each trainer claims its chunks in etcd; or a coordinator gives them out as tasks. See docs/dispatch.md."""
    epochs: int = 1
    """Times that the data is gone through."""
    passes_on_demand: bool = False
    """A pass begins only when it is asked for (`graphft.Trainer` does), and ends with a checkpoint; processes wait in
    between."""
    seed: int = 0
    """Decides the order of chunks, and the random numbers of every step. By default the program's."""
    drop_last: bool = False
    """Leave a chunk's last batch out when it is shorter than the others."""
    etcd_endpoints: tuple[str, ...] | None = None
    """`host:port` of each member of an etcd that runs already. None: etcd is started with the job."""
    storage: str = ""
    """URL of a folder that no other job has (`s3://bucket/job`): the job, its checkpoints and its model lie there, and
    every machine needs it and etcd only. "": they lie in the job's folder, which all machines have to share."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0: none for their number."""
    checkpoint_seconds: float = 30.0
    """A checkpoint is taken, too, when the newest committed one is so old; 0: never for its age."""
    keep_checkpoints: int = 3
    """Checkpoints that are kept, the newest ones."""
    on_trainer_loss: Literal["takeover", "wait"] = "takeover"
    """Sync: the other trainers take over a dead one's slots; or each keeps to one slot, and the step waits."""
    on_barrier_timeout: Literal["rollback", "proceed"] = "rollback"
    """Sync: when the first step after a shard's restart does not come about in `recovery_timeout`, all go back to the
    committed step; or the step is made of what is there, which is not exact."""
    on_nonfinite: Literal["stop", "skip", "warn"] = "stop"
    """When a loss or a gradient is not finite: the job fails and says where; or every shard leaves the step (async: the
    batch) out, and counts it; or the losses alone are looked at, and training goes on."""
    recovery_timeout: float = 10.0
    """Seconds for the first step after a shard's restart."""
    chunk_timeout: float = 60.0
    """A process that makes no progress for so long loses its work to another one, and ends itself. Must be longer
    than a batch takes."""
    max_failures: int = 3
    """Failures of a batch in a row that have it left out, as bad data."""
    on_bad_data: Literal["discard", "fail"] = "discard"
    """A job with a batch that fails so often goes on without it, or ends."""
    max_discarded: float = 0.01
    """The share of the data's records that may be left out; a job that would lose more fails."""
    lease_ttl: int = 10
    """Whole seconds; a process whose lease ended is dead to the others."""
    push_timeout: float = 10.0
    """Async: a shard that has not answered for this time is skipped for this batch, which is made good later."""
    max_skipped: int = 16
    """Async: a shard that was skipped for so many batches of a trainer's chunks is waited for; -1: never."""
    daemon_interval: float = 0.5
    """Seconds between two runs of the daemon block: liveness, slots, timeouts."""
    slice_unit: int = 8192
    """Elements, a multiple of 64: parameters are cut into slices at multiples of it."""
    min_block: int = 8192
    """Elements; a tensor is not cut into smaller slices to spread it over the shards."""
    bucket_bytes: int = 4 << 20
    """About the size of a bucket: the slices that are sent together."""
    max_staleness: int = -1
    """Async: how many versions old the parameters of a gradient may be; -1: any."""
    exact: bool = True
    """A role refuses to run where it would not give the bits of the others."""
    threads: int = 1
    """Threads of torch, in each role. The bits depend on it."""
    validate: ValidationConfig | None = None
    """Data to validate with while the job trains, and how often: `graphft.Validation(data=...)`."""
    device: str = "cpu"
    """Trainers compute there: `cpu`, `cuda` (each on a GPU of its own, as far as there are), `cuda:1`. By default the
    program's."""
    pserver_device: str = "cpu"
    """Pservers keep the parameters, and update them, there."""
    tf32: bool = False
    """On a GPU, float32 is multiplied as TF32, which is faster and has fewer bits."""
    torch_version: str = ""
    """Version of the torch that the job was transpiled with."""
    cpu_capability: str = ""
    """Instructions of the CPU, as that torch used it: `AVX2`, `AVX512` ..."""
    onednn_isa: str = ""
    """The most that oneDNN may use of the CPU (its ONEDNN_MAX_CPU_ISA); "": all of it."""

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def plan(self) -> Plan:
        """The batch that each slot computes at each step (sync); in async mode, all batches are in one slot.

        With local accumulation what counts as a batch, here and in every record, is a unit of `local_steps` of them.
        """
        lengths = [c.records for c in self.data.chunks]
        terms: dict[str, Any] = {"seed": self.seed, "passes": self.epochs}
        if not self.local:
            slots = self.trainers if self.sync else 1
            return Plan(lengths, slots=slots, batch_size=self.batch_size, drop_last=self.drop_last, **terms)
        size = self.batch_size if self.drop_last else 1  # short batches are left out, not short units
        whole = [n - n % size for n in lengths]
        return Plan(whole, slots=1, batch_size=self.local_steps * self.batch_size, lengths=lengths, **terms)

    @property
    def local(self) -> bool:
        """True if trainers accumulate locally: they push after units of `local_steps` batches."""
        return self.mode in ("half_async", "geo_sgd")

    @property
    def may_discard(self) -> int:
        """Records that may be left out; -1: the job ends at the first bad batch."""
        records = sum(chunk.records for chunk in self.data.chunks)
        return int(Fraction(str(self.max_discarded)) * records) if self.on_bad_data == "discard" else -1

    @property
    def of_steps(self) -> str:
        """Follows the step that a job has reached in messages: " of 128"; "" where its passes are asked for."""
        return "" if self.passes_on_demand else f" of {self.total_steps}"

    @property
    def total_steps(self) -> int:
        """Sync: steps of the job. Async: its batches (or units), each of which is one version of every shard."""
        return self.plan.total_steps

    @cached_property
    def validated(self) -> frozenset[int]:
        """After how many steps the model is validated."""
        return self.validate.steps(self.plan) if self.validate is not None else frozenset()

    def next_validated(self, step: int, number: int = 1) -> int:
        """Returns the first (or `number`-th) step after this one that is validated; the job's last if there is none."""
        at = bisect.bisect_right(self._validated_in_order, step) + number - 1
        return (*self._validated_in_order[at : at + 1], self.total_steps)[0]

    @cached_property
    def _validated_in_order(self) -> list[int]:
        return sorted(self.validated)

    @property
    def waits_for_validations(self) -> bool:
        """True if a step behind one that is validated waits for what that comes to."""
        return self.validate is not None and self.validate.waits

    def replace(self, **changes: Any) -> JobConfig:
        """Returns a copy with other options."""
        return dataclasses.replace(self, **changes)

    def hashed(self) -> dict[str, Any]:
        """Returns what makes two jobs different, as JSON: not the name, where etcd is, what machine transpiled it, or
        what the data held then."""
        options = {name: value for name, value in self.to_json().items() if name not in _NOT_HASHED}
        validate = self.validate.options() if self.validate is not None else None
        return options | {"data": self.data.options(), "validate": validate}

    def to_json(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        validate = self.validate.to_json() if self.validate is not None else None
        return values | {"data": self.data.to_json(), "validate": validate}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> JobConfig:
        """Returns the inverse of `to_json`. Raises GraphftError when `data` is no configuration."""
        try:
            endpoints = data["etcd_endpoints"]
            more = {
                "data": DataSpec.from_json(data["data"]),
                "etcd_endpoints": None if endpoints is None else tuple(endpoints),
                "validate": ValidationConfig.from_json(data["validate"]),
            }
            return JobConfig(**{**data, **more})
        except (KeyError, TypeError) as error:
            text, help = f"this is no job configuration: {error}", "transpile and save the job again"
            raise GraphftError(text, rule="job-config", help=help) from error


def check_effects(config: JobConfig, given: Iterable[str]) -> None:
    """Raises UsageError[option] if one of the options that are `given` has no effect in this job; warns where only `ft`
    is missing. A default may be given, and saved jobs are not looked at: they go on as they were begun."""
    for name in given:
        if getattr(config, name) == getattr(JobConfig, name, None):
            continue
        for option, value, names in NEEDS:
            if name in names and getattr(config, option) != value:
                what = f"{name} has no effect where {option} is {getattr(config, option)!r}"
                help = f"leave {name} out, or transpile with {option}={value!r}"
                raise UsageError(what, rule="option", help=help)
        if name in NEEDS_FT and not config.ft:
            log.warning("%s has no effect without fault tolerance: ft is False", name)


def _check(config: JobConfig) -> None:
    """Raises UsageError[option] for the first option that makes no sense, and says which."""
    if not isinstance(config.data, DataSpec):
        help = "data=graphft.arrays(x=x, y=y, chunk_size=256)"
        text = f"data is a {type(config.data).__name__}, expected what graphft.arrays, dataset or files return"
        raise UsageError(text, rule="option", help=help)
    check_values(config, _LIMITS, skip=("data", "validate"))
    if config.etcd_endpoints == ():
        raise _bad("etcd_endpoints", (), "None, or one 'host:port' at least")
    if config.tf32 and not config.device.startswith("cuda"):
        raise _bad("tf32", True, f"False: it is for GPUs, and device is {config.device!r}")
    if not config.sync and config.pservers > MAX_ASYNC_PSERVERS:
        raise _bad("pservers", config.pservers, f"at most {MAX_ASYNC_PSERVERS} in async mode")
    if config.sync and (config.mode != "async" or config.local_steps > 1):
        text = f"mode is {config.mode!r} and local_steps {config.local_steps}, but sync is True"
        raise UsageError(text, rule="option", help="transpile with sync=False")
    longest = max(config.data.batches(config.batch_size, config.drop_last))
    if config.local_steps > (longest if config.local else 1):
        wanted = f"at most the batches of the longest chunk, {longest}, and mode='half_async' or 'geo_sgd'"
        raise _bad("local_steps", config.local_steps, wanted)
    if config.mode == "half_async" and config.local_steps == 1:
        raise _bad("local_steps", 1, "2 or more with mode='half_async': nothing is accumulated")


def _bad(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {value!r}, expected {wanted}", rule="option", help=f"correct {name}")
