"""The state of a loop at one moment: as it is saved, and as it is found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.runtime.executor import ProgramState
from graphft.runtime.loop.partial import fitting
from graphft.runtime.loop.random_states import set_random_states, take_random_states
from graphft.runtime.loop.ranks import OBJECTS, RANDOM, RankStates, of_rank
from graphft.runtime.loop.state_codec import Encoder, decode
from graphft.runtime.loop.targets import Stateful, load_all, parameter_names
from graphft.runtime.loop.train_status import TrainStatus, check_status
from graphft.runtime.loop.version_store import VersionManifest
from graphft.transpiler.fingerprint import digest_of, program_digest

STATE, RANKS, OPTIMIZERS, PARAMETERS = "state", "ranks", "optimizers", "parameters"
"""What a manifest's `state` has, beside RANDOM, the generators of trainer 0: the user's objects, what each rank has for
itself, and of optimizers the classes, and the names of their parameters, where a module that was saved has them all."""


@dataclass(frozen=True)
class Snapshot:
    """Nothing in it changes any more."""

    status: TrainStatus
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    made_of: Mapping[str, str]
    """`program`: the digest of a graphft program whose state it is."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: `states` by name of the object, `random`: the generators, where they were saved."""

    version: int
    status: TrainStatus
    states: dict[str, Any]
    random: dict[str, Any] | None
    ranks: RankStates | None
    manifest: VersionManifest


def take(
    targets: Mapping[str, Stateful], status: TrainStatus, random_states: bool, ranks: RankStates | None, copy: bool
) -> Snapshot:
    """The state of these objects now. `copy`: so that they may change while it is saved."""
    check_status(status)
    encoder = Encoder()
    state: dict[str, Any] = {STATE: {n: _encoded(encoder, n, t.state_dict()) for n, t in sorted(targets.items())}}
    optimizers = {n: t for n, t in sorted(targets.items()) if isinstance(t, torch.optim.Optimizer)}
    state[OPTIMIZERS] = {name: type(optimizer).__name__ for name, optimizer in optimizers.items()}
    modules = [t for _, t in sorted(targets.items()) if isinstance(t, torch.nn.Module)]
    named = {name: parameter_names(optimizer, modules) for name, optimizer in optimizers.items()}
    state[PARAMETERS] = {name: names for name, names in named.items() if names}
    if random_states:
        state[RANDOM] = encoder.encode(take_random_states(), RANDOM)
    if ranks is not None:
        state[RANKS] = encoder.encode(ranks.states, RANKS)
    tensors = {n: t.to("cpu", copy=True) for n, t in encoder.tensors.items()} if copy else encoder.tensors
    programs = {n: program_digest(t.program) for n, t in targets.items() if isinstance(t, ProgramState)}
    made_of = {"program": digest_of(programs)} if programs else {}
    return Snapshot(TrainStatus.from_json(status.to_json()), state, tensors, made_of)


def _encoded(encoder: Encoder, name: str, state: Any) -> Any:
    try:
        return encoder.encode(state, name)
    except RecursionError as error:
        raise GraphftError(
            f"{name} cannot be saved: its state_dict contains itself, or is nested too deeply",
            rule="state",
            help="have state_dict() return dicts and lists that do not contain themselves",
        ) from error


def found_in(manifest: VersionManifest, tensors: Mapping[str, Tensor]) -> Found:
    """What was taken. Raises KeyError, TypeError or ValueError for what `take` did not make."""
    saved = {name: decode(manifest.state[name], tensors) for name in (RANDOM, RANKS) if name in manifest.state}
    states = {name: decode(value, tensors) for name, value in manifest.state[STATE].items()}
    ranks = RankStates(tuple(saved[RANKS])) if RANKS in saved else None
    return Found(manifest.version, TrainStatus.from_json(manifest.status), states, saved.get(RANDOM), ranks, manifest)


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
    optimizers, left = found.manifest.state.get(OPTIMIZERS, {}), []
    if partial:
        fits = fitting(objects, states, optimizers, found.manifest.state.get(PARAMETERS, {}))
        states, left = fits.states, fits.left
        objects = {name: target for name, target in objects.items() if name in states}
    load_all(objects, states, optimizers)
    random = own.get(RANDOM) if own else found.random if rank == 0 else None
    if random_states and random is not None:
        set_random_states(random)
    return left
