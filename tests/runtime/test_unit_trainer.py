"""A trainer that accumulates locally, with its real data and programs: what it makes of a unit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import graphft
from graphft.ops.context import ChunkWork
from graphft.plan import chunk_batch_seed
from graphft.runtime.protocol.events import FromShard, Loaded, Took
from graphft.runtime.protocol.messages import Parameters
from tests.runtime.trainers import Stage, Staged, shards_at
from tests.support.programs_by_hand import linear, linear_job

CHUNK, BATCH, SEED = 22, 4, 3
"""Three chunks of 6 batches, the last of 2 records; in units of 4 and 2."""
UNIT = ChunkWork(1, 2, batch=1, samples=6, seed=0)


@pytest.fixture(params=["half_async", "geo_sgd"])
def scene(staged: Staged, request: pytest.FixtureRequest) -> Stage:
    torch.manual_seed(0)
    data = graphft.arrays(chunk_size=CHUNK, x=torch.randn(3 * CHUNK, 200), y=torch.randn(3 * CHUNK, 1))
    program = linear(optimizer=graphft.SGD(lr=graphft.schedule.exponential(0.1, 0.9)))
    options = {"pservers": 2, "sync": False, "mode": request.param, "local_steps": 4, "epochs": 2, "seed": SEED}
    return staged(linear_job(program=program, data=data, **options))


def begun(scene: Stage) -> Any:
    """A trainer that holds the chunk, and the parameters that the step receives and prepares."""
    trainer = scene.trainer(0)
    shards_at(trainer, 0)
    trainer.comm.do(Took((UNIT.pass_index, UNIT.chunk), 2, frozenset()))
    scope = trainer.ctx.scope
    scope |= {"chunk": UNIT} | {n: v.clone() for n, v in scene.job.source.values.items() if n in ("w", "b")}
    scope |= {f"{n}@MEAN": torch.zeros_like(scope[n]) for n in ("w", "b")}
    return trainer


def error_of(trainer: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a batch, and what the received parameters miss its targets by."""
    data = trainer.prefetcher.reader.batch(UNIT.pass_index, UNIT.chunk, batch, BATCH)
    values = trainer.job.source.values
    return data["x"], data["x"] @ values["w"] + values["b"] - data["y"]


def test_a_unit_is_begun_once_and_computed_batch_by_batch(scene: Stage) -> None:
    trainer = begun(scene)
    (x4, e4), (x5, e5) = error_of(trainer, 4), error_of(trainer, 5)
    assert (len(x4), len(x5)) == (4, 2)
    then = time.monotonic()
    trainer.run_unit(UNIT, "local", 4)
    current = trainer.shards.machine.current
    assert (current.key, current.batch) == ((1, 2), 1), "what is pushed is the unit"
    assert trainer.state.batch_samples == 6
    assert trainer.state.alive_since(then), "a long unit is no sign of death"
    last = trainer.local_batch(UNIT)
    assert (last.batch, last.samples, last.seed) == (5, 2, chunk_batch_seed(SEED, 1, 2, 5))
    scope, values = trainer.ctx.scope, scene.job.source.values
    if scene.job.config.mode == "half_async":
        together, errors = torch.cat([x4, x5]), torch.cat([e4, e5])
        assert trainer.comm.reported()[0] == pytest.approx(float(errors.square().mean()), rel=1e-5)
        torch.testing.assert_close(scope["w@MEAN"], together.T @ errors * 2 / 6, rtol=1e-4, atol=1e-5)
        assert torch.equal(scope["w"], values["w"])
    else:
        w = values["w"] - 0.1 * (x4.T @ e4 * 2 / 4)
        b = values["b"] - 0.1 * 2 * e4.mean()
        after = x5 @ w + b - (x5 @ values["w"] + values["b"] - e5)
        assert trainer.comm.reported()[0] == pytest.approx(
            float(e4.square().mean()) * 4 / 6 + float(after.square().mean()) * 2 / 6, rel=1e-5
        )
        torch.testing.assert_close(scope["w"], w - 0.1 * 0.9 * (x5.T @ after * 2 / 2), rtol=1e-4, atol=1e-5)


def test_the_schedule_follows_what_the_shards_have_applied(scene: Stage) -> None:
    trainer = begun(scene)
    trainer.run_unit(UNIT, "local", 4)
    assert trainer.local_batch(UNIT).number == 1
    for shard, version in ((0, 4), (1, 7)):
        for bucket in trainer.shards.machine.connections[shard].caches:
            trainer.comm.do(FromShard(shard, Parameters(0, version, bucket), b""))
            trainer.comm.do(Loaded(shard, bucket))
    trainer.run_unit(UNIT, "local", 4)
    assert trainer.local_batch(UNIT).number == 7 * 3 + 1, "the newest: one that comes back older is no step back"
    used = {"lr": pytest.approx(0.1 * 0.9**22)} if scene.job.config.mode == "geo_sgd" else {}
    assert trainer.status().learning_rates == used, "pservers have the others"
