"""The state of a loop at one moment: as it is saved, and as it is found again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.executor import ProgramState
from graphft.runtime.loop.ranks import OBJECTS, RANDOM, RankStates, of_rank, take_random_states
from graphft.runtime.loop.state_codec import Encoder, decode
from graphft.runtime.loop.targets import Stateful, fitting, load_all, parameter_names
from graphft.runtime.loop.train_status import TrainStatus, check_status
from graphft.transpiler.record import digest_of, program_digest

STATUS, STATE, RANKS, OPTIMIZERS, PARAMETERS = "status", "state", "ranks", "optimizers", "parameters"
"""Keys in a manifest's metadata, beside RANDOM, the generators of trainer 0: the TrainStatus, the user's objects, what
each rank has for itself, and of optimizers the classes, and the names of their parameters, where a module that was
saved has them all."""


@dataclass(frozen=True)
class Snapshot:
    """Nothing in it changes any more. `made_of`: the digest of a graphft program whose state it is."""

    status: TrainStatus
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    made_of: Mapping[str, str]


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: `states` by name of the object, `random`: the generators, where they were saved."""

    version: int
    status: TrainStatus
    states: dict[str, Any]
    random: dict[str, Any] | None
    ranks: RankStates | None
    manifest: Manifest


def take(
    targets: Mapping[str, Stateful], status: TrainStatus, random_states: bool, ranks: RankStates | None, copy: bool
) -> Snapshot:
    """Returns the state of these objects now. `copy`: so that they may change while it is saved."""
    check_status(status)
    encoder = Encoder()
    states = {name: _encoded(encoder, name, target.state_dict()) for name, target in sorted(targets.items())}
    optimizers = {n: t for n, t in sorted(targets.items()) if isinstance(t, torch.optim.Optimizer)}
    modules = [t for _, t in sorted(targets.items()) if isinstance(t, torch.nn.Module)]
    named = {name: parameter_names(optimizer, modules) for name, optimizer in optimizers.items()}
    meta: dict[str, Any] = {
        STATUS: status.to_json(),
        STATE: states,
        OPTIMIZERS: {name: type(optimizer).__name__ for name, optimizer in optimizers.items()},
        PARAMETERS: {name: names for name, names in named.items() if names},
    }
    if random_states:
        meta[RANDOM] = encoder.encode(take_random_states(), RANDOM)
    if ranks is not None:
        meta[RANKS] = encoder.encode(ranks.states, RANKS)
    tensors = {n: t.to("cpu", copy=True) for n, t in encoder.tensors.items()} if copy else encoder.tensors
    programs = {n: program_digest(t.program) for n, t in targets.items() if isinstance(t, ProgramState)}
    made_of = {"program": digest_of(programs)} if programs else {}
    return Snapshot(TrainStatus.from_json(meta[STATUS]), meta, tensors, made_of)


def _encoded(encoder: Encoder, name: str, state: Any) -> Any:
    try:
        return encoder.encode(state, name)
    except RecursionError as error:
        raise GraphftError(
            f"{name} cannot be saved: its state_dict contains itself, or is nested too deeply",
            rule="state",
            help="have state_dict() return dicts and lists that do not contain themselves",
        ) from error


def found_in(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Found:
    """Returns what was taken. Raises KeyError, TypeError or ValueError for what `take` did not make."""
    meta = manifest.meta
    saved = {name: decode(meta[name], tensors) for name in (RANDOM, RANKS) if name in meta}
    states = {name: decode(value, tensors) for name, value in meta[STATE].items()}
    ranks = RankStates(tuple(saved[RANKS])) if RANKS in saved else None
    return Found(manifest.step, TrainStatus.from_json(meta[STATUS]), states, saved.get(RANDOM), ranks, manifest)


def load_found(
    found: Found,
    targets: Mapping[str, Stateful],
    per_rank: Mapping[str, Stateful],
    rank: int,
    random_states: bool,
    partial: bool = False,
) -> list[str]:
    """Gives all objects their state, and the process its generators: those of its rank, where ranks have saved theirs;
    else trainer 0 has them. What ranks have saved is left alone if neither objects nor generators are asked for.

    Raises GraphftError[checkpoint-fit], and changes nothing, if that does not fit; with `partial` if nothing does. Of
    what fits in part, the rest is returned, in words.
    """
    if clash := targets.keys() & per_rank.keys():
        raise UsageError(
            f"{', '.join(sorted(clash))} is in the state and in per_rank",
            rule="state",
            help="give it once, or by another name",
        )
    own = of_rank(found.ranks, rank, per_rank) if random_states or per_rank else {}
    if (missing := own.get(OBJECTS, {}).keys() - per_rank.keys()) and not partial:
        raise GraphftError(
            f"the checkpoint does not fit: it has {', '.join(sorted(missing))} of each rank, which per_rank= lacks",
            rule="checkpoint-fit",
            help="give the objects that were saved, made as they were then",
        )
    objects, states = {**targets, **per_rank}, {**found.states, **own.get(OBJECTS, {})}
    optimizers, left = found.manifest.meta.get(OPTIMIZERS, {}), list[str]()
    if partial:
        states, left = fitting(objects, states, optimizers, found.manifest.meta.get(PARAMETERS, {}))
        objects = {name: target for name, target in objects.items() if name in states}
    load_all(objects, states, optimizers)
    generators = own.get(RANDOM) if own else found.random if rank == 0 else None
    if random_states and generators is not None:
        _set_random_states(generators)
    return left


def _set_random_states(states: dict[str, Any]) -> None:
    """Goes on from there. Of devices, those that there are."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
