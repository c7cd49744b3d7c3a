"""Where a job's records are in etcd. See docs/design.md, "etcd keys", for their values."""

from __future__ import annotations

import re

from graphft.errors import GraphftError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Keys:
    """The keys of one job; with `shard`, of one shard in async mode, where every shard goes back alone.

    The records that every process watches are under `/<job>/`; large ones and those that change all the time (queue,
    status, events) lie beside it, so that no watch carries them.
    """

    def __init__(self, job: str, shard: int | None = None) -> None:
        if not _NAME.fullmatch(job):
            raise GraphftError(
                f"a job cannot be named {job!r}", rule="job-name", help="use 1 to 64 letters, digits, '_' and '-'"
            )
        self.job = job
        own = "" if shard is None else f"/{shard}"
        self.control = f"/{job}/"
        self.everything = (self.control, f"/{job}.")
        """Prefixes of all keys of the job; a job's name has no dot."""

        # -- the run
        self.spec = f"/{job}/spec"
        self.run = f"/{job}/run"
        """The id of the run whose records these are: writes of its processes hold only while it stands here."""
        self.secret = f"/{job}.secret"
        """Shown by processes to the pservers. Beside the watched records: nothing that displays them holds it."""
        self.state = f"/{job}/state"
        self.failure = f"/{job}/failure"
        self.ps_desired = f"/{job}/ps_desired"
        self.pass_ = f"/{job}/pass"
        self.wanted_passes = f"/{job}/wanted_passes"
        """How many passes are wanted so far, of a job whose passes are on demand."""

        # -- checkpoints
        self.generation = f"/{job}/generation{own}"
        self.committed = f"/{job}/checkpoint{own}"
        """The newest committed checkpoint: {generation, step, path}."""
        self.checkpoint_at = f"/{job}/checkpoint_at"
        """The next one that was asked for because of the last one's age: {generation, step}."""
        self.all_parts = f"/{job}.parts{own}/"
        """The parts of checkpoints that are not committed yet."""

        # -- processes
        self.pservers, self.trainers = f"/{job}/ps/", f"/{job}/trainers/"
        self.coordinators = f"/{job}/coordinator/members/"
        """Registrations of coordinators: the one that serves, and those that stand by."""
        self.coordinator_lock = f"/{job}/coordinator/lock"
        """Its holder is the coordinator (`etcd.Lock`)."""
        self.coordinator_addr = f"/{job}/coordinator/addr"
        """Where trainers ask for tasks: the registration of the coordinator that serves."""
        self.slots = f"/{job}/slots/"
        self.all_barred = f"/{job}/barred/"
        """Trainers that get no work now."""
        self.index_claims = f"/{job}.index/"

        # -- the queue
        self.queues = f"/{job}.queue/"
        self.all_discarded = f"{self.queues}discarded/"
        self.all_tasks = f"/{job}.tasks/"
        """The coordinator's queues; its counts by pass; the trainer that was elected to save the model."""
        self.task_counts, self.task_state = f"{self.all_tasks}counts", f"{self.all_tasks}state"
        self.model_saver = f"{self.all_tasks}model_saver"

        # -- validations: those that are not over; the results, and the newest of them; the decisions
        self.all_validating = f"/{job}/validating/"
        self.all_validated, self.newest_validated = f"/{job}.validated/", f"/{job}/validated"
        self.decided = f"/{job}/decided"

        # -- for displays
        self.status, self.events = f"/{job}.status/", f"/{job}.events/"
        self.places = f"{self.status}places/"
        """Where processes are, or what they wait for, by the launcher that has ordered them."""

    def of_shard(self, index: int) -> Keys:
        return Keys(self.job, index)

    def of_job(self) -> Keys:
        return Keys(self.job)

    def parts(self, generation: int, step: int) -> str:
        return f"{self.all_parts}{generation}-{step}/"

    def pass_metrics(self, pass_index: int) -> str:
        """The means of the loss and the metrics over a pass that is over."""
        return f"/{self.job}.metrics/{pass_index}"

    def pserver(self, index: int) -> str:
        return f"{self.pservers}{index}"

    def index(self, index: int) -> str:
        """Held by the pserver that chose this index by itself, before it registers."""
        return f"{self.index_claims}{index}"

    def started(self, index: int) -> str:
        """Present once shard `index` has served: a process that claims it later is a restart."""
        return f"/{self.job}/started/{index}"

    def trainer(self, trainer: str) -> str:
        return f"{self.trainers}{trainer}"

    def coordinator(self, id: str) -> str:
        return f"{self.coordinators}{id}"

    def registration(self, role: str, index: int, id: str) -> str:
        return {"pserver": self.pserver(index), "trainer": self.trainer(id), "coordinator": self.coordinator(id)}[role]

    def barred(self, trainer: str) -> str:
        return f"{self.all_barred}{trainer}"

    def slot(self, slot: int) -> str:
        return f"{self.slots}{slot}"

    def proof(self, name: str) -> str:
        """The record of the start check of `trainer`, `pserver/<index>`."""
        return f"/{self.job}.proof/{name}"

    def attempts(self, trainer: str) -> str:
        """How many start checks of this trainer's have begun since one has come to its end."""
        return self.proof(f"attempts/{trainer}")

    def queue(self, pass_index: int) -> str:
        return f"{self.queues}{pass_index}/"

    def discarded(self, chunk: int) -> str:
        return f"{self.all_discarded}{chunk:08d}"

    def tasks(self, pass_index: int) -> str:
        """Groups of a pass's tasks, by number."""
        return f"{self.all_tasks}{pass_index}/"

    def validating(self, step: int) -> str:
        return f"{self.all_validating}{step:012d}"

    def ranges(self, step: int) -> str:
        """The ranges of a validation that is not over, and who computes them."""
        return f"/{self.job}.validation/{step:012d}/"

    def validated(self, step: int) -> str:
        return f"{self.all_validated}{step:012d}"

    def status_of(self, role: str, name: str) -> str:
        return f"{self.status}{role}/{name}"

    def loading(self, role: str, name: str) -> str:
        """What a process of a role loads before it registers."""
        return f"{self.status}loading/{role}/{name}"

    def places_of(self, launcher: str) -> str:
        return f"{self.places}{launcher}"
