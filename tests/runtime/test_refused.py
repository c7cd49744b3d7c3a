"""What etcd refuses for good ends a process at once, with what was refused; what may pass is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, EtcdBusy, EtcdError
from graphft.transpiler import Job
from tests.runtime.trainers import stage


def test_a_refusal_for_good_is_not_repeated(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    """The record of what is discarded was sent every 0.1 s for as long as the lease lasted."""
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer, tries = scene.trainer(0), list[int]()
        key = keys.discarded(3)

        def record() -> int:
            tries.append(1)
            return int(trainer.member.etcd.put(key, bytes(2_000_000)))

        with pytest.raises(EtcdError, match=key) as caught:
            trainer.member.retry_while_leased(record)
        assert caught.value.rule == "etcd-request"
        assert len(tries) == 1


def test_a_refusal_for_now_is_tried_again(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer, refusals = scene.trainer(0), [EtcdBusy("too many requests", rule="etcd-busy")] * 2

        def record() -> int:
            if refusals:
                raise refusals.pop()
            return int(trainer.member.etcd.put(f"{keys.queue(0)}todo/000003", b""))

        assert trainer.member.retry_while_leased(record) > 0
        assert not refusals
