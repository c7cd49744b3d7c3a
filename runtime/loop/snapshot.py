"""Takes, and loads again, the state of a loop's objects at one moment, and where the loop is.

That of a `PerRank` is what each rank has for itself: its random generators, its place in the data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn

from graphft.errors import GraphftError, UsageError, describe, listed
from graphft.ir import Program
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.executor import Executor, differences
from graphft.runtime.loop.state_codec import Encoder, decode

STATUS, STATE, RANDOM, OPTIMIZERS, PARAMETERS = "status", "state", "random", "optimizers", "parameters"
"""Keys in a manifest's metadata: the TrainStatus, the user's objects, the generators of trainer 0, and the classes of
optimizers and the names of their parameters, where a module that was saved has them all."""


@dataclass
class TrainStatus:
    """Says how far a loop has come, as in the design "Fault tolerance for sync training", and more.

        status = graphft.load_check_point(state, path) or graphft.TrainStatus()
        for epoch in range(status.next(), epochs):
            ...

    Attributes:
        epoch_no: The last epoch that is complete; -1 before the first.
        step: Optimizer steps since the beginning of training.
        offset: Batches (or records: the loop decides) of the epoch `next()` that are done. 0 between epochs.
        metrics: Numbers by name: `keep` may hold on to the best checkpoint by one of them.
    """

    epoch_no: int = -1
    step: int = 0
    offset: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def next(self) -> int:
        """The epoch to go on with: the one that is not complete, from `offset` on."""
        return self.epoch_no + 1

    def to_json(self) -> dict[str, Any]:
        """Raises GraphftError[train-status] for what no loop can be at."""
        numbers = {name: getattr(self, name) for name in ("epoch_no", "step", "offset")}
        if any(type(n) is not int for n in numbers.values()) or min(self.epoch_no + 1, self.step, self.offset) < 0:
            raise GraphftError(
                f"TrainStatus has {numbers}; expected ints, epoch_no of -1 or more, the others of 0 or more",
                rule="train-status",
                help="epoch_no counts complete epochs from 0 on, -1 before the first; step and offset count from 0",
            )
        if wrong := {name: value for name, value in self.metrics.items() if not isinstance(value, (int, float))}:
            raise GraphftError(
                f"TrainStatus.metrics has {wrong}; expected a number",
                rule="train-status",
                help="take a tensor's .item()",
            )
        metrics = {name: float(number) for name, number in self.metrics.items()}
        return {**numbers, "metrics": Encoder().encode(metrics, "metrics")}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrainStatus:
        """Raises KeyError, TypeError or ValueError for what `to_json` did not give."""
        return TrainStatus(
            int(data["epoch_no"]), int(data["step"]), int(data["offset"]), decode(dict(data["metrics"]), {})
        )


@dataclass(frozen=True)
class Snapshot:
    """Nothing in it changes any more."""

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read: `states` by name of the object, `random`: the generators."""

    version: int
    status: TrainStatus
    states: dict[str, Any]
    random: dict[str, Any]
    manifest: Manifest


def take(targets: Mapping[str, Stateful], status: TrainStatus, copy: bool) -> Snapshot:
    """Returns the state of these objects now. `copy`: so that they may change while it is saved."""
    encoder = Encoder()
    optimizers = {n: t for n, t in sorted(targets.items()) if isinstance(t, torch.optim.Optimizer)}
    named = {name: parameter_names(optimizer, modules_in(targets)) for name, optimizer in optimizers.items()}
    meta: dict[str, Any] = {
        STATUS: status.to_json(),
        STATE: {name: encoder.encode(target.state_dict(), name) for name, target in sorted(targets.items())},
        OPTIMIZERS: {name: type(optimizer).__name__ for name, optimizer in optimizers.items()},
        PARAMETERS: {name: names for name, names in named.items() if names},
    }
    meta[RANDOM] = encoder.encode(take_random_states(), RANDOM)
    tensors = {n: t.to("cpu", copy=True) for n, t in encoder.tensors.items()} if copy else encoder.tensors
    return Snapshot(meta, tensors)


def found_in(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Found:
    """Returns what was taken. Raises KeyError, TypeError or ValueError for what `take` did not make."""
    meta = manifest.meta
    states = {name: decode(value, tensors) for name, value in meta[STATE].items()}
    generators = decode(meta[RANDOM], tensors)
    return Found(manifest.step, TrainStatus.from_json(meta[STATUS]), states, generators, manifest)


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


def set_random_states(states: dict[str, Any]) -> None:
    """Goes on from there; of devices, those that there are."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


# -- objects ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class Stateful(Protocol):
    """As `torch.distributed.checkpoint.stateful.Stateful`: modules, optimizers, schedulers, StatefulDataLoader, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def stateful_objects(state: Any, main_program: Program | None = None) -> dict[str, Stateful]:
    """Returns what `save_check_point(state)` saves, by name. Raises UsageError[state] for what has no state."""
    if isinstance(state, Executor) and main_program is not None:
        return {main_program.name: state.stateful(main_program)}
    if isinstance(state, Executor) or main_program is not None:
        raise UsageError(
            f"the state is a {type(state).__name__}, and main_program is {'' if main_program else 'not '}given",
            rule="state",
            help="an Executor runs many programs: save_check_point(executor, status, path, main_program=program)",
        )
    named = dict(state) if isinstance(state, Mapping) else {"state": state}
    if not named:
        raise UsageError("there is no state to save", rule="state", help='give {"model": model, ...}')
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Stateful) or isinstance(value, type):
            raise UsageError(
                f"state[{name!r}] is a {type(value).__name__}, which has no state_dict() and load_state_dict()",
                rule="state",
                help='give objects by name: {"model": model, "optimizer": optimizer}; a plain value goes into an '
                "object of yours with these two methods",
            )
    return named


def load_all(
    targets: Mapping[str, Stateful],
    states: Mapping[str, Any],
    optimizers: Mapping[str, str],
    parameters: Mapping[str, list[str]],
) -> None:
    """Gives each object its state. Other names, optimizers and modules are found before anything is changed.

    `optimizers`, `parameters`: classes, and names of the parameters, of the optimizers that were saved. Raises
    GraphftError[checkpoint-fit].
    """
    wrong = [f"{name} is not in the checkpoint" for name in targets if name not in states]
    wrong += [f"{name} is in the checkpoint, and not given" for name in states if name not in targets]
    modules = modules_in(targets)
    for name in sorted(targets.keys() & states.keys()):
        target, state, found = targets[name], states[name], list[str]()
        if isinstance(target, nn.Module):
            own = target.state_dict()
            found = differences(*({n: v for n, v in s.items() if isinstance(v, Tensor)} for s in (own, state)))
            found += [f"{key} is missing, or not expected" for key in sorted(own.keys() ^ state.keys())]
        elif isinstance(target, torch.optim.Optimizer):
            kind, mine, saved = type(target).__name__, parameter_names(target, modules), parameters.get(name)
            if optimizers.get(name) not in (None, kind):
                found = [f"it was a {optimizers[name]} when it was saved, and is a {kind}"]
            elif mine and saved and mine != saved:
                found = ["its parameters have other names, or another order"]
        wrong += [f"{name}: {text}" for text in found]
    if wrong:
        raise GraphftError(
            f"the checkpoint does not fit: {listed(wrong, '; ')}",
            rule="checkpoint-fit",
            help="give the objects that were saved, made as they were then; or load what you choose of "
            "graphft.read_check_point(path).states",
        )
    # Those that may refuse come first: optimizers before modules, and others before both.
    kinds = nn.Module, torch.optim.Optimizer
    for name in sorted(targets, key=lambda name: [isinstance(targets[name], kind) for kind in kinds]):
        try:
            targets[name].load_state_dict(states[name])
        except Exception as error:
            raise GraphftError(
                f"{name} does not take its state: {describe(error)}",
                rule="checkpoint-fit",
                help="make all objects anew, as they were when they were saved: some have their state by now",
            ) from error


def modules_in(targets: Mapping[str, Stateful]) -> list[nn.Module]:
    return [target for _, target in sorted(targets.items()) if isinstance(target, nn.Module)]


def parameter_names(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> list[str]:
    """Returns the names of its parameters, by their numbers, in the first module that has them all; [] if none has."""
    trained = [id(p) for group in optimizer.param_groups for p in group["params"]]
    for module in modules:
        names = {id(p): name for name, p in module.named_parameters()}
        if names.keys() >= set(trained):
            return [names[number] for number in trained]
    return []


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
