"""Where a job's records are in etcd. See docs/design.md, "etcd keys", for their values."""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphft.errors import GraphftError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job.

    What every process watches is under `/<job>/`; what is large or changes all the time (queue, status, events)
    lies beside it, so that no watch carries it.
    """

    job: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.job):
            raise GraphftError(
                f"a job cannot be named {self.job!r}", rule="job-name", help="use 1 to 64 letters, digits, '_' and '-'"
            )

    @property
    def control(self) -> str:
        return f"/{self.job}/"

    @property
    def everything(self) -> tuple[str, str]:
        """What all keys of the job begin with; a job's name has no dot."""
        return self.control, f"/{self.job}."

    @property
    def spec(self) -> str:
        return f"/{self.job}/spec"

    @property
    def run(self) -> str:
        """The id of the run whose records these are: what its processes write holds only while it stands here."""
        return f"/{self.job}/run"

    @property
    def secret(self) -> str:
        """What a process shows to the pservers. Beside the watched records: nothing that displays them holds it."""
        return f"/{self.job}.secret"

    @property
    def state(self) -> str:
        return f"/{self.job}/state"

    @property
    def failure(self) -> str:
        """Why the job has failed, if it has."""
        return f"/{self.job}/failure"

    @property
    def generation(self) -> str:
        return f"/{self.job}/generation"

    @property
    def pass_(self) -> str:
        return f"/{self.job}/pass"

    @property
    def wanted_passes(self) -> str:
        """How many passes are wanted so far, of a job whose passes are on demand."""
        return f"/{self.job}/wanted_passes"

    def pass_metrics(self, pass_index: int) -> str:
        """The means of the loss and the metrics over a pass that is over."""
        return f"/{self.job}.metrics/{pass_index}"

    @property
    def all_validating(self) -> str:
        """Validations that are not over."""
        return f"/{self.job}/validating/"

    def validating(self, step: int) -> str:
        return f"{self.all_validating}{step:012d}"

    def ranges(self, step: int) -> str:
        """The ranges of a validation that is not over, and who computes them."""
        return f"/{self.job}.validation/{step:012d}/"

    @property
    def all_validated(self) -> str:
        """What validations came to."""
        return f"/{self.job}.validated/"

    @property
    def newest_validated(self) -> str:
        """What the validation came to that was over last: who watches sees that there is one more."""
        return f"/{self.job}/validated"

    def validated(self, step: int) -> str:
        return f"{self.all_validated}{step:012d}"

    @property
    def decided(self) -> str:
        """What follows from the validations so far."""
        return f"/{self.job}/decided"

    @property
    def ps_desired(self) -> str:
        return f"/{self.job}/ps_desired"

    @property
    def pservers(self) -> str:
        return f"/{self.job}/ps/"

    def pserver(self, index: int) -> str:
        return f"/{self.job}/ps/{index}"

    @property
    def index_claims(self) -> str:
        return f"/{self.job}.index/"

    def index(self, index: int) -> str:
        """Held by the pserver that chose this index by itself, before it registers."""
        return f"{self.index_claims}{index}"

    def started(self, index: int) -> str:
        """Present once shard `index` has served: a process that claims it later is a restart."""
        return f"/{self.job}/started/{index}"

    @property
    def trainers(self) -> str:
        return f"/{self.job}/trainers/"

    def trainer(self, trainer: str) -> str:
        return f"/{self.job}/trainers/{trainer}"

    def registration(self, role: str, index: int, id: str) -> str:
        """Where a process of this role is registered."""
        return {"pserver": self.pserver(index), "trainer": self.trainer(id), "coordinator": self.coordinator(id)}[role]

    @property
    def coordinators(self) -> str:
        """Registrations of coordinators: the one that serves, and those that stand by."""
        return f"/{self.job}/coordinator/members/"

    def coordinator(self, id: str) -> str:
        return f"{self.coordinators}{id}"

    @property
    def coordinator_lock(self) -> str:
        """Its holder is the coordinator (`etcd.Lock`)."""
        return f"/{self.job}/coordinator/lock"

    @property
    def coordinator_addr(self) -> str:
        """Where trainers ask for tasks: the registration of the coordinator that serves."""
        return f"/{self.job}/coordinator/addr"

    @property
    def all_tasks(self) -> str:
        """What the coordinator saves of its queues."""
        return f"/{self.job}.tasks/"

    def tasks(self, pass_index: int) -> str:
        """Groups of a pass's tasks, by number."""
        return f"{self.all_tasks}{pass_index}/"

    @property
    def task_counts(self) -> str:
        """By pass, how many tasks are in which state."""
        return f"{self.all_tasks}counts"

    @property
    def task_state(self) -> str:
        return f"{self.all_tasks}state"

    @property
    def model_saver(self) -> str:
        """The trainer that was elected to save the model, and until when."""
        return f"{self.all_tasks}model_saver"

    @property
    def all_barred(self) -> str:
        """Trainers that work should not go to now."""
        return f"/{self.job}/barred/"

    def barred(self, trainer: str) -> str:
        return f"{self.all_barred}{trainer}"

    @property
    def slots(self) -> str:
        return f"/{self.job}/slots/"

    def slot(self, slot: int) -> str:
        return f"/{self.job}/slots/{slot}"

    @property
    def committed(self) -> str:
        """The newest committed checkpoint: {generation, step, path}."""
        return f"/{self.job}/checkpoint"

    @property
    def checkpoint_at(self) -> str:
        """The next one that was asked for because of the last one's age: {generation, step}."""
        return f"/{self.job}/checkpoint_at"

    @property
    def all_parts(self) -> str:
        """The parts of checkpoints that are not committed yet."""
        return f"/{self.job}.parts/"

    def parts(self, generation: int, step: int) -> str:
        return f"{self.all_parts}{generation}-{step}/"

    def of_shard(self, index: int) -> ShardKeys:
        """Async: the keys of a shard, which has a generation and checkpoints of its own."""
        return ShardKeys(self.job, index)

    def queue(self, pass_index: int) -> str:
        return f"/{self.job}.queue/{pass_index}/"

    @property
    def queues(self) -> str:
        return f"/{self.job}.queue/"

    @property
    def all_discarded(self) -> str:
        """Returns the prefix of what is discarded of the data, by chunk."""
        return f"{self.queues}discarded/"

    def discarded(self, chunk: int) -> str:
        return f"{self.all_discarded}{chunk:08d}"

    @property
    def status(self) -> str:
        return f"/{self.job}.status/"

    def status_of(self, role: str, name: str) -> str:
        return f"/{self.job}.status/{role}/{name}"

    def proof(self, name: str) -> str:
        """The record of the start check of `trainer`, `pserver/<index>`."""
        return f"/{self.job}.proof/{name}"

    def attempts(self, trainer: str) -> str:
        """How many start checks of this trainer's have begun since one has come to its end."""
        return self.proof(f"attempts/{trainer}")

    def loading(self, role: str, name: str) -> str:
        """What a process of a role loads before it registers."""
        return f"{self.status}loading/{role}/{name}"

    @property
    def places(self) -> str:
        """Where processes are, or what they wait for, by the launcher that has ordered them."""
        return f"{self.status}places/"

    def places_of(self, launcher: str) -> str:
        return f"{self.places}{launcher}"

    @property
    def events(self) -> str:
        return f"/{self.job}.events/"


@dataclass(frozen=True, slots=True)
class ShardKeys(Keys):
    """The keys of one shard in async mode, where every shard goes back alone, and saves when it likes."""

    shard: int

    def of_job(self) -> Keys:
        return Keys(self.job)

    @property
    def generation(self) -> str:
        return f"/{self.job}/generation/{self.shard}"

    @property
    def committed(self) -> str:
        return f"/{self.job}/checkpoint/{self.shard}"

    @property
    def all_parts(self) -> str:
        return f"/{self.job}.parts/{self.shard}/"
