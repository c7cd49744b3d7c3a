"""`graphft replay`: a step computed again in one process has the bits of the job, and what is not finite is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft import ir
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.data import open_reader
from graphft.runtime.replay.command import LocalShards, LocalTrainer, Observer, reach
from tests.integration.plays import Program, play
from tests.integration.test_nonfinite import job, where

pytestmark = pytest.mark.timeout(600)


class Normalized(nn.Module):
    """Divides each sample by its largest value: 0/0 where all are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x / x.abs().amax(1, keepdim=True))
        return y


def zero_over_zero() -> graphft.Job:
    torch.manual_seed(0)
    model, x = Normalized(), torch.randn(64, 4)
    x[37] = 0.0
    program = graphft.build(model, lambda m, x, y: nn.functional.mse_loss(m(x), y), {"x": (None, 4), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=x, y=torch.randn(64, 1), chunk_size=16)
    return graphft.transpile(program, data=data, batch_size=4, trainers=2, pservers=2, ft=True, name="zero")


def local(job: graphft.Job, folder: Path) -> tuple[LocalShards, LocalTrainer]:
    shards = LocalShards(job)
    return shards, LocalTrainer(job, open_reader(job.config.data, folder, job.config.seed), shards)


@pytest.mark.slow
def test_the_state_between_two_checkpoints_is_the_jobs_to_the_bit(
    program: ir.Program, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    played = play(job(program, on_nonfinite="skip", epochs=1, checkpoint_every=4, keep_checkpoints=9), folder)
    store = CheckpointStore(folder / "checkpoints")
    last, *others = store.manifests()
    wanted = [store.read_part(last, i)[0] for i in range(2)]
    for manifest in (last, *others[:-2]):
        shutil.rmtree(Path(store.root, manifest.directory))
    damaged = Path(store.root, others[-2].parts[1].file)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (step, _), *_ = where(played.job)
    assert others[-1].step == 4 < step < last.step, "the step that was discarded is among those computed again"
    shards, trainer = local(played.job, folder)
    reached = reach(played.job, folder, shards, trainer, last.step, lambda text: None)
    assert (reached.start, reached.other) == (4, ())
    assert f"{damaged}" in caplog.text, "it was the end of it, though there is an older one"
    assert "the steps since the one before it are computed again" in caplog.text
    assert reached.same == sum(k >= 4 for k, _ in played.result.metrics["loss"])
    for shard, values in zip(shards.shards, wanted, strict=True):
        assert all(torch.equal(shard.scope[name], value) for name, value in values.items())
    found = trainer.compute(*where(played.job)[0], Observer(played.job))
    assert found is not None
    assert not found.finite
    assert "%x: 1 nan of" in found.origins[0][1]


def test_the_op_that_divides_zero_by_zero_is_named(folder: Path) -> None:
    with pytest.raises(GraphftError, match="the batch and the parameters before this step are finite") as caught:
        play(zero_over_zero(), folder)
    told = re.search(r"step (\d+), slot (\d+)", str(caught.value))
    assert told is not None
    command = Program(folder, "-m", "graphft", "replay", "--job", folder, "--step", told[1], "--slot", told[2])
    assert command.wait() == 0, command.output
    ops = command.output[command.output.index("ops  ") :].splitlines()
    assert "= aten.div.Tensor(%x, " in ops[1]
    assert "4 nan of 16 values" in ops[2]
    assert "loss         nan" in command.output
    assert re.search(r"nan +4 of 4 +last\.weight", command.output)
    assert "column " not in command.output
