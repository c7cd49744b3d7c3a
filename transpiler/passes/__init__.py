"""The passes. Each is a function that rewrites the programs of a job by its options; `pipeline` has them in order."""

from __future__ import annotations

from graphft.transpiler.config import JobConfig
from graphft.transpiler.passes.communication import check_finite, insert_communication, report_metrics
from graphft.transpiler.passes.fault_tolerance import insert_checkpoints, insert_liveness, insert_queue
from graphft.transpiler.passes.optimizer import compensate_delay, keep_optimizer, local_steps, split_optimizer
from graphft.transpiler.passes.slicing import make_buckets, slice_parameters
from graphft.transpiler.passes.validation import insert_decisions, insert_validation
from graphft.transpiler.programs import Pass


def pipeline(config: JobConfig) -> tuple[Pass, ...]:
    """Returns the passes that make a job of these options, in order."""
    validates = config.validate is not None
    return (
        slice_parameters,
        make_buckets,
        keep_optimizer if config.mode == "geo_sgd" else split_optimizer,
        *[compensate_delay] * (config.mode == "dc_asgd"),
        insert_communication,
        check_finite,
        report_metrics,
        insert_queue,
        *[local_steps] * config.local,
        insert_liveness,
        *[insert_decisions] * validates,
        insert_checkpoints,
        *[insert_validation] * validates,
    )
