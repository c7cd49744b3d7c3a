"""The batch scripts that `graphft slurm` prints: one that runs a job, and one that adds trainers to it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LOG = "slurm-%j.log"

_RUN = """
python={python}
{what}

# This script ends when {ends} (status 0), has failed, or was drained: scancel --signal=TERM --batch JOBID.
# Before its time is over (USR1, see above) it drains, and is put into the queue again; then it goes on from the job's
# newest checkpoint.
trap 'again=yes; kill -TERM "$launcher"' USR1
trap 'again=; kill -TERM "$launcher"' TERM
{launch} &
launcher=$!
while wait "$launcher"; status=$?; kill -0 "$launcher" 2>/dev/null; do :; done  # a trap ends wait, not the launcher
wait "$launcher"; status=$?
if [ -n "$again" ] && [ "$status" -ne 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""

_LAUNCH = """"$python" -m graphft launch --job "$job" --engine slurm{more} \\
  --trainers "$(({trainers_per_node} * SLURM_JOB_NUM_NODES))\""""

_JOIN = """
# Trainers for a job that runs. Each leaves when it has ended its step, on SIGTERM, and when the job is complete. One
# that dies is started again; after ten times in a row, or when the job is not found for some minutes, it is given up.
export python={python} job={job} etcd={etcd}

trainer() {{
  trap : TERM
  for ((tries = 0; tries < 10; tries++)); do
    begun=$SECONDS
    "$python" -m graphft start trainer --job "$job" ${{etcd:+--etcd "$etcd"}}
    status=$?
    case $status in 0 | 2) return "$status" ;; esac
    if [ $((SECONDS - begun)) -gt 600 ]; then tries=0; fi
    sleep 5
  done
  return "$status"
}}
export -f trainer
export PYTHONHASHSEED=0
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c trainer
"""


@dataclass(frozen=True)
class SlurmScript:
    """`job`: the folder as every node has it, or the URL of its storage; or `program`: a Python script that runs a job,
    or trains with a Trainer, in `folder`, and its arguments. `title`: the job's name. `output`: as sbatch
    reads it, with replacement symbols (`file_name`). `sbatch`: options, as they are given to sbatch. Counts of CPUs and
    GPUs are each trainer's; `pservers` None: as the job says."""

    job: str
    title: str
    nodes: str = "1"
    trainers_per_node: int = 1
    pservers: int | None = None
    cpus: int = 1
    gpus: int = 0
    time: str = ""
    partition: str = ""
    signal_seconds: int = 120
    etcd: str = ""
    join: bool = False
    output: str = LOG
    sbatch: Sequence[str] = ()
    written_by: str = "graphft slurm"
    program: Sequence[str] = ()
    folder: str = ""

    def text(self) -> str:
        options = [*map(quoted, self._options()), *self.sbatch]
        head = "\n".join(["#!/bin/bash", f"# {one_line(self.written_by)}", *map("#SBATCH {}".format, options)])
        return head + "\n" + (self._join() if self.join else self._run())

    def _options(self) -> Iterator[str]:
        yield f"--job-name={self.title}{'-join' if self.join else ''}"
        yield f"--nodes={self.nodes}"
        yield f"--ntasks-per-node={self.trainers_per_node}"
        yield f"--cpus-per-task={self.cpus}"
        if self.gpus:
            yield f"--gpus-per-node={self.gpus * self.trainers_per_node}"
        if self.time:
            yield f"--time={self.time}"
        if self.partition:
            yield f"--partition={self.partition}"
        yield f"--output={self.output}"
        yield "--open-mode=append"
        yield "--requeue"  # after a preemption, and the loss of the first node
        yield "--no-kill"  # another node may be lost
        yield f"--signal={'TERM' if self.join else 'B:USR1'}@{self.signal_seconds}"

    def _run(self) -> str:
        quote = shlex.quote
        arguments = "".join(f" {quote(word)}" for word in self.program[1:])
        if self.program:
            what = f"script={quote(self.program[0])}\ncd {quote(self.folder)}"
            return _RUN.format(
                python=quote(sys.executable),
                what=what,
                ends="the Python script does",
                launch='GRAPHFT_ENGINE=slurm "$python" "$script"' + arguments,
            )
        more = ("" if self.pservers is None else f" --pservers {self.pservers}") + (
            f" --etcd {quote(self.etcd)}" if self.etcd else ""
        )
        return _RUN.format(
            python=quote(sys.executable),
            what=f"job={quote(self.job)}",
            ends="the job is complete",
            launch=_LAUNCH.format(more=more, trainers_per_node=self.trainers_per_node),
        )

    def _join(self) -> str:
        return _JOIN.format(python=shlex.quote(sys.executable), job=shlex.quote(self.job), etcd=shlex.quote(self.etcd))


def file_name(path: str) -> str:
    """A path as sbatch's file names have it: `%` begins a replacement symbol there."""
    return path.replace("%", "%%")


def quoted(option: str) -> str:
    """One option as a line of #SBATCH has it: blanks end it, and `#` begins a comment. A backslash escapes, within
    single quotes, too."""
    if re.fullmatch(r"[^\s\"'\\#]+", option):
        return option
    return '"' + re.sub(r"""(["'\\#])""", r"\\\1", option) + '"'


def one_line(text: str) -> str:
    """With escapes for what is not printable: the end of a line would end a comment."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
