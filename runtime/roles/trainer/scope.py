"""What a trainer's blocks find in their scope at first."""

from __future__ import annotations

import torch
from torch import Tensor

from graphft.ir import Kind, Program


def trainer_scope(program: Program) -> dict[str, Tensor]:
    """Constants as saved; what pservers own, zero until it is received: a tensor that is received in parts is no NaN
    meanwhile."""
    scope: dict[str, Tensor] = {}
    for v in program.variables.values():
        if v.name in program.values:
            scope[v.name] = program.values[v.name].clone()
        elif v.kind in (Kind.PARAM, Kind.BUFFER):
            scope[v.name] = torch.zeros([int(d) for d in v.shape], dtype=getattr(torch, v.dtype))
    return scope
