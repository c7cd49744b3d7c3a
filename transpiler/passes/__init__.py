"""The passes, one per file. `graphft.transpiler.job.pipeline` has them in order."""

from graphft.transpiler.passes.check_finite import CheckFinite
from graphft.transpiler.passes.compensate_delay import CompensateDelay
from graphft.transpiler.passes.insert_checkpoints import InsertCheckpoints
from graphft.transpiler.passes.insert_communication import InsertCommunication
from graphft.transpiler.passes.insert_decisions import InsertDecisions
from graphft.transpiler.passes.insert_liveness import InsertLiveness
from graphft.transpiler.passes.insert_queue import InsertQueue
from graphft.transpiler.passes.insert_validation import InsertValidation
from graphft.transpiler.passes.keep_optimizer import KeepOptimizer
from graphft.transpiler.passes.local_steps import LocalSteps
from graphft.transpiler.passes.make_buckets import MakeBuckets
from graphft.transpiler.passes.report_metrics import ReportMetrics
from graphft.transpiler.passes.slice_parameters import SliceParameters
from graphft.transpiler.passes.split_optimizer import SplitOptimizer

__all__ = [
    "CheckFinite",
    "CompensateDelay",
    "InsertCheckpoints",
    "InsertCommunication",
    "InsertDecisions",
    "InsertLiveness",
    "InsertQueue",
    "InsertValidation",
    "KeepOptimizer",
    "LocalSteps",
    "MakeBuckets",
    "ReportMetrics",
    "SliceParameters",
    "SplitOptimizer",
]
