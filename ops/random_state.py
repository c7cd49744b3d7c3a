"""Defines operators on the state of the CPU's default generator, which checkpointing and `fork_rng` save and restore.

A model reaches them through `torch.get_rng_state`, `set_rng_state` and `manual_seed`, which a trace records as these
(`graphft.capture.tracing`). Their kernels do what torch's functions do, so that a replay draws what eager torch draws.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_LIBRARY = torch.library.Library("graphft", "DEF")
_STATE_BYTES = torch.default_generator.get_state().numel()


def _set_rng_state(state: Tensor) -> None:
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


for _schema, _kernel in (
    ("get_rng_state() -> Tensor", torch.default_generator.get_state),
    ("set_rng_state(Tensor state) -> ()", _set_rng_state),
    ("manual_seed(int seed) -> ()", _manual_seed),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=torch.Tag.nondeterministic_seeded)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    fx.node.has_side_effect(getattr(torch.ops.graphft, _name).default)


@torch.library.register_fake("graphft::get_rng_state", lib=_LIBRARY)
def _(*_: object) -> Tensor:
    return torch.empty(_STATE_BYTES, dtype=torch.uint8)


@torch.library.register_fake("graphft::set_rng_state", lib=_LIBRARY)
@torch.library.register_fake("graphft::manual_seed", lib=_LIBRARY)
def _(*_: object) -> None:
    return None
