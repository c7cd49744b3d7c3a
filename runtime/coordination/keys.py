"""Names the keys of a job's records in etcd. See docs/design.md, "etcd keys", for their values."""

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
        self.everything = (self.control, f"/{job}.")  # prefixes of all keys: a job's name has no dot

        # -- the run. Writes of its processes hold only while its id stands at `run`
        self.spec, self.run = f"/{job}/spec", f"/{job}/run"
        self.state, self.failure = f"/{job}/state", f"/{job}/failure"
        self.ps_desired = f"/{job}/ps_desired"
        self.pass_, self.wanted_passes = f"/{job}/pass", f"/{job}/wanted_passes"

        # -- checkpoints: the newest committed one, the next one that is asked for, parts that are not committed yet
        self.generation, self.committed = f"/{job}/generation{own}", f"/{job}/checkpoint{own}"
        self.checkpoint_at = f"/{job}/checkpoint_at"
        self.all_parts = f"/{job}.parts{own}/"

        # -- processes. The coordinator that serves holds the lock, and is at `coordinator_addr`
        self.pservers, self.trainers = f"/{job}/ps/", f"/{job}/trainers/"
        self.coordinators = f"/{job}/coordinator/members/"
        self.coordinator_lock, self.coordinator_addr = f"/{job}/coordinator/lock", f"/{job}/coordinator/addr"
        self.slots, self.all_barred = f"/{job}/slots/", f"/{job}/barred/"
        self.index_claims = f"/{job}.index/"
        self.guests = f"/{job}/guests/"  # public keys of processes that are no members

        # -- the queue; the coordinator's, its counts by pass, and the trainer that was elected to save the model
        self.queues = f"/{job}.queue/"
        self.all_discarded = f"{self.queues}discarded/"
        self.all_tasks = f"/{job}.tasks/"
        self.task_counts, self.task_state = f"{self.all_tasks}counts", f"{self.all_tasks}state"
        self.model_saver = f"{self.all_tasks}model_saver"

        # -- validations: those that are not over; the results, and the newest of them; the decisions
        self.all_validating = f"/{job}/validating/"
        self.all_validated, self.newest_validated = f"/{job}.validated/", f"/{job}/validated"
        self.decided = f"/{job}/decided"

        # -- for displays; `places` tells where processes are, or what they wait for, by the launcher that ordered them
        self.status, self.events = f"/{job}.status/", f"/{job}.events/"
        self.places = f"{self.status}places/"

    def of_shard(self, index: int) -> Keys:
        return Keys(self.job, index)

    def of_job(self) -> Keys:
        return Keys(self.job)

    def parts(self, generation: int, step: int) -> str:
        return f"{self.all_parts}{generation}-{step}/"

    def pass_metrics(self, pass_index: int) -> str:
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

    def queue(self, pass_index: int) -> str:
        return f"{self.queues}{pass_index}/"

    def discarded(self, chunk: int) -> str:
        return f"{self.all_discarded}{chunk:08d}"

    def tasks(self, pass_index: int) -> str:
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
        """Told by a process of a role until it registers."""
        return f"{self.status}loading/{role}/{name}"
