"""What each rank of a training loop has for itself: its random generators, its place in the data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphft.disk.tensor_file import pack_tensors, unpack_tensors
from graphft.errors import GraphftError, UsageError
from graphft.runtime.loop.state_codec import Encoder, decode
from graphft.runtime.loop.targets import Stateful, targets_of

STATES, RANDOM, OBJECTS = "states", "random", "objects"


@dataclass(frozen=True)
class RankStates:
    """`states`, by rank: `random`, the generators, and `objects` by name."""

    states: tuple[dict[str, Any], ...]


def take_random_states() -> dict[str, Any]:
    """Returns what the generators of this process are at now: torch's (also of its devices), NumPy's and Python's."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def gather_rank_states(per_rank: Mapping[str, Stateful] | None = None) -> RankStates:
    """Returns the state of these objects, and of the random generators, of every rank of `torch.distributed`.

    A collective of the default process group: every rank calls it, at the same step. Without a process group there is
    one rank. What travels is JSON and tensors, no pickle.

    Raises GraphftError[state], in every rank, if one of them has something that cannot be saved.
    """
    problem: GraphftError | None = None
    try:
        data = _encoded(per_rank or {})
    except GraphftError as error:
        problem, data = error, b""  # the others wait for this rank all the same
    parts = _all_gather(data)
    if problem is not None:
        raise problem
    if b"" in parts:
        raise GraphftError(
            f"rank {parts.index(b'')} has a state that cannot be saved, so no rank saves",
            rule="state",
            help="its own error says what",
        )
    return RankStates(tuple(map(_decoded, parts)))


def check_rank(trainer_id: int) -> None:
    """Raises UsageError[rank] if torch.distributed gives this process another number."""
    rank = _rank_and_count()[0]
    if trainer_id != rank:
        raise UsageError(
            f"trainer_id is {trainer_id}, and this is rank {rank} of torch.distributed",
            rule="rank",
            help="with per_rank=, give trainer_id=torch.distributed.get_rank()",
        )


def of_rank(ranks: RankStates | None, rank: int, per_rank: Mapping[str, Stateful]) -> dict[str, Any]:
    """Returns what was saved of this rank. Raises GraphftError[checkpoint-fit]."""
    saved, count = (len(ranks.states) if ranks else 0), _rank_and_count()[1]
    if per_rank and ranks is None:
        what, help = "it was saved without per_rank=", "save with per_rank=, too; or load without"
    elif rank >= max(saved, 1) and ranks is not None:
        what = f"{saved} ranks have saved their states, and this is rank {rank}"
        help = f"run with {saved} ranks; or load with random_states=False, and without per_rank="
    elif per_rank and saved != count:
        what = f"{saved} ranks have saved their states of {', '.join(per_rank)}, and there are {count}"
        help = f"run with {saved} ranks; or load without per_rank=, and go on from TrainStatus.offset"
    else:
        return ranks.states[rank] if ranks else {}
    raise GraphftError(f"the checkpoint does not fit: {what}", rule="checkpoint-fit", help=help)


def _encoded(per_rank: Mapping[str, Stateful]) -> bytes:
    encoder, targets = Encoder(), targets_of(per_rank) if per_rank else {}
    objects = {name: encoder.encode(target.state_dict(), name) for name, target in sorted(targets.items())}
    state = {RANDOM: encoder.encode(take_random_states(), RANDOM), OBJECTS: objects}
    return pack_tensors(encoder.tensors, {STATES: json.dumps(state, allow_nan=False)})


def _decoded(data: bytes) -> dict[str, Any]:
    tensors, metadata = unpack_tensors(data)
    decoded: dict[str, Any] = decode(json.loads(metadata[STATES]), tensors)
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
