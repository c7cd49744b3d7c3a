"""Which shard a pserver without an index serves: the lowest that no live process has."""

from __future__ import annotations

import logging
import time
import uuid

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Session, Store, absent, put_op

log = logging.getLogger("graphft")

SPARE_SECONDS = 0.2
"""Between two looks of a spare pserver."""


def claim_index(etcd: Store, keys: Keys, pservers: int, ttl: int) -> tuple[int, Session | None] | None:
    """The lowest index that no live pserver has or is about to take, claimed on the lease of a new session.

    While all are taken it waits as a spare, which has no lease. `ttl`: of the lease in seconds, 0 for none.
    None: the job is over.
    """
    told = False
    while (state := etcd.get(keys.state)) is None or state.value == b"running":
        taken = {kv.key for prefix in (keys.pservers, keys.index_claims) for kv in etcd.range(prefix).kvs}
        for index in range(pservers):
            if not {keys.pserver(index), keys.index(index)} & taken:
                session = Session(etcd, ttl) if ttl else None
                if _claim(etcd, keys, index, session):
                    if session is not None:
                        session.keep(etcd.urls)
                    return index, session
                if session is not None:
                    session.close()
        if not told:
            log.info("all %d pservers are alive; waiting to take the place of one that dies", pservers)
            told = True
        time.sleep(SPARE_SECONDS)
    return None


def _claim(etcd: Store, keys: Keys, index: int, session: Session | None) -> bool:
    claim = put_op(keys.index(index), uuid.uuid4().hex.encode(), session.lease if session is not None else 0)
    return etcd.txn([absent(keys.pserver(index)), absent(claim.key)], [claim], token=claim.key).ok
