"""One simulated job: its processes, what starts them again, and what must hold at the end."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from graphft.disk.tensor_file import read_tensors
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.connect import JobEnded
from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import count_queue
from graphft.runtime.data import Reader, open_reader
from graphft.runtime.etcd import EtcdError
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, EXIT_OK
from graphft.runtime.protocol.async_shard import AsyncShard
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import ApplyRound
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.roles.environment import RoleSpec, make_role
from graphft.transpiler.layout import SKIPPED_STEPS
from tests.sim.disk import Disk, SimPath
from tests.sim.etcd import Client, Way
from tests.sim.etcd_store import SimEtcd
from tests.sim.network import WorldNetwork
from tests.sim.substitutes import substituted
from tests.sim.threads import SimTime
from tests.sim.transport import Faults
from tests.sim.variants import Variant, make_job
from tests.sim.world import Died, Process, SimulationFailed, World

LIMIT = 900.0
"""Seconds of simulated time that a job may take, its faults included."""
LEAVE = 60.0
"""For how long a process may live on when its job is over."""
JOB_FOLDER = "/shared/job"


class Simulation:
    """`begin` starts the processes; `run` goes on until they have all ended, and checks what they left."""

    def __init__(
        self,
        seed: int,
        variant: Variant,
        faults: Faults | None = None,
        latency: float = 1e-3,
        pace: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.seed, self.variant, self.job = seed, variant, make_job(variant)
        self.world = World(seed)
        self.disk = Disk(self.world)
        self.network = WorldNetwork(self.world, faults or Faults(), latency)
        self.counts: Counter[str] = Counter()
        self.restarts = True
        """A process that ends is started again: until the job is over."""
        self.roles: dict[Process, RoleSpec] = {}
        self._looked, self._over = -1, False
        self._substitutes = substituted(
            self.world, self.disk, self.network, pace, self._watched() | {open_reader: self.open_reader}
        )
        self.rounds: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        """By generation and step, what the first shard to do so applied."""
        self._log = _Story(self.world)

    # -- life -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Simulation:
        self._substitutes.__enter__()
        self.store = SimEtcd(SimTime(self.world).monotonic)
        self.way = Way(self.world, self.store)
        self.keys = Keys(self.job.config.name)
        self.folder = SimPath(JOB_FOLDER)
        for path in reversed([self.folder, *self.folder.parents][:-1]):
            path.mkdir()
        (self.folder / "job.json").write_bytes(b"{}")
        self.disk.root.lasting_names = dict(self.disk.root.names)
        self._log.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.world.processes:
            process.alive = False
        for process in self.world.processes:
            process.unwind()
        self._log.__exit__()
        self._substitutes.__exit__(*exc)

    @property
    def trainers(self) -> int:
        """The job's logical trainers (slots)."""
        return int(dict(self.variant.options)["trainers"])

    def begin_all(self) -> None:
        """Starts the job, and what is to happen to it."""
        self.begin(self.trainers)

    @property
    def coordinators(self) -> int:
        return (1 + self.seed % 2) * (self.job.config.dispatch == "coordinator")

    def begin(self, trainers: int) -> None:
        for index in range(self.coordinators):
            self.start(RoleSpec("coordinator", index))
        for index in range(self.job.config.pservers):
            self.start(RoleSpec("pserver", index))
        for index in range(trainers):
            self.start(RoleSpec("trainer", index))

    def start(self, spec: RoleSpec) -> Process:
        number = sum(1 for other in self.roles.values() if other == spec)
        name = f"{spec.kind} {spec.index}" + (f" ({number + 1})" if number else "")
        self.world.tell(name, "starts")
        process = Process(self.world, name, lambda: self._role(spec), self._ended)
        self.roles[process] = spec
        self.started(process)
        return process

    def started(self, process: Process) -> None:
        """For faults: a process begins."""

    def _role(self, spec: RoleSpec) -> int:
        """As `run_role`, without logs and signals."""
        process = self.world.process
        try:
            etcd: Any = Client(self.way, process)
            put_job(etcd, self.keys, self.job)
            role = make_role(self.job, self.folder, spec, etcd)  # type: ignore[arg-type]
            if role is not None:
                role.run()
            return EXIT_OK
        except JobEnded:
            return EXIT_OK
        except GraphftError as error:
            if isinstance(error, EtcdError) and self.complete:
                return EXIT_OK
            self.world.tell(process.name, "%s", (error,))
            return error.exit_status

    def _ended(self, process: Process, status: int | None) -> None:
        """Starts a process again whose job is not over, as the launcher does."""
        spec = self.roles[process]
        self.counts["killed" if status is None else f"status {status}"] += 1
        if status not in (None, EXIT_OK, EXIT_LEASE_LOST):
            self.unexpected(process, status)
        if self.world.random.random() < 0.5:
            self.world.after(self.world.random.uniform(0.01, 0.2), lambda: self._revoke(process))
        if self.over and status is not None:
            return
        if self.restarts:
            self.world.after(self.world.random.uniform(0.05, 1.0), lambda: self.start(spec))

    def unexpected(self, process: Process, status: int | None) -> None:
        """A process has failed: by an error of its own, no fault of the world's."""
        raise SimulationFailed(f"{process.name} ended with status {status}")

    def _revoke(self, process: Process) -> None:
        """A launcher that sees its child dead ends that one's lease."""
        for kv in self.store.range(f"/{self.keys.job}/").kvs:
            if kv.lease and f'"pid":{process.pid}' in kv.value.decode("latin-1"):
                self.store.lease_revoke(kv.lease)
                return

    def living(self) -> list[Process]:
        return [process for process in self.world.processes if process.alive]

    # -- what is watched --------------------------------------------------------------------------------------------

    def _watched(self) -> dict[Any, Any]:
        """Returns by machine of the protocol what stands in for it: it checks its invariants after every event, and
        sync shards tell what they apply."""

        def watched(machine: Any) -> Any:
            class Watched(machine):  # type: ignore[misc]
                def step(watched, event: Any, now: float) -> Any:
                    effects = super().step(event, now)
                    watched.check_invariants()
                    for effect in effects:
                        if isinstance(effect, ApplyRound):
                            given = tuple((c.slot, c.samples) for c in effect.contributions)
                            self.applied(effect.generation, effect.step, watched.options.shard, given)
                    return effects

            return Watched

        return {machine: watched(machine) for machine in (AsyncShard, AsyncTrainer, SyncTrainer, SyncShard)}

    def applied(self, generation: int, step: int, shard: int, contributions: tuple[tuple[int, int], ...]) -> None:
        """`contributions`: (slot, samples)."""
        self.world.tell(f"shard {shard}", "applies step %d of generation %d", (step, generation))
        first = self.rounds.setdefault((generation, step), contributions)
        if contributions != first:
            raise SimulationFailed(
                f"shard {shard} applies {contributions} at step {step} of generation {generation}, another {first}"
            )

    def open_reader(self, *arguments: Any, **options: Any) -> Reader:
        """For faults: reads the job's data."""
        return open_reader(*arguments, **options)

    def check_committed(self) -> None:
        """Fails unless what etcd calls a checkpoint lies on the disk, whole."""
        view = read_view(self.keys, self.store.range(self.keys.control).kvs)
        commits = {checkpoints_of(self.folder, shard): c for shard, c in view.shard_commits.items()}
        if view.committed is not None:
            commits[checkpoints_of(self.folder)] = view.committed
        for store, committed in commits.items():
            self.counts["checkpoints checked"] += 1
            try:
                manifest = store.read_manifest(committed.checkpoint)
                for part in manifest.parts:
                    store.read_part(manifest, part.shard)
            except GraphftError as error:
                raise SimulationFailed(f"the committed checkpoint {committed.checkpoint} is lost: {error}") from error

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        kv = self.store.get(self.keys.state)
        return kv.value.decode() if kv is not None else ""

    @property
    def over(self) -> bool:
        if self.store.revision != self._looked:  # asked for at every event
            self._looked, self._over = self.store.revision, self.state not in ("", "running")
        return self._over

    @property
    def complete(self) -> bool:
        return (self.folder / "model.safetensors").exists()

    def run(self) -> Simulation:
        try:
            self.world.run(lambda: self.over, LIMIT)
            self.restarts = False
            self.world.run(lambda: not self.living(), self.world.now + LEAVE)
            self.check()
        except SimulationFailed as failure:
            raise self._explained(failure) from None
        except Exception as error:
            raise self._explained(error) from error
        return self

    def _explained(self, error: Exception) -> SimulationFailed:
        story = "\n".join([*self.world.lines(), *self.waits()])
        living = "; ".join(f"{p.name}{' (stopped)' if p.frozen else ''}" for p in self.living())
        return SimulationFailed(
            f"{story}\n{type(error).__name__}: {error}\nseed {self.seed}, at {self.world.now:.3f} s: {self.variant}\n"
            f"state {self.state!r}, living: {living}"
        )

    def waits(self) -> list[str]:
        """Returns where each thread of the living processes is."""
        return [
            f"{process.name}, {task.name}:\n" + "".join(traceback.format_stack(task.greenlet.gr_frame)[-9:-2])
            for process in self.living()
            for task in process.tasks
            if task.greenlet.gr_frame is not None
        ]

    def check(self) -> None:
        if self.state != "complete":
            raise SimulationFailed(f"the job is {self.state!r}")
        for index in range(self.job.config.epochs):
            counted = count_queue(self.store, self.keys, self.job.config.dispatch, index, 0)  # type: ignore[arg-type]
            if counted is None or counted.todo or counted.pending:
                raise SimulationFailed(f"pass {index} has chunks that are not done: {counted}")

    def model(self) -> dict[str, Any]:
        return read_tensors(self.folder / "model.safetensors")[0]  # type: ignore[arg-type]

    def skipped(self) -> int:
        """Returns how many steps were discarded as not finite, as the model's file says."""
        metadata = read_tensors(self.folder / "model.safetensors")[1]  # type: ignore[arg-type]
        return int(metadata.get(SKIPPED_STEPS, 0))


class _Story(logging.Handler):
    """Makes what roles log a part of the story."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world
        self._logger = logging.getLogger("graphft")

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.current is not None and self._world.process.alive:
            self._world.tell(self._world.process.name, str(record.msg), record.args or ())
            if record.exc_info and not isinstance(record.exc_info[1], Died):
                text = "".join(traceback.format_exception(record.exc_info[1]))
                self._world.tell(self._world.process.name, "%s", (text,))

    def __enter__(self) -> None:
        self._before = self._logger.handlers[:], self._logger.level, self._logger.propagate
        self._logger.handlers[:], self._logger.propagate = [self], False
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *exc: object) -> None:
        self._logger.handlers[:], self._logger.propagate = self._before[0], self._before[2]
        self._logger.setLevel(self._before[1])
