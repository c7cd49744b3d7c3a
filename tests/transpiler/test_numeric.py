"""Transpiled programs compute what the program computes in one process, whatever the number of shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import graphft
from graphft.ir import Kind, Program
from graphft.ops.context import ChunkWork
from graphft.plan import Located, batch_seed
from graphft.transpiler.job import Job
from tests.support.inprocess import InProcess
from tests.support.zoo import CASES, Case

SMALL = {"slice_unit": 64, "min_block": 64, "bucket_bytes": 1024}
OPTIMIZERS: dict[str, Callable[[], object]] = {
    "sgd": lambda: graphft.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda: graphft.Adam(lr=graphft.schedule.linear_warmup(graphft.schedule.cosine(0.01, 30), 4)),
    "rmsprop": lambda: graphft.RMSprop(lr=1e-3, momentum=0.5, centered=True),
}


class Data:
    """Records in memory, described for the transpiler and read as the plan says."""

    def __init__(self, case: Case, records: int = 44, chunk_size: int = 12, batch_size: int = 4) -> None:
        torch.manual_seed(1)
        self.columns = case.batch(records)
        self.batch_size, self.chunk_size = batch_size, chunk_size
        self.spec = graphft.arrays(chunk_size=chunk_size, **self.columns)

    def __call__(self, work: Located | ChunkWork) -> dict[str, Tensor]:
        start = work.chunk * self.chunk_size + work.batch * self.batch_size
        return {n: c[start : start + work.samples] for n, c in self.columns.items()}


def minimized(case: Case, optimizer: str = "adam", clip: object = None) -> Program:
    program = graphft.build(case.model, case.loss_fn, case.inputs)
    graphft.minimize(program, OPTIMIZERS[optimizer](), clip)
    return program


def transpiled(program: Program, data: Data, **options: object) -> Job:
    return graphft.transpile(
        program, data=data.spec, batch_size=data.batch_size, epochs=2, seed=5, **{**SMALL, **options}
    )


def executed(
    program: Program, job: Job, data: Callable[[Located], dict[str, Tensor]], steps: int | None = None
) -> dict[str, Tensor]:
    """The same samples per step, in one process, in one batch, with the random numbers of slot 0."""
    executor = graphft.Executor()
    for step in range(job.config.total_steps if steps is None else steps):
        works = [job.config.plan.locate(step, slot) for slot in range(job.config.trainers)]
        batches = [data(w) for w in works if w is not None]
        torch.manual_seed(batch_seed(job.config.seed, step, 0))
        executor.run(program, {n: torch.cat([b[n] for b in batches]) for n in batches[0]})
    return executor.state(program)


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


@pytest.mark.parametrize(
    ("optimizer", "trainers", "clip"),
    [
        ("sgd", 3, None),
        ("sgd", 1, graphft.ClipByGlobalNorm(0.05)),
        ("adam", 3, graphft.ClipByGlobalNorm(0.05)),
        ("rmsprop", 3, graphft.ClipByValue(0.01)),
    ],
)
def test_sync_training_equals_one_process(optimizer: str, trainers: int, clip: object) -> None:
    case = case_of("mlp")
    program, data = minimized(case, optimizer, clip), Data(case)
    job = transpiled(program, data, trainers=trainers, pservers=2)
    alone = executed(program, job, data)
    together = InProcess(job, data)
    together.run()
    for name, value in together.model().items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(value, program.values[name]), f"{name} was not trained"


@pytest.mark.parametrize("name", ["mlp", "convnet", "embedding"])
def test_bits_do_not_depend_on_the_number_of_shards(name: str) -> None:
    case = case_of(name)
    program, data = minimized(case, clip=graphft.ClipByGlobalNorm(0.5)), Data(case, records=30)
    models, counts = [], []
    for pservers in (1, 2, 3):
        job = transpiled(program, data, trainers=2, pservers=pservers, ft=pservers > 1)
        run = InProcess(job, data)
        run.run()
        models.append(run.model())
        counts.append(len({n for s in run.shards.shards for n in s.serve.attrs["optimize_blocks"]}))
    assert counts[2] > counts[0], "nothing was sliced"
    for other in models[1:]:
        assert other.keys() == models[0].keys()
        assert all(torch.equal(other[n], models[0][n]) for n in other)


@pytest.mark.parametrize("name", ["convnet", "embedding"])
def test_buffers_and_random_numbers_in_one_slot(name: str) -> None:
    """One slot has the batch of one process, and its random numbers."""
    case, steps = case_of(name), 6
    program, data = minimized(case, "sgd"), Data(case)
    job = transpiled(program, data, pservers=2)
    run = InProcess(job, data)
    run.run(steps)
    alone, model = executed(program, job, data, steps), run.model()
    for v in program.of_kind(Kind.PARAM, Kind.BUFFER):
        torch.testing.assert_close(model[v.name], alone[v.name], rtol=1e-4, atol=1e-5)
        assert v.kind is Kind.PARAM or not torch.equal(model[v.name], program.values[v.name])


def test_buffers_are_the_mean_over_slots_and_integers_the_first() -> None:
    case = case_of("convnet")
    program, data = minimized(case, "sgd"), Data(case)
    job = transpiled(program, data, trainers=2)
    run = InProcess(job, data)
    run.run(steps=1)
    means = []
    for slot in range(2):
        executor = graphft.Executor()
        work = job.config.plan.locate(0, slot)
        assert work is not None
        executor.run(program, data(work))
        means.append(executor.state(program)["1.running_mean"])
    model = run.model()
    torch.testing.assert_close(model["1.running_mean"], (means[0] + means[1]) / 2)
    assert model["1.num_batches_tracked"].item() == 1


def test_async_applies_each_batch_by_itself() -> None:
    case = case_of("mlp")
    program, data = minimized(case, clip=graphft.ClipByValue(0.05)), Data(case)
    models = []
    for pservers in (1, 2):
        job = transpiled(program, data, trainers=2, pservers=pservers, sync=False, ft=True)
        assert job.config.total_steps == 2 * sum(data.spec.batches(data.batch_size))
        run = InProcess(job, data)
        run.run()
        models.append(run.model())
    alone = executed(program, transpiled(program, data), data)
    for n, value in models[0].items():
        assert torch.equal(value, models[1][n])
        torch.testing.assert_close(value, alone[n], rtol=1e-4, atol=1e-5)
