"""Nothing is left out for its name, whatever the user called it; and no two things share one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.transpiler.job import Job
from graphft.transpiler.layout import all_slices, assemble

FEATURES = 256


class Named(nn.Module):
    """One parameter of each name, with so many elements."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        torch.manual_seed(0)
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x[:n] * getattr(self, name)).sum() for name, n in self.sizes.items()), torch.zeros(()))


def job_of(model: nn.Module) -> Job:
    program = graphft.build(model, lambda m, x: m(x), {"x": (FEATURES,)})
    graphft.minimize(program, graphft.SGD(lr=0.1, momentum=0.9))
    data = graphft.arrays(chunk_size=FEATURES, x=torch.zeros(2 * FEATURES))
    return graphft.transpile(program, data=data, batch_size=FEATURES, pservers=2, ft=True, slice_unit=64, min_block=64)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Named({"block": 256, "block0": 64, "w": 256})
        self.slice = Named({"slice1": 256, "step": 256, "momentum": 64})
        self.register_buffer("block_block0", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.block_block0 += 1
        return self.block(x) + self.slice(x)


def test_a_checkpoint_holds_everything_whatever_its_name() -> None:
    model = Blocks()
    job = job_of(model)
    programs = [job.pserver_program(index) for index in range(2)]
    saved = [program.blocks["checkpoint"].ops[0].reads for program in programs]
    state = [name for names in saved for name in names if name.endswith("@momentum_buffer")]
    assert len(state) == len(all_slices(job.trainer_program())) - 1, "but of the buffer"
    held = [{name: program.values[name] for name in names} for program, names in zip(programs, saved, strict=True)]
    whole = assemble(job.trainer_program(), held)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("other", ["w@slice0", "w@GRAD"])
def test_names_that_would_be_taken_for_others_are_refused(other: str) -> None:
    with pytest.raises(GraphftError) as caught:
        job_of(Named({"w": 256, other: 64}))
    assert caught.value.rule == "model"
