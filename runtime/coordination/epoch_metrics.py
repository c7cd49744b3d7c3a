"""Loss and metrics of an epoch: made of the job's table by shard 0, which records them in etcd."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import PassMetrics
from graphft.runtime.etcd import EtcdError
from graphft.runtime.etcd.model import Store
from graphft.runtime.process.metric_table import read_rows

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


def epoch_of_table(job_dir: Path, config: JobConfig, epoch: int) -> PassMetrics:
    """Returns what the rows of an epoch (from 0) add up to, in their order: the same bits, whatever died. Raises
    OSError, ValueError where the table cannot be read."""
    starts = config.plan.start_steps
    begin, end = starts[epoch], starts[epoch + 1]
    rows = read_rows(job_dir, begin, end - begin) if config.sync else read_rows(job_dir)
    there = rows.data[(rows.at > 0) & (rows.data["step"] >= begin) & (rows.data["step"] < end)]
    samples, means = rows.means(starts)
    found = {name: float(mean[epoch]) for name, mean in means.items()}
    return PassMetrics(
        int(samples[epoch]),
        {name: mean if np.isfinite(mean) else str(mean) for name, mean in found.items()},
        end - begin - len(there) if config.sync else int(np.count_nonzero(rows.at == 0)),
        *((float(there["at"].min()), float(there["at"].max())) if len(there) else ()),
    )


def recorded_epoch(etcd: Store, keys: Keys, epoch: int) -> PassMetrics | None:
    """Returns what shard 0 has recorded of an epoch (from 0); None while etcd does not tell."""
    try:
        kv = etcd.get(keys.pass_metrics(epoch))
    except EtcdError:
        return None
    return msgspec.json.decode(kv.value, type=PassMetrics) if kv is not None else None
