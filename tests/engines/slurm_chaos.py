"""python -m tests.engines.slurm_chaos: a job on a real Slurm whose nodes are lost by chance, one after the other.

A node that is lost comes back, at once or when Slurm has seen its loss; new trainers join. The node of the batch script
is one of them: then Slurm starts the whole job again. At the end the bits are those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from graphft.transpiler import Job
from tests.engines.slurm_jobs import PATIENCE, SlurmJob
from tests.integration import training
from tests.integration.plays import Pace, assert_same_bits, look, play, whole_state
from tests.support.slurm_cluster import MISSING, SlurmCluster
from tests.support.waiting import until

PASSES_PER_KILL = 2
JOINERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if MISSING:
        raise SystemExit(f"no Slurm is here: {MISSING}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-chaos-"))
    passes = 4 + PASSES_PER_KILL * options.kills
    program = training.program(steps=20 * passes)
    undisturbed = play(
        training.job(program, pace=_pace(folder / "fast", 0.0).file, passes=passes), folder / "reference"
    )
    with SlurmCluster(folder / "slurm", options.nodes) as cluster:
        pace = _pace(folder / "pace", 0.2)
        saved = SlurmJob(cluster, training.job(program, pace=pace.file, passes=passes), folder / "blobs", pace)
        try:
            _run(saved, random.Random(options.seed), options.kills)
        finally:
            saved.leave()
    assert_same_bits(whole_state(Job.load(saved.folder), saved.folder), undisturbed.state)
    print("the same bits as without a fault")


def _pace(file: Path, seconds: float) -> Pace:
    pace = Pace(file)
    pace.set(seconds)
    return pace


def _run(saved: SlurmJob, draw: random.Random, kills: int) -> None:
    cluster = saved.cluster
    number = saved.submit("--nodes", f"1-{len(cluster.nodes)}", "--trainers-per-node", "1")
    joined: list[str] = []
    waits, firsts = list[float](), 0
    reached = _await_step(saved, 0)
    for kill in range(1, kills + 1):
        time.sleep(draw.uniform(0.0, 4.0))
        first = cluster.job_field(number, "BatchHost")
        node = draw.choice(sorted(cluster.running))
        at_once = draw.random() < 0.5
        cluster.kill_node(node)
        begun = time.monotonic()
        firsts += node == first
        if not at_once:
            until(lambda node=node: node in cluster.in_state("down"), PATIENCE)
        cluster.start_node(node)
        joined = [each for each in joined if cluster.job_state(each) in ("PENDING", "RUNNING")]
        if len(joined) < JOINERS and draw.random() < 0.5:
            joined.append(saved.submit("--join"))
        before, reached = reached, _await_step(saved, reached)
        waits.append(time.monotonic() - begun)
        print(
            f"kill {kill}: {node}{' with the batch script' * (node == first)}, back "
            f"{'at once' if at_once else 'when Slurm saw it'}; step {before} -> {reached} after {waits[-1]:.0f} s, "
            f"{len(joined)} joiners, {cluster.job_field(number, 'Restarts')} restarts",
            flush=True,
        )
    state = saved.ends(number)
    print(
        f"{kills} kills, {firsts} of them of the first node: {state}, {cluster.job_field(number, 'Restarts')} restarts"
    )
    print(f"seconds until the job had got further: median {statistics.median(waits):.0f}, worst {max(waits):.0f}")
    assert state == "COMPLETED", saved.said()


def _await_step(saved: SlurmJob, reached: int) -> int:
    """Waits until the job is beyond this step, which it may compute once more before."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        status = look(saved.folder)
        if status is not None and status.step > reached:
            return status.step
        time.sleep(0.1)
    raise AssertionError(f"no step after {reached} for {PATIENCE:.0f} s: {saved.said()}")


if __name__ == "__main__":
    main()
