"""`transpile`: from the user's program to the programs of a job."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import graphft  # what runs programs and reads data is the runtime's, which this package does not know
from graphft.capture.loss_fn import check_metrics
from graphft.capture.weights import SAVED, load_weights, tell_changed_weights
from graphft.data import DataSpec
from graphft.errors import GraphftError, ProgramError, UsageError, shown_plainly
from graphft.ir import Kind, Program
from graphft.ir.verify import verify
from graphft.optim.grad_scaler import UPDATE
from graphft.optim.training import tell_changed_optimizer
from graphft.options import find_device, unknown_option
from graphft.reducers import columns_of
from graphft.transpiler.config import JobConfig, check_effects
from graphft.transpiler.evaluation import check_criteria, check_fits, evaluation_of
from graphft.transpiler.inputs import check_batches, check_columns
from graphft.transpiler.job import Job
from graphft.transpiler.optimization import warn_of_zero_rate
from graphft.transpiler.passes.slicing import most_shards
from graphft.transpiler.prediction import prediction_of
from graphft.transpiler.validation import Validation

log = logging.getLogger("graphft")

_DERIVED = ("torch_version", "cpu_capability", "onednn_isa")
OPTIONS = tuple(f.name for f in dataclasses.fields(JobConfig) if f.name not in _DERIVED)
"""The options that are saved with the job."""
NOT_SAVED = ("init_from", "init_partial", "predict", "check")
_VALIDATE = "validate=graphft.Validation(data=graphft.arrays(x=x, y=y, chunk_size=256))"
_ELSEWHERE = {
    "num_workers": "trainers= says how many work at a time, pservers= how many hold the parameters",
    "max_epochs": "epochs= says how many",
    "callbacks": "job.run(callbacks=[...])",
    "optimizer": "graphft.minimize(program, optimizer)",
}


@shown_plainly
def transpile(
    program: Program,
    *,
    data: DataSpec,
    batch_size: int,
    epochs: int = 1,
    trainers: int = 1,
    pservers: int = 1,
    sync: bool = True,
    ft: bool = True,
    etcd_endpoints: str | Sequence[str] | None = None,
    init_from: str | os.PathLike[str] | Mapping[str, Tensor] | None = None,
    init_partial: bool = False,
    validate: Validation | None = None,
    predict: Callable[..., Any] | None = None,
    check: bool = True,
    **options: Any,
) -> Job:
    """Returns the job that trains `program` on `data` for so many `epochs`, with `trainers` logical trainers.

    A sync step applies the gradients of `trainers` batches of `batch_size` samples, averaged by samples; in async mode
    each batch is applied by itself. `ft` makes the job survive whatever dies. `options` are the other fields of
    `JobConfig` (docs/options.md); `seed` and `device` are by default the program's.

    `init_from`: weights to begin with, whatever `graphft.read_weights` reads, or a state_dict. With `init_partial`,
    what fits is loaded, and a warning lists the rest; without, anything that does not fit is an error.
    `validate`: a `graphft.Validation`, which trainers compute beside the steps. See docs/validation.md.
    `predict(model, **inputs)`: returns what the trained model is to predict. See docs/predict.md.
    `check`: compare what was captured with its module on the first batches, which costs about two steps.

    Where the program has fewer slices than `pservers`, the job has as many pservers as slices, and a warning says so.

    Raises GraphftError for an option that is unknown, makes no sense or has no effect in this job, a device that no
    machine has, a program that is not minimized or not well-formed, and data that does not fit the program.
    `program` is not changed."""
    if unknown := [n for n in options if n not in OPTIONS]:
        raise unknown_option("transpile", unknown[0], (*OPTIONS, *NOT_SAVED), _ELSEWHERE)
    _check_program(program)
    if not isinstance(validate, (Validation, type(None))):
        raise UsageError(f"validate is a {type(validate).__name__}", rule="option", help=_VALIDATE)
    if isinstance(etcd_endpoints, str):
        etcd_endpoints = etcd_endpoints.split(",")
    defaults: dict[str, Any] = {n: program.attrs[n] for n in ("seed", "device") if n in program.attrs}
    defaults["name"] = re.sub(r"[^A-Za-z0-9_-]+", "-", program.name)[:64] or "job"
    config = JobConfig(
        data=data,
        batch_size=batch_size,
        epochs=epochs,
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
    if program.find_op(UPDATE) is not None and not (config.sync and config.on_nonfinite == "skip"):
        raise UsageError(
            "the program has a gradient scaler: steps that overflow are to be left out, by all shards alike; here sync "
            f"is {config.sync}, on_nonfinite {config.on_nonfinite!r}",
            rule="option",
            help='transpile(..., sync=True, on_nonfinite="skip"); bfloat16 needs no scaler',
        )
    for device in (config.device, config.pserver_device):
        find_device(device, here=False)  # a job may be written where it cannot run
    verify(program, require_values=True)
    evaluation = evaluation_of(program, validate) if validate is not None else None
    prediction, origin = _prediction(program, predict) if predict is not None else None, program.origin
    if init_from is None:
        tell_changed_weights(program)
    tell_changed_optimizer(program)
    program = _begin_with(program, init_from, init_partial)
    check_metrics(program)
    _check_data(program, config)
    if evaluation is not None:
        _check_evaluation(program, evaluation, config)
    if check:
        _check_captured(program, evaluation, prediction, config)
    if (most := most_shards(program, config)) < pservers:
        what = "pservers is %d, but the parameters and buffers of program '%s' make only %d slices (min_block=%d)"
        log.warning(f"{what}: the job has %d pservers", pservers, program.name, most, config.min_block, most)
        config = config.replace(pservers=most)
    job = Job.make(program, config, evaluation, prediction, origin)
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


def _check_data(program: Program, config: JobConfig) -> None:
    """Warns of columns that no input reads, and of slots without a chunk: a chunk is one slot's."""
    inputs, data, slots = program.of_kind(Kind.INPUT), config.data, config.trainers
    if not inputs:
        raise ProgramError(f"program '{program.name}' has no input", rule="columns", help="declare what a batch holds")
    check_columns(inputs, data)
    check_batches(program, inputs, data, config.batch_size, config.drop_last)
    if unread := sorted(data.types.keys() - {v.name for v in inputs}):
        log.warning("no input of the program reads these columns of the data: %s", ", ".join(unread))
    if len(data.chunks) < slots:
        what = "trainers is %d, but the data has only %d chunks: no more work at a time (chunk_size=%d makes %d)"
        log.warning(what, slots, len(data.chunks), -(-data.records // slots), slots)


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
        text = "validate: the held-out Dataset draws random numbers: what a validation comes to would depend on them"
        raise UsageError(text, rule="option", help="leave augmentation to the data that is trained on")
    check_criteria(evaluation, [criterion.metric for criterion in config.validate.criteria])
    try:
        check_fits(program, evaluation, data)
        check_batches(evaluation, columns_of(evaluation), data, config.validate.size, drop_last=False)
    except GraphftError as error:
        raise GraphftError(f"validate: {error.message}", rule=error.rule, help=error.help) from None


def _begin_with(
    program: Program, source: str | os.PathLike[str] | Mapping[str, Tensor] | None, partial: bool
) -> Program:
    if source is None:
        if partial:
            raise UsageError("init_partial is given, and init_from is not", rule="option", help="give init_from=")
        return program
    if isinstance(source, Mapping):
        return load_weights(program, source, partial)
    log.info("the weights to begin with are those of %s", os.fspath(source))
    return load_weights(program, graphft.read_weights(source), partial)


def _check_program(program: object) -> None:
    if not isinstance(program, Program):
        help = "program = graphft.build(model, loss_fn, inputs); graphft.minimize(program, optimizer)"
        raise UsageError(f"transpile needs a program, got a {type(program).__name__}", rule="option", help=help)
    if "role" in program.attrs or list(program.blocks) != ["step"]:
        help = "transpile the program that build() and minimize() made; by hand, append ops to program.block('step')"
        text = f"program '{program.name}' has blocks {', '.join(program.blocks) or 'none'}, expected one, step"
        raise ProgramError(text, rule="blocks", help=help)
