"""Runs programs in this process; a Trainer's `validate()` is one.

    executor = graphft.Executor()
    out = executor.run(program, feed={"x": x, "y": y}, fetch=["loss"])

The executor keeps the values of each program's parameters, buffers and optimizer states (its *scope*) from one run
to the next, starting with the program's own. A program that runs in two executors has two independent copies.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.capture.loss_fn import reported
from graphft.capture.weights import load_weights, saved_variables
from graphft.errors import ProgramError, UsageError, listed
from graphft.ir import Block, Kind, Operator, Program, Variable
from graphft.ops.context import Context
from graphft.optim.grad_scaler import UPDATE
from graphft.options import find_device
from graphft.reducers import columns_of
from graphft.runtime.data import IN_ORDER, open_reader
from graphft.runtime.execute.input_checks import check_dims, check_feed
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.protocol.decisions import RangeResult, sums_as_text, totals
from graphft.runtime.validation.results import RangeResults, named
from graphft.transpiler.validation import ValidationConfig


@dataclass(slots=True)
class _Session:
    """One program in one executor."""

    program: Program
    context: Context
    unchecked: list[dict[str, Any]] | None
    """The batches so far, until there are two; None when the program needs no comparison any more."""
    lowered: dict[tuple[str, tuple[str, ...]], tuple[list[Operator], Lowered]] = field(default_factory=dict)
    """The functions of blocks, by the block and its fetches, each with the block's ops then."""


class Executor:
    """Runs programs on `device`. With a `seed`, run k of a program draws its random numbers from (seed, k), and
    leaves torch's own generator alone; without, they come from torch's generator, as in eager torch.

    A program that `build` captured in this process is compared with its module on the first two batches (see
    `graphft.check_capture`), which costs three steps of each; not with `check=False`.

    Raises GraphftError[device] where there is no such device."""

    def __init__(self, device: str | torch.device = "cpu", seed: int | None = None, check: bool = True) -> None:
        find_device(device)
        self.device, self.seed, self.check = torch.device(device), seed, check
        self._sessions: dict[int, _Session] = {}

    def run(
        self,
        program: Program,
        feed: Mapping[str, Any] | None = None,
        fetch: str | Variable | Iterable[str | Variable] = (),
        block: str = "step",
    ) -> dict[str, Any]:
        """Runs `block` once and returns the fetched values by name.

        `feed` maps inputs to tensors (or what `torch.as_tensor` takes); it is checked whole before anything runs.
        Raises ProgramError: [feed], [no-block], [undeclared] before, [op-failed] with the op while running.
        """
        session = self._session(program)
        if block not in program.blocks:
            raise ProgramError(
                f"program '{program.name}' has no block {block}",
                rule="no-block",
                help=f"its blocks are {', '.join(program.blocks) or 'none'}",
            )
        if block == "step" and any(op.type == UPDATE for op in program.blocks[block].ops):
            raise UsageError(
                f"program '{program.name}' has a gradient scaler: an executor cannot leave a step out that overflows",
                rule="grad-scaler",
                help='run it as a job: graphft.transpile(program, on_nonfinite="skip", ...).run()',
            )
        wanted = [fetch] if isinstance(fetch, (str, Variable)) else list(fetch)
        names = tuple(w if isinstance(w, str) else w.name for w in wanted)
        function = self._lowered(session, program.blocks[block], names)
        fed = check_feed(program.blocks[block], feed or {}, self.device, function.inputs)
        if session.unchecked is not None and block == "step" and program.of_kind(Kind.INPUT):
            from graphft.runtime.capture_check import STEPS, check_capture  # loads what only captures need

            session.unchecked.append(fed)
            check_capture(program, session.unchecked)
            if len(session.unchecked) == STEPS:
                session.unchecked = None
        session.context.scope.update(fed)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda, enabled=self.seed is not None):
            if self.seed is not None:
                torch.manual_seed(seed_of(self.seed, session.context.step))
            results = function(session.context, session.context.scope)
        session.context.step += 1
        own = [n for n in names if program.variables[n].kind.persistent]  # the next run changes these in place
        return {n: r.clone() if n in own else r for n, r in zip(names, results, strict=True)}

    def run_role(self, job_dir: str | os.PathLike[str], role: str, *, index: int = -1, etcd: str = "") -> int:
        """Runs a whole role (trainer, pserver, coordinator) of the job in this run's folder, until the job is complete.

        What `graphft start` does. `etcd`: endpoints, by default those in the folder. Returns the exit status (see
        docs/running.md); the reasons are logged."""
        from graphft.runtime.process.role_process import ROLES
        from graphft.runtime.roles.environment import RoleSpec, run_role
        from graphft.transpiler.job import Job

        if role not in ROLES:
            raise UsageError(f"there is no role {role!r}", rule="role", help=f"roles are {', '.join(ROLES)}")
        return run_role(Job.load(job_dir), Path(job_dir), RoleSpec(role, index, str(job_dir), etcd))

    def scope(self, program: Program) -> dict[str, Tensor]:
        """The program's values in this executor, by variable name: live, not copies."""
        session = self._session(program)
        self._fill(session)
        return session.context.scope  # type: ignore[return-value]

    def state(self, program: Program) -> dict[str, Tensor]:
        """Copies of the values of the program's persistent variables."""
        scope = self.scope(program)
        return {v.name: scope[v.name].clone() for v in program.variables.values() if v.kind.persistent}

    def stateful(self, program: Program) -> ProgramState:
        """This executor's state of a program, as something to be saved with a training loop."""
        return ProgramState(self, program)

    def _session(self, program: Program) -> _Session:
        session = self._sessions.get(id(program))
        if session is None:
            unchecked = self.check and program.origin is not None and not program.origin.checked
            session = _Session(program, Context(scope={}, device=str(self.device)), [] if unchecked else None)
            self._sessions[id(program)] = session
        return session

    def _fill(self, session: _Session) -> None:
        """Gives the persistent variables that have no value yet their initial one."""
        program, scope = session.program, session.context.scope
        for name in program.values.keys() - scope.keys():
            value = program.values[name].detach().to(self.device)
            scope[name] = value.clone(memory_format=torch.contiguous_format)  # fused kernels walk raw memory
        valueless = [v.name for v in program.variables.values() if v.kind.persistent and v.name not in scope]
        if valueless:
            raise ProgramError(
                f"%{valueless[0]} of program '{program.name}' has no initial value",
                rule="no-value",
                help=f"set program.values[{valueless[0]!r}]",
            )

    def _lowered(self, session: _Session, block: Block, fetch: tuple[str, ...]) -> Lowered:
        """The block's function, made again if the block has changed since."""
        ops, function = session.lowered.get((block.name, fetch), ([], None))
        if function is None or ops != block.ops:
            self._fill(session)
            function = lower(block, fetch=fetch, device=self.device)
            session.lowered[block.name, fetch] = list(block.ops), function
        return function


@dataclass(frozen=True)
class ProgramState:
    """A program's persistent values in an executor, and how often it ran. See `Executor.stateful`."""

    executor: Executor
    program: Program

    def state_dict(self) -> dict[str, Any]:
        session = self.executor._session(self.program)
        return {"values": self.executor.state(self.program), "runs": session.context.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ProgramError[state], and changes nothing, unless all variables have a value that fits."""
        scope, session = self.executor.scope(self.program), self.executor._session(self.program)
        own = {v.name: scope[v.name] for v in self.program.variables.values() if v.kind.persistent}
        if wrong := differences(own, state["values"]):
            raise ProgramError(
                f"the state does not fit program '{self.program.name}': {listed(wrong, '; ')}",
                rule="state",
                help="load it into the program that it was saved of",
            )
        for name, value in own.items():
            value.copy_(state["values"][name])
        session.context.step = int(state["runs"])


def differences(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Names in words what is missing, not known, or of another shape or dtype among `found`."""
    wrong = [f"%{name} is missing" for name in own if name not in found]
    wrong += [f"%{name} is not known" for name in found if name not in own]
    return wrong + [
        f"%{name} is {value.dtype} {tuple(value.shape)}, expected {own[name].dtype} {tuple(own[name].shape)}"
        for name, value in found.items()
        if name in own and (value.dtype, value.shape) != (own[name].dtype, own[name].shape)
    ]


def seed_of(*key: int) -> int:
    """A seed for torch's generator that is a function of the numbers in `key`, and differs for every key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def validate_here(
    program: Program, config: ValidationConfig, state: Mapping[str, Tensor], device: str
) -> dict[str, float]:
    """The same as `transpile(validate=)` comes to, to the bit, with these weights; and the number of `samples`. Raises
    GraphftError[weights] if they do not fit the program."""
    read = {name for v in saved_variables(program) for name in (v.name, *v.attrs.get("tied", ()))}
    program = load_weights(program, {name: value for name, value in state.items() if name in read})
    names = reported(program)
    inputs, executor = [v.name for v in columns_of(program)], Executor(device)
    done: list[RangeResults] = []
    with tempfile.TemporaryDirectory() as folder:
        config.data.store(folder)
        reader = open_reader(config.data, folder, 0)
        for chunk, first, count in config.ranges:
            done.append(RangeResults(program))
            for batch in range(first, first + count):
                columns = reader.batch(IN_ORDER, chunk, batch, config.size)
                if "assume" in program.attrs:
                    check_dims(program, {name: columns[name] for name in inputs})
                found = executor.run(program, {name: columns[name] for name in inputs}, names)
                done[-1].add(config.samples(chunk, batch), [found[name] for name in names])
    records = {n: RangeResult(one.samples, sums_as_text(one.sums)) for n, one in enumerate(done)}
    total = totals(records, len(done))
    assert total is not None
    entries = {name: torch.cat([t for one in done for t in one.entries[name]]) for name in done[0].entries}
    return named(program, total[1], entries) | {"samples": total[0]}
