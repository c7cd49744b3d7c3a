"""How many rows of metrics trainers could not write: their disk does not take a note of it, either."""

from __future__ import annotations

import logging

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EtcdError
from graphft.runtime.etcd.model import Store

log = logging.getLogger("graphft")


def tell_lost_rows(etcd: Store, keys: Keys, trainer: str, count: int) -> None:
    """This trainer has lost so many. Never raises: training goes on."""
    try:
        etcd.put(keys.lost_rows + trainer, str(count).encode(), deadline=1.0)
    except EtcdError as error:
        log.warning("that %d rows are lost cannot be recorded: %s", count, error.message)


def read_lost_rows(etcd: Store, keys: Keys) -> int:
    """Of all trainers of the run; 0 where that cannot be told."""
    try:
        return sum(int(kv.value) for kv in etcd.range(keys.lost_rows, deadline=1.0).kvs)
    except (EtcdError, ValueError) as error:
        log.warning("whether rows of metrics are missing cannot be told (the model is not affected): %s", error)
        return 0
