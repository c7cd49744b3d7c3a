"""What a job was asked to be: the options of `transpile`, and what its bits depend on."""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from graphft.data import DataSpec
from graphft.errors import GraphftError
from graphft.plan import Plan
from graphft.transpiler.validation import ValidationConfig

MAX_ASYNC_PSERVERS = 112
"""Up to 16 chunks are completed by one etcd transaction, which compares every shard's generation: etcd takes 128
compares."""
_LOCAL = ("half_async", "geo_sgd")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES = {
    "mode": ("async", "dc_asgd", "half_async", "geo_sgd"),
    "dispatch": ("etcd", "coordinator"),
    "on_trainer_loss": ("takeover", "wait"),
    "on_barrier_timeout": ("rollback", "proceed"),
    "on_nonfinite": ("stop", "skip", "warn"),
    "on_bad_data": ("discard", "fail"),
}
_AT_LEAST = {
    "trainers": 1,
    "pservers": 1,
    "batch_size": 1,
    "passes": 1,
    "checkpoint_every": 0,
    "checkpoint_seconds": 0,
    "keep_checkpoints": 1,
    "max_failures": 1,
    "lease_ttl": 1,
    "slice_unit": 64,
    "min_block": 1,
    "bucket_bytes": 1024,
    "threads": 1,
    "max_staleness": -1,
    "max_skipped": -1,
    "local_steps": 1,
}
_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "bool": bool, "str": str, "float": (int, float)}
_POSITIVE = ("recovery_timeout", "chunk_timeout", "daemon_interval", "push_timeout")
_YOUNG = ("dispatch", "passes_on_demand", "validate")
_NOT_HASHED = ("name", "etcd_endpoints", "storage", "exact", "torch_version", "cpu_capability", "onednn_isa")


@dataclass(frozen=True)
class JobConfig:
    """The options of a job. The programs are a function of the source program and these; times are seconds."""

    name: str
    """The job's name, in etcd and of its folder: 1 to 64 letters, digits, `_` and `-`. By default the program's."""
    data: DataSpec
    """What to train on: `data=graphft.arrays(...)`, `dataset(...)` or `files(...)`. (`chunks=` is the same.)"""
    batch_size: int
    """Samples of a batch. A sync step applies `trainers` batches, an async one each by itself."""
    trainers: int = 1
    """Logical trainers (slots)."""
    pservers: int = 1
    """Parameter servers; each holds its share of the parameters, and of the optimizer's state."""
    sync: bool = True
    """Each step waits for the gradients of all slots, and its bits are exact; else see `mode`."""
    mode: Literal["async", "dc_asgd", "half_async", "geo_sgd"] = "async"
    """What a job that is not `sync` pushes and applies: each batch's gradient as it is, or delay-compensated; the mean
    gradient of `local_steps` batches; or by how much these moved the trainer's own copy of the parameters."""
    local_steps: int = 1
    """Modes half_async and geo_sgd: batches of a chunk between two pushes (its last unit may have fewer)."""
    dc_lambda: float = 0.04
    """Mode dc_asgd: the strength of the compensation."""
    dc_decay: float = 0.0
    """Mode dc_asgd: dc_lambda is divided by the root of the mean square of the gradients, which decays by this factor
    per batch; 0: it is constant."""
    ft: bool = False
    """Fault tolerance: the job survives whatever dies, and can be resumed. Without it, it ends at the first death."""
    dispatch: Literal["etcd", "coordinator"] = "etcd"
    """Who gives out the chunks: each trainer claims its own in etcd; or a coordinator process, which trainers ask for
    tasks. See docs/dispatch.md."""
    passes: int = 1
    """Epochs. A *pass* over the data is the EDL design's word for one, and that of graphft's messages; `passes=` is the
    same."""
    passes_on_demand: bool = False
    """A pass begins only when it is asked for (`graphft.Trainer` does), and ends with a checkpoint; processes wait in
    between."""
    seed: int = 0
    """Of the order of chunks, and of the random numbers of every step. By default the program's."""
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
    """What becomes of a job with a batch that fails so often: it goes on without the batch, or ends."""
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
    """Of torch, in each role. The bits depend on it."""
    validate: ValidationConfig | None = None
    """What to validate with, while the job trains, and how often: `graphft.Validation(data=...)`."""
    device: str = "cpu"
    """Where the programs run: `cpu`, `cuda`, `cuda:1`. By default the program's."""
    torch_version: str = ""
    """Of the torch that the job was transpiled with."""
    cpu_capability: str = ""
    """Of the CPU, as that torch used it: `AVX2`, `AVX512` ..."""
    onednn_isa: str = ""
    """The most that oneDNN may use of the CPU (its ONEDNN_MAX_CPU_ISA); "": all of it."""

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def plan(self) -> Plan:
        """Which batch each slot computes at each step (sync); in async mode, of all batches in one slot.

        With local accumulation what counts as a batch, here and in every record, is a unit of `local_steps` of them.
        """
        lengths = [c.records for c in self.data.chunks]
        if not self.local:
            return Plan(
                lengths,
                slots=self.trainers if self.sync else 1,
                batch_size=self.batch_size,
                seed=self.seed,
                passes=self.passes,
                drop_last=self.drop_last,
            )
        size = self.batch_size if self.drop_last else 1  # short batches are left out, not short units
        return Plan(
            [n - n % size for n in lengths],
            slots=1,
            batch_size=self.local_steps * self.batch_size,
            seed=self.seed,
            passes=self.passes,
            lengths=lengths,
        )

    @property
    def local(self) -> bool:
        """Whether trainers accumulate locally: push after units of `local_steps` batches."""
        return self.mode in _LOCAL

    @property
    def may_discard(self) -> int:
        """How many records may be left out; -1: the job ends at the first bad batch."""
        records = sum(chunk.records for chunk in self.data.chunks)
        return int(Fraction(str(self.max_discarded)) * records) if self.on_bad_data == "discard" else -1

    @property
    def of_steps(self) -> str:
        """What is said after the step that a job has reached: " of 128"; "" where nobody knows, since its passes are
        asked for one by one."""
        return "" if self.passes_on_demand else f" of {self.total_steps}"

    @property
    def total_steps(self) -> int:
        """Sync: steps of the job. Async: its batches (or units), each of which is one version of every shard."""
        return self.plan.total_steps

    @cached_property
    def validated(self) -> frozenset[int]:
        """After how many steps the model is validated."""
        return self.validate.steps(self.plan) if self.validate is not None else frozenset()

    @cached_property
    def _validated_in_order(self) -> tuple[int, ...]:
        return tuple(sorted(self.validated))

    def next_validated(self, step: int, number: int = 1) -> int:
        """Of the steps after this one that are validated the first one, or another `number`; the last one of the job if
        there are fewer."""
        at = bisect.bisect_right(self._validated_in_order, step) + number - 1
        return (*self._validated_in_order[at : at + 1], self.total_steps)[0]

    @property
    def waits_for_validations(self) -> bool:
        """Whether a step behind one that is validated waits for what that comes to."""
        return self.validate is not None and self.validate.waits

    def replace(self, **changes: Any) -> JobConfig:
        """A copy with other options."""
        return dataclasses.replace(self, **changes)

    def hashed(self) -> dict[str, Any]:
        """What makes two jobs different, as JSON: not the name, where etcd is, what machine transpiled it, or what the
        data held then. Nor are options that are younger than jobs that were saved, where they have their defaults."""
        young = {k for k in _YOUNG if getattr(self, k) == getattr(JobConfig, k)}
        options = {k: v for k, v in self._values().items() if k not in _NOT_HASHED and k not in young}
        validate = {"validate": self.validate.options()} if self.validate is not None else {}
        return options | {"data": self.data.options()} | validate

    def to_json(self) -> dict[str, Any]:
        validate = self.validate.to_json() if self.validate is not None else None
        return self._values() | {"data": self.data.to_json(), "validate": validate}

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> JobConfig:
        """The inverse of `to_json`. Raises GraphftError when `data` is no configuration."""
        try:
            endpoints = data["etcd_endpoints"]
            return JobConfig(
                **{
                    **data,
                    "data": DataSpec.from_json(data["data"]),
                    "etcd_endpoints": None if endpoints is None else tuple(endpoints),
                    "validate": ValidationConfig.from_json(data.get("validate")),
                }
            )
        except (KeyError, TypeError) as error:
            raise GraphftError(
                f"this is no job configuration: {error}",
                rule="job-config",
                help="was the job saved by another version of graphft? transpile it again",
            ) from error


def _check(config: JobConfig) -> None:
    """Raises GraphftError[option] for the first option that makes no sense, and says which."""
    if not isinstance(config.name, str) or not _NAME.fullmatch(config.name):
        raise _bad("name", config.name, "1 to 64 letters, digits, '_' and '-'")
    if not isinstance(config.data, DataSpec):
        raise GraphftError(
            f"data is a {type(config.data).__name__}, expected what graphft.arrays, dataset or files return",
            rule="option",
            help="of tensors: graphft.arrays(x=x, y=y, chunk_size=256); of a Dataset class in a file: "
            'graphft.dataset("my_data:MyDataset", {...}, chunk_size=256)',
        )
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        wanted = _TYPES.get(str(f.type))
        if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and f.type != "bool")):
            raise _bad(f.name, value, f"a value of type {f.type}")
    for name, least in _AT_LEAST.items():
        if getattr(config, name) < least:
            raise _bad(name, getattr(config, name), f"at least {least}")
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            raise _bad(name, getattr(config, name), "a positive number of seconds")
    if not 0 < config.dc_lambda < math.inf:
        raise _bad("dc_lambda", config.dc_lambda, "a positive number; mode='async' does not compensate at all")
    if not 0 <= config.dc_decay < 1:
        raise _bad("dc_decay", config.dc_decay, "at least 0 and below 1; 0: dc_lambda is constant")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise _bad(name, getattr(config, name), " or ".join(map(repr, choices)))
    if not 0 <= config.max_discarded <= 1:
        raise _bad("max_discarded", config.max_discarded, "a share of the records, 0 to 1")
    if config.slice_unit % 64:
        raise _bad("slice_unit", config.slice_unit, "a multiple of 64, so that vector kernels give the same bits")
    if config.storage and ("://" not in config.storage or config.storage.startswith("memory://")):
        raise _bad("storage", config.storage, "a URL that every process reaches: s3://bucket/job, file:///shared/job")
    if config.etcd_endpoints is not None and (
        not config.etcd_endpoints or not all(isinstance(e, str) and e for e in config.etcd_endpoints)
    ):
        raise _bad("etcd_endpoints", config.etcd_endpoints, "None, or a sequence of 'host:port'")
    if not config.sync and config.on_trainer_loss == "wait":
        raise _bad("on_trainer_loss", "wait", "'takeover': in async mode no trainer is waited for")
    if not config.sync and config.pservers > MAX_ASYNC_PSERVERS:
        raise _bad("pservers", config.pservers, f"at most {MAX_ASYNC_PSERVERS} in async mode")
    if config.sync and config.mode != "async":
        raise GraphftError(
            f"mode is {config.mode!r}, but sync is True: a sync step has no stale gradients",
            rule="option",
            help=f"transpile with sync=False, mode={config.mode!r}",
        )
    _check_local(config, max(config.data.batches(config.batch_size, config.drop_last)))


def _check_local(config: JobConfig, longest: int) -> None:
    """`longest`: batches of the longest chunk."""
    steps, mode = config.local_steps, config.mode
    if not config.local and steps > 1:
        raise GraphftError(
            f"local_steps is {steps}, but "
            f"{'sync is True' if config.sync else f'mode {mode!r} pushes after every batch'}",
            rule="option",
            help="transpile with sync=False and mode='half_async' (gradients are added "
            "up) or mode='geo_sgd' (trainers optimize locally), or leave local_steps out",
        )
    if mode == "half_async" and steps == 1:
        raise GraphftError(
            "mode is 'half_async', but local_steps is 1: nothing is accumulated",
            rule="option",
            help="give local_steps=4, or so; or use mode='async', which is the same with one batch",
        )
    if steps > longest:
        raise GraphftError(
            f"local_steps is {steps}, but the longest chunk has {longest} batches",
            rule="option",
            help="give a larger chunk_size, or fewer local_steps: a unit lies within one chunk",
        )


def _bad(name: str, value: object, wanted: str) -> GraphftError:
    return GraphftError(f"{name} is {value!r}, expected {wanted}", rule="option", help=f"correct {name}")
