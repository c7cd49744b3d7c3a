"""Nothing is left out for its name, whatever the user called it; and no two things share one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.transpiler import Job
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
    return graphft.transpile(
        program, chunks=data, batch_size=FEATURES, pservers=2, ft=True, slice_unit=64, min_block=64
    )


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
    """All slices of parameters and buffers, and their optimizer state; saved by pservers alone, and by every one."""
    model = Blocks()
    job = job_of(model)
    slices, state, values = all_slices(job.trainer_program()), 0, []
    saved = set()
    for index in range(2):
        program = job.pserver_program(index)
        (save,) = program.blocks["checkpoint"].ops
        names = set(save.reads)
        owned = program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)
        assert names == {v.name for v in owned}
        state += sum(v.name.endswith("@momentum_buffer") for v in owned)
        saved |= names
        values.append({name: program.values[name] for name in names})
    assert {s.name for s in slices} <= saved
    assert state == sum(job.trainer_program().variables[s.variable].kind is Kind.PARAM for s in slices) > 8
    whole = assemble(job.trainer_program(), values)
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[n], v) for n, v in model.state_dict().items())
    assert "save_check_point" not in str(job.trainer_program())


@pytest.mark.parametrize("other", ["w@slice0", "w@GRAD"])
def test_names_that_would_be_taken_for_others_are_refused(other: str) -> None:
    with pytest.raises(GraphftError) as caught:
        job_of(Named({"w": 256, other: 64}))
    assert caught.value.rule == "model"
