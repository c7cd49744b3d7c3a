"""Saves what each rank of a training loop has for itself: its random generators, its place in the data."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from graphft.errors import GraphftError
from graphft.runtime.loop.snapshot import RANDOM, Stateful, set_random_states, stateful_objects, take_random_states
from graphft.runtime.loop.state_codec import Encoder, decode

RANKS, OBJECTS = "ranks", "objects"


class PerRank:
    """Each rank of `torch.distributed` has these objects, and the generators of its process, for itself.

        state = {"model": model, "optimizer": optimizer, "ranks": graphft.PerRank(loader=loader)}

    `state_dict()`, and so a save, is a collective of the default process group: every rank calls it, at the same step;
    without a process group there is one rank. What travels is JSON and tensors, no pickle.
    """

    def __init__(self, **objects: Stateful) -> None:
        self.objects = stateful_objects(objects) if objects else {}

    def state_dict(self) -> dict[str, Any]:
        """Raises GraphftError[state], in every rank, if one of them has something that cannot be saved."""
        problem: Exception | None = None
        encoder, data = Encoder(), b""
        try:
            objects = {name: encoder.encode(each.state_dict(), name) for name, each in sorted(self.objects.items())}
            state = {RANDOM: encoder.encode(take_random_states(), RANDOM), OBJECTS: objects}
            text = torch.tensor(bytearray(json.dumps(state, allow_nan=False).encode()), dtype=torch.uint8)
            tensors = {f"{RANKS}.{name}": t.cpu().clone().contiguous() for name, t in encoder.tensors.items()}
            data = save({RANKS: text} | tensors)
        except Exception as error:
            problem = error  # the others wait for this rank all the same
        parts = _all_gather(data)
        if problem is not None:
            raise problem
        if b"" in parts:
            raise GraphftError(
                f"rank {parts.index(b'')} has a state that cannot be saved, so no rank saves",
                rule="state",
                help="its own error says what",
            )
        return {RANKS: [_decoded(part) for part in parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the objects, and the generators of this process, what was saved of this rank. Raises
        GraphftError[checkpoint-fit] for another number of ranks, or other objects."""
        rank, count = _rank_and_count()
        saved = state[RANKS]
        names = sorted(saved[0][OBJECTS])
        if len(saved) != count or names != sorted(self.objects):
            raise GraphftError(
                f"{len(saved)} ranks have saved {names}; there are {count}, with {sorted(self.objects)}",
                rule="checkpoint-fit",
                help="run with as many ranks and the same objects; or take what you need of "
                "graphft.read_check_point(path).states, and go on from TrainStatus.offset",
            )
        for name, target in self.objects.items():
            target.load_state_dict(saved[rank][OBJECTS][name])
        set_random_states(saved[rank][RANDOM])


def _decoded(data: bytes) -> dict[str, Any]:
    tensors = load(data)
    text = json.loads(bytes(tensors.pop(RANKS).tolist()))
    decoded: dict[str, Any] = decode(text, {n.removeprefix(f"{RANKS}."): t for n, t in tensors.items()})
    return decoded


def _rank_and_count() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _all_gather(data: bytes) -> list[bytes]:
    count = _rank_and_count()[1]
    if count == 1:
        return [data]
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    dist.all_gather(sizes, size)
    lengths = [int(s) for s in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    parts = [torch.empty_like(mine, device=device) for _ in range(count)]
    dist.all_gather(parts, mine.to(device))
    return [bytes(part[:length].cpu().numpy()) for part, length in zip(parts, lengths, strict=True)]
