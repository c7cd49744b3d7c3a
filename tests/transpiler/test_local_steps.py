"""Local accumulation computes what its name says: accumulated gradients, or local training whose moves are added up."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import ProgramError
from graphft.ir import Kind, Ref, Type
from graphft.ops.context import ChunkWork
from graphft.plan import chunk_batch_seed
from graphft.runtime.queue.async_queue import batches_of
from graphft.transpiler.job import Job
from tests.support.inprocess import InProcess, Trainer
from tests.support.programs_by_hand import linear
from tests.support.zoo import Case
from tests.transpiler.test_numeric import Data, case_of

SMALL = {"slice_unit": 64, "min_block": 64, "bucket_bytes": 1024}
BATCH, SEED, PASSES = 4, 5, 2
State = dict[str, Tensor]


def data_of(case: Case, records: int = 52, chunk: int = 24) -> Data:
    """By default chunks of 6, 6 and 1 batches: units of 4, 2, 4, 2 and 1."""
    return Data(case, records, chunk, BATCH)


def transpiled(case: Case, data: Data, mode: str, optimizer: object, clip: object = None, **options: object) -> Job:
    program = graphft.build(case.model, case.loss_fn, case.inputs)
    graphft.minimize(program, optimizer, clip)
    return graphft.transpile(
        program,
        data=data.spec,
        batch_size=BATCH,
        epochs=PASSES,
        seed=SEED,
        sync=False,
        mode=mode,
        **{"local_steps": 4, **SMALL, **options},
    )


def unit_at(job: Job, step: int) -> tuple[int, list[ChunkWork]]:
    """The samples and the batches of the unit that the plan has at a step."""
    located = job.config.plan.locate(step, 0)
    assert located is not None
    unit = ChunkWork(located.pass_index, located.chunk, located.batch, located.samples, seed=0)
    order = job.config.plan.order(unit.pass_index, unit.chunk)
    return unit.samples, batches_of(unit, count=job.config.local_steps, batch_size=BATCH, seed=SEED, order=order)


class Eager:
    """A model in plain torch, and what trains it."""

    def __init__(self, case: Case, data: Data, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.model, self.loss_fn, self.data = copy.deepcopy(case.model), case.loss_fn, data
        self.optimizer = make(self.model.parameters())

    def backward(self, work: ChunkWork, weight: float = 1.0) -> None:
        """Adds weight times the gradient of a batch, drawing the batch's random numbers."""
        torch.manual_seed(chunk_batch_seed(SEED, work.pass_index, work.chunk, work.batch))
        loss = self.loss_fn(self.model, **self.data(work))
        ((loss[0] if isinstance(loss, tuple) else loss) * weight).backward()

    def update(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def add_up(self, job: Job, step: int) -> None:
        samples, works = unit_at(job, step)
        for work in works:
            self.backward(work, work.samples / samples)

    def state(self) -> State:
        return {n: v.detach().clone() for n, v in self.model.state_dict().items()}


def assert_close(one: State, other: State, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)  # type: ignore[arg-type]


def test_half_async_has_the_bits_of_gradient_accumulation() -> None:
    """With every weight a power of two, nothing is rounded in another place, step for step."""
    case = case_of("mlp")
    data, eager = data_of(case), Eager(case, data_of(case), sgd)
    job = transpiled(case, data, "half_async", graphft.SGD(lr=0.1, momentum=0.9), pservers=2)
    for steps in range(1, job.config.total_steps + 1):
        eager.add_up(job, steps - 1)
        eager.update(max_norm=math.inf)
        run = InProcess(job, data)
        run.run(steps)
        expected = eager.state()
        assert all(torch.equal(value, expected[n]) for n, value in run.model().items()), steps


def cosine(batch: int, batches: int) -> float:
    return 0.01 * (1 + math.cos(math.pi * min(batch / batches, 1))) / 2


def test_geo_sgd_with_one_trainer_is_local_training() -> None:
    """A schedule, and clipping by the whole gradient's norm on two shards, do what they do in one process."""
    case = case_of("convnet")
    data = data_of(case, records=48, chunk=16)
    eager, optimizer = Eager(case, data, sgd), graphft.SGD(lr=graphft.schedule.cosine(0.01, 20), momentum=0.9)
    job = transpiled(case, data, "geo_sgd", optimizer, graphft.ClipByGlobalNorm(0.5), pservers=2)
    run = InProcess(job, data)
    run.run()
    works = [w for step in range(job.config.total_steps) for w in unit_at(job, step)[1]]
    assert len(works) == 24
    for k, work in enumerate(works):
        eager.optimizer.param_groups[0]["lr"] = cosine(k, 20)
        eager.backward(work)
        eager.update(max_norm=0.5)
    assert_close(run.model(), eager.state(), rtol=1e-4)


SCRIPT = ("A0", "B1", "b", "a", "A2", "B3", "a", "A4", "a", "b", "B5", "b")
"""`A2`: trainer A receives parameters and computes unit 2; `a`: what it computed is applied."""


def play(job: Job, data: Data) -> InProcess:
    run = InProcess(job, data)
    trainers = {"A": run.trainer, "B": Trainer(job, run.shards, data)}
    for act in SCRIPT:
        trainer = trainers[act[0].upper()]
        if act[1:]:
            trainer.compute(int(act[1:]), slot=0)
        else:
            run.shards.apply({0: (trainer.work.samples, trainer.pushed)})
    return run


def test_geo_sgd_adds_up_half_of_what_each_of_two_trainers_moved() -> None:
    """Momentum is each trainer's own, and outlives the units; buffers are the last one's."""
    case = case_of("convnet")
    data = data_of(case)
    job = transpiled(case, data, "geo_sgd", graphft.SGD(lr=0.1, momentum=0.9), trainers=2, pservers=2)
    workers = {name: Eager(case, data, sgd) for name in "ab"}
    server, moved = case.model.state_dict(), dict[str, State]()
    server = {n: v.clone() for n, v in server.items()}
    parameters = {n for n, _ in case.model.named_parameters()}
    for act in SCRIPT:
        worker = workers[act[0].lower()]
        if act[1:]:
            worker.model.load_state_dict(server)
            for work in unit_at(job, int(act[1:]))[1]:
                worker.backward(work)
                worker.update(max_norm=math.inf)
            moved[act[0].lower()] = {n: v - server[n] if n in parameters else v for n, v in worker.state().items()}
        else:
            server = {n: v + moved[act][n] * 0.5 if n in parameters else moved[act][n] for n, v in server.items()}
    assert_close(play(job, data).model(), server)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("records", "chunk", "count"), [(50, 24, 4), (47, 13, 1), (30, 9, 2)])
def test_the_batches_of_the_units_are_the_batches(records: int, chunk: int, count: int, drop_last: bool) -> None:
    case = case_of("mlp")
    data = data_of(case, records, chunk)
    job = transpiled(case, data, "geo_sgd", graphft.SGD(lr=0.1), local_steps=count, drop_last=drop_last)
    plain = job.config.replace(mode="async", local_steps=1).plan
    found = [
        (w.pass_index, w.chunk, w.batch, w.samples)
        for step in range(job.config.total_steps)
        for w in unit_at(job, step)[1]
    ]
    wanted = [
        (w.pass_index, w.chunk, w.batch, w.samples)
        for step in range(plain.total_steps)
        if (w := plain.locate(step, 0)) is not None
    ]
    assert found == wanted
    sizes = [len(unit_at(job, step)[1]) for step in range(job.config.total_steps)]
    assert max(sizes) == count


def test_geo_sgd_refuses_a_schedule_that_counts_by_itself() -> None:
    program = linear()
    program.variable("seen", Type("int64", ()), Kind.STATE, torch.zeros((), dtype=torch.int64))
    program.blocks["step"].append_op("increment", Ref("seen"))
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    with pytest.raises(ProgramError, match="state %seen belongs to no parameter") as caught:
        graphft.transpile(program, data=data, batch_size=4, sync=False, mode="geo_sgd", local_steps=2)
    assert caught.value.rule == "local-state"
    graphft.transpile(program, data=data, batch_size=4, sync=False, mode="half_async", local_steps=2)
