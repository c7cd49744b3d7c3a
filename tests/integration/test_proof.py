"""A trainer whose environment really changes bits, beside one whose does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from tests.integration import training
from tests.integration.plays import Pace, Program
from tests.runtime.test_proof import bits
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
OTHER = {"MKL_CBWR": "COMPATIBLE"}
"""Has Intel's library multiply matrices in another order, on CPUs of every kind."""
LINEAR = """if True:
    import torch
    torch.manual_seed(3)
    x, layer = torch.randn(8, 8), torch.nn.Linear(8, 32)
    layer(x).square().sum().backward()
    found = layer.weight.grad.double().norm().item().hex()
"""


@pytest.mark.slow
def test_a_trainer_that_would_give_other_bits_is_refused(folder: Path, etcd_server: EmbeddedEtcd) -> None:
    """It claims nothing, and the job ends with the bits of the others."""
    here: dict[str, str] = {}
    exec(LINEAR, here)
    if here["found"] == bits(f"{LINEAR}print(found)", **OTHER).strip():
        pytest.skip(f"{OTHER} gives the same bits here")
    folder.mkdir(exist_ok=True)
    pace = Pace(folder / "pace")
    pace.set(30)  # until the other has been refused
    options = {"trainers": 1, "pservers": 1, "epochs": 1, "name": "proof", "lease_ttl": 60, "chunk_timeout": 200}
    job = training.job(training.program(plain=True), pace=pace.file, **options)
    job.save(folder / "job")
    where = ("--job", folder / "job", "--etcd", etcd_server.endpoints[0])
    with Etcd(etcd_server.endpoints, deadline=60) as etcd:
        running = [Program(folder, "-m", "graphft", "start", role, *where) for role in ("pserver", "trainer")]
        until(lambda: etcd.get(Keys("proof").proof("trainer")))
        wrong = Program(folder, "-m", "graphft", "start", "trainer", *where, **OTHER)
        assert wrong.wait() == 2, wrong.output
        assert "error[determinism]: this trainer computes other bits than trainer 0-" in wrong.output
        assert "MKL_CBWR: not set there, COMPATIBLE here" in wrong.output
        assert "claimed slot" not in wrong.output
        pace.set(0)
        for program in reversed(running):  # the trainer first: if it fails, the pserver waits for another one
            assert program.wait() == 0, program.output
