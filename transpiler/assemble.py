"""Between a whole model and the slices that pservers hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from graphft.transpiler.layout import evolving, shards_of, slices_of


def assemble(trainer: Program, shard_values: Sequence[Mapping[str, Tensor]], every: bool = False) -> dict[str, Tensor]:
    """The model's state_dict, from what each shard holds by slice name, and the frozen values of `trainer`.

    Names and shapes are the model's; a tied parameter stands under each of its names (as the same tensor), a buffer
    that is not persistent not at all, nor a constant: only with `every`.

    Raises GraphftError when a slice is missing, or has another type.
    """
    state: dict[str, Tensor] = {}
    for v in trainer.of_kind(Kind.PARAM, Kind.BUFFER, Kind.FROZEN, *([Kind.CONST] if every else [])):
        if v.attrs.get("persistent") is False and not every:
            continue
        if v.kind in (Kind.FROZEN, Kind.CONST):
            value = trainer.values[v.name]
        else:
            parts = [_slice(shard_values, s.shard, s.name, s.numel, v.dtype) for s in slices_of(v)]
            value = torch.cat(parts).reshape([int(d) for d in v.shape])
        for name in (v.name, *v.attrs.get("tied", ())):
            state[name] = value
    return state


def shard_values(trainer: Program, values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each shard holds of whole parameters and buffers, by slice name. Names that do not evolve are left out."""
    shards: list[dict[str, Tensor]] = [{} for _ in range(shards_of(trainer))]
    for v in evolving(trainer):
        if v.name in values:
            flat = values[v.name].detach().reshape(-1)
            for s in slices_of(v):
                shards[s.shard][s.name] = flat[s.start : s.end].clone()
    return shards


def _slice(shards: Sequence[Mapping[str, Tensor]], shard: int, name: str, numel: int, dtype: str) -> Tensor:
    value = shards[shard].get(name) if shard < len(shards) else None
    if value is None or value.numel() != numel or str(value.dtype) != f"torch.{dtype}":
        found = "nothing" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        raise GraphftError(
            f"shard {shard} gives {found} for %{name}, expected {dtype}[{numel}]",
            rule="assemble",
            help="give each shard's values, in the order of the shards, of this very job",
        )
    return value.detach().reshape(-1).cpu()
