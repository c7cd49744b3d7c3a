"""What a job's validations came to, taken from etcd into the run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.etcd.model import Store
from graphft.runtime.process.validations import note_validation, read_validations


def take_validations(etcd: Store, keys: Keys, job_dir: Path) -> None:
    """Each that the folder does not have. It may be repeated, and by several processes. Raises EtcdError."""
    known = read_validations(job_dir)
    for kv in etcd.range(keys.all_validated).kvs:
        one = msgspec.json.decode(kv.value, type=Validated)
        values = {name: float(value) for name, value in one.means.items()}
        before = known.get(one.step)
        if before is None or dict(before.metrics) != {n: v for n, v in values.items() if v == v}:
            note_validation(job_dir, one.epoch, one.step, values, one.at)
