"""`transpile`: from the user's program to the programs of a job."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import fsspec
import torch
from torch import Tensor

import graphft  # what runs programs and reads data is the runtime's, which this package does not know
from graphft.capture.loss_fn import check_metrics
from graphft.capture.weights import SAVED, load_weights, tell_changed_weights
from graphft.data import DataSpec
from graphft.errors import GraphftError, ProgramError, UsageError
from graphft.ir import Program
from graphft.ir.verify import verify
from graphft.optim.training import tell_changed_optimizer
from graphft.options import find_device, is_whole, unknown_option
from graphft.reducers import columns_of
from graphft.transpiler.config import JobConfig, check_effects
from graphft.transpiler.evaluation import check_criteria, check_fits, evaluation_of
from graphft.transpiler.inputs import check_batch_sizes, check_columns, warn_of_unused
from graphft.transpiler.job import Job
from graphft.transpiler.optimization import warn_of_zero_rate
from graphft.transpiler.passes.slicing import most_shards
from graphft.transpiler.prediction import prediction_of
from graphft.transpiler.validation import Validation

log = logging.getLogger("graphft")
T = TypeVar("T")

_DERIVED = ("data", "torch_version", "cpu_capability", "onednn_isa")
OPTIONS = tuple(f.name for f in dataclasses.fields(JobConfig) if f.name not in _DERIVED)
"""What may be given to `transpile`, beside what it names itself."""
NAMED = ("data", "epochs", "init_from", "init_partial", "predict", "check")
"""What it names itself, and what is no field of JobConfig."""
_VALIDATE = "validate=graphft.Validation(data=graphft.arrays(x=x, y=y, chunk_size=256))"
_DATA = "data=graphft.arrays(x=x, y=y, chunk_size=256)"
_ELSEWHERE = {
    "num_workers": "trainers= says how many work at a time, pservers= how many hold the parameters",
    "max_epochs": "epochs= says how many",
    "callbacks": "job.run(callbacks=[...])",
    "optimizer": "graphft.minimize(program, optimizer)",
}


def transpile(
    program: Program,
    *,
    data: DataSpec | None = None,
    batch_size: int,
    epochs: int | None = None,
    trainers: int = 1,
    pservers: int = 1,
    sync: bool = True,
    ft: bool = True,
    etcd_endpoints: str | Sequence[str] | None = None,
    init_from: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    init_partial: bool = False,
    validate: Validation | None = None,
    predict: Callable[..., Any] | None = None,
    chunks: DataSpec | None = None,
    check: bool = True,
    **options: Any,
) -> Job:
    """The job that trains `program` on `data`, for so many `epochs` (1 by default), with `trainers` logical trainers.
    (`chunks` and `passes` are other names of data and epochs: those of the EDL design.)

    A sync step applies the gradients of `trainers` batches of `batch_size` samples, averaged by samples; in async
    mode each batch is applied by itself. `ft` makes the job survive whatever dies. `options` are the other fields of
    `JobConfig`; `seed` and `device` are by default the program's.

    `init_from`: weights to begin with, instead of those that the model had when it was built: whatever
    `graphft.read_weights` reads, or a state_dict. With `init_partial`, what fits by name, shape and dtype is loaded,
    and a warning lists the rest; without, anything that does not fit is an error.

    `validate`: a `graphft.Validation`, which trainers compute beside the steps. See docs/validation.md.

    `predict(model, **inputs)` returns what the trained model is to predict: a tensor with an entry for each record, or
    several by name. By default, what the model returns where `loss_fn` calls it. See docs/predict.md.

    A program that `build` captured in this process is compared with its module on the first batches (see
    `graphft.check_capture`), which costs about two steps; so is what it is validated with. Not with `check=False`.

    Where the program has fewer slices than `pservers`, the job has as many pservers as slices, and a warning says so.

    Raises GraphftError for an option that is unknown, makes no sense or has no effect in this job, a device that this
    machine does not have, a program that is not minimized or not well-formed, and data that does not fit the program.
    `program` is not changed.
    """
    unknown = [n for n in options if n not in OPTIONS]
    if unknown:
        raise unknown_option("transpile", unknown[0], (*OPTIONS, *NAMED), _ELSEWHERE)
    _check_program(program)
    if (data := _one_of("data", data, "chunks", chunks)) is None:
        raise UsageError("transpile needs data= to train on", rule="option", help=_DATA)
    if not isinstance(validate, (Validation, type(None))):
        raise UsageError(f"validate is a {type(validate).__name__}", rule="option", help=_VALIDATE)
    if epochs is not None and not is_whole(epochs, 1):  # JobConfig knows it by its other name
        raise UsageError(f"epochs is {epochs!r}, expected 1 or more", rule="option", help="correct epochs")
    if (passes := _one_of("epochs", epochs, "passes", options.get("passes"))) is not None:
        options["passes"] = int(passes) if is_whole(passes, 1) else passes  # it may be NumPy's
    if isinstance(etcd_endpoints, str):
        etcd_endpoints = etcd_endpoints.split(",")
    defaults: dict[str, Any] = {n: program.attrs[n] for n in ("seed", "device") if n in program.attrs}
    defaults["name"] = re.sub(r"[^A-Za-z0-9_-]+", "-", program.name)[:64] or "job"
    config = JobConfig(
        data=data,
        batch_size=batch_size,
        trainers=trainers,
        pservers=pservers,
        sync=sync,
        ft=ft,
        etcd_endpoints=None if etcd_endpoints is None else tuple(etcd_endpoints),
        torch_version=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        onednn_isa=os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        validate=validate.config() if validate is not None else None,
        **{**defaults, **options},
    )
    check_effects(config, [*options, "validate"])
    _check_scheme(config.storage)
    find_device(config.device)
    verify(program, require_values=True)
    evaluation = evaluation_of(program, validate) if validate is not None else None
    prediction, origin = _prediction(program, predict) if predict is not None else None, program.origin
    if init_from is None:
        tell_changed_weights(program)
    tell_changed_optimizer(program)
    program = _begin_with(program, init_from, init_partial)
    check_metrics(program)
    check_columns(program, config)
    check_batch_sizes(program, config)
    warn_of_unused(program, config)
    if evaluation is not None:
        _check_evaluation(program, evaluation, config)
    if check:
        _check_captured(program, evaluation, prediction, config)
    job = Job.make(program, _without_idle_pservers(program, config), evaluation, prediction, origin)
    job.verify()
    if not config.passes_on_demand:  # nobody knows how many there will be
        warn_of_zero_rate(program, config.total_steps)
    return job


def _check_captured(
    program: Program, evaluation: Program | None, prediction: Program | None, config: JobConfig
) -> None:
    """Compares each program with the module that it was captured from."""
    graphft.check_on_data(program, config.data, config.batch_size, config.seed)
    if prediction is not None:
        graphft.check_on_data(prediction, config.data, config.batch_size, config.seed, told=True)
    if evaluation is not None and config.validate is not None:
        data, size = config.validate.data, config.validate.size
        own = None not in (evaluation.origin, program.origin) and evaluation.origin.loss_fn is program.origin.loss_fn
        graphft.check_on_data(evaluation, data, size, config.seed, told=own)


def _one_of(name: str, value: T | None, also: str, other: T | None) -> T | None:
    if value is not None and other is not None:
        raise UsageError(f"{name} and {also} are both given: they are two names of one thing", rule="option", help=name)
    return value if value is not None else other


def _prediction(program: Program, predict: Callable[..., Any]) -> Program:
    prediction = prediction_of(program.origin, predict)
    for v in prediction.of_kind(*SAVED):  # a large model is not kept twice; constants of one name are not the same
        if v.name in program.values:
            prediction.values[v.name] = program.values[v.name]
    return prediction


def _check_evaluation(program: Program, evaluation: Program, config: JobConfig) -> None:
    """Raises GraphftError unless the evaluation is of the program that is trained, and the data has its inputs."""
    assert config.validate is not None
    data = config.validate.data
    if data.source.get("random"):
        raise UsageError(
            "validate: the held-out Dataset draws random numbers: what a validation comes to would depend on them",
            rule="option",
            help="leave augmentation to the data that is trained on: an argument of the Dataset, say",
        )
    check_fits(program, evaluation, data.columns)
    check_criteria(evaluation, [criterion.metric for criterion in config.validate.criteria])
    captured = evaluation.clone()
    for v in set(captured.variables) - {v.name for v in columns_of(captured)}:
        del captured.variables[v]  # what its reducers read is no column
    held_out = config.replace(data=data, batch_size=config.validate.size, drop_last=False, validate=None)
    try:
        check_columns(captured, held_out)
        check_batch_sizes(captured, held_out)
    except GraphftError as error:
        raise GraphftError(f"validate: {error.message}", rule=error.rule, help=error.help) from None


def _begin_with(
    program: Program, source: str | os.PathLike[str] | Mapping[str, Tensor] | None, partial: bool
) -> Program:
    if source is None:
        if partial:
            raise UsageError(
                "init_partial is given, and init_from is not",
                rule="option",
                help="say where the weights lie: init_from=",
            )
        return program
    if not isinstance(source, (Mapping, str, os.PathLike)):
        raise UsageError(
            f"init_from is a {type(source).__name__}, expected a path, a URL or a state_dict",
            rule="option",
            help="of a model: init_from=model.state_dict()",
        )
    if isinstance(source, Mapping):
        return load_weights(program, source, partial)
    log.info("the weights to begin with are those of %s", os.fspath(source))
    return load_weights(program, graphft.read_weights(source), partial)


def _without_idle_pservers(program: Program, config: JobConfig) -> JobConfig:
    """Returns `config` with as many pservers as there are slices for, and warns if these are fewer."""
    most = most_shards(program, config)
    if most == config.pservers:
        return config
    log.warning(
        "pservers is %d, but the parameters and buffers of program '%s' make only %d slices: the job has %d pservers "
        "(min_block=%d is the smallest slice of a tensor that is cut)",
        config.pservers,
        program.name,
        most,
        most,
        config.min_block,
    )
    return config.replace(pservers=most)


def _check_program(program: object) -> None:
    if not isinstance(program, Program):
        raise UsageError(
            f"transpile needs a program, got a {type(program).__name__}",
            rule="option",
            help="program = graphft.build(model, loss_fn, inputs); graphft.minimize(program, optimizer)",
        )
    if "role" in program.attrs or list(program.blocks) != ["step"]:
        raise ProgramError(
            f"program '{program.name}' has blocks {', '.join(program.blocks) or 'none'}, expected one, step",
            rule="blocks",
            help="transpile the program that build() and minimize() made; by hand, append ops to program.block('step')",
        )


def _check_scheme(storage: str) -> None:
    """Checks that of the URL; whether its package is there is for the machines of the job's processes to say."""
    scheme = storage.partition("://")[0].rpartition("::")[2]
    if storage and scheme not in fsspec.available_protocols():
        raise UsageError(
            f"storage is {storage!r}: no file system has URLs that begin with {scheme}://",
            rule="storage-url",
            help="a URL that fsspec knows: s3://bucket/job, gs://bucket/job, hdfs://host/job, file:///shared/job",
        )
