"""Weights go back into models, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import graphft
from graphft.errors import GraphftError
from tests.support.zoo import convnet, tied


@pytest.mark.parametrize("make", [tied, convnet])
def test_file_holds_the_models_state_dict(tmp_path: Path, make: type) -> None:
    case = make()
    program = graphft.build(case.model, case.loss_fn, case.inputs)
    executor = graphft.Executor()
    executor.run(program, case.batch(4))
    executor.scope(program)[program.of_kind(graphft.Kind.PARAM)[0].name].add_(1)
    path = graphft.save_weights(program, executor.scope(program), tmp_path / "sub" / "model.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    with_torch, with_graphft = make().model, make().model
    with_torch.load_state_dict(load_file(path))
    assert graphft.load_into(with_graphft, path) is with_graphft
    for n, value in graphft.state_dict(program, executor.scope(program)).items():
        assert torch.equal(with_torch.state_dict()[n], value)
        assert torch.equal(with_graphft.state_dict()[n], value)
    with pytest.raises(GraphftError, match=r"error\[weights\]"):
        graphft.state_dict(program, {})


def test_one_name_of_tied_weights_is_enough() -> None:
    state = tied().model.state_dict()
    del state["head.weight"]
    model = graphft.load_into(tied().model, state)
    assert torch.equal(model.state_dict()["head.weight"], state["embed.weight"])


def test_nothing_is_half_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    good = {n: v + 1 for n, v in before.items()}
    cases = [
        {n: v for n, v in good.items() if n != "1.bias"},
        {**good, "2.bias": torch.ones(1)},
        {**good, "1.weight": torch.ones(3)},
        {**good, "1.bias": torch.ones(1).double()},
    ]
    for state in cases:
        save_file(state, tmp_path / "model.safetensors")
        for source in (state, tmp_path / "model.safetensors", tmp_path / "none.safetensors"):
            with pytest.raises(GraphftError) as caught:
                graphft.load_into(model, source)
            assert caught.value.rule == "weights"
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
