"""graphft and Ray Train on one Ray cluster, of which nodes are killed and added:

    python benchmarks/ray_recovery.py [--system graphft] [--system train] [--rounds 3]
    python benchmarks/ray_recovery.py --chaos 50 [--seed 1]

Needs Ray, and `ray[train]` for the comparison. Five phases, the same for both; a node has 2 CPUs, the head none:

| phase | what is done | seconds until |
| --- | --- | --- |
| start | the script is started; there is one node, and it wants three workers | the first step is complete |
| up | two nodes are added | a new step, after one with three workers |
| one | the oldest is killed (graphft: with a shard), one is added | a step that was not complete before |
| all | all nodes are killed, one is added | the same |
| again | two nodes are added | a new step, after one with three workers |

`end`: then nothing happens until the script has ended. `repeated`: steps that are computed again. Model, records, batch
per worker, steps, and the interval of checkpoints are the same. graphft: a script with a `graphft.Trainer`, which calls
`train(max_retries=3, checkpoint="auto")` for each epoch. Ray Train: elastic, `ScalingConfig(num_workers=(1, 3),
elastic_resize_monitor_interval_s=5)`, and `FailureConfig(max_failures=-1)`. graphft's final state is compared with that
of an undisturbed run, bit by bit.

`--chaos N`: N nodes are killed at random moments, sometimes several at once, also while the job recovers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import ray_workload as workload  # noqa: E402
from torch import Tensor  # noqa: E402

from graphft.errors import GraphftError  # noqa: E402
from graphft.runtime.coordination.connect import read_note  # noqa: E402
from graphft.runtime.coordination.keys import Keys  # noqa: E402
from graphft.runtime.coordination.status import read_status  # noqa: E402
from graphft.runtime.etcd import Etcd  # noqa: E402
from graphft.runtime.loop.check_points import read_check_point  # noqa: E402
from tests.engines.ray_nodes import Nodes, nodes_of_ray  # noqa: E402

LIMIT = 300.0
"""Seconds without a step after which a job counts as hanging."""
EPOCHS, PACE, POLL = 8, 0.1, 0.05
RESOURCES = {"trainer": {"CPU": 1}, "pserver": {"CPU": 0.5}}
"""On one node: both shards and one trainer."""


# -- the drivers: processes of their own ------------------------------------------------------------------------------


def drive_graphft(folder: Path, epochs: int) -> None:
    train(folder, epochs, engine="ray", resources=RESOURCES, storage=f"file://{folder}/storage/job")


def train(folder: Path, epochs: int, **where: Any) -> None:
    """Epoch by epoch, as a user's script does it."""
    with workload.trainer(folder / "pace", epochs, job_dir=str(folder / "job"), **where) as trainer:
        while trainer.epoch < epochs:
            print(trainer.train(max_retries=3, checkpoint="auto"), flush=True)
        trainer.save(folder / "final")


def drive_train(folder: Path, epochs: int) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    steps = epochs * workload.STEPS_PER_EPOCH
    config = {"pace": str(folder / "pace"), "steps": steps, "progress": str(folder / "progress")}
    scaling = ScalingConfig(
        num_workers=(1, workload.WORKERS), resources_per_worker={"CPU": 2}, elastic_resize_monitor_interval_s=5
    )
    run = RunConfig(
        storage_path=str(folder / "storage"),
        name="points",
        failure_config=FailureConfig(max_failures=-1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    TorchTrainer(workload.train_loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()


DRIVERS: dict[str, Callable[[Path, int], None]] = {"graphft": drive_graphft, "train": drive_train}


# -- what is seen of a job --------------------------------------------------------------------------------------------


class Running:
    """A job, and the step that it has reached."""

    def __init__(self, system: str, folder: Path, nodes: Nodes, epochs: int) -> None:
        folder.mkdir(parents=True)
        self.system, self.folder = system, folder
        self.set_pace(PACE)
        self.highest = self.last = self.repeated = 0
        """The step that was complete before all faults so far; the newest; those that were computed again."""
        command = [sys.executable, __file__, "--drive", system, str(folder), str(epochs)]
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}", "RAY_ADDRESS": nodes.address}
        with (folder / "output").open("wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=out)

    def set_pace(self, seconds: float) -> None:
        scratch = self.folder / "pace.new"
        scratch.write_text(str(seconds))
        scratch.replace(self.folder / "pace")

    def look(self) -> tuple[int, int]:
        """(step, workers); what was seen last, while nothing is to be seen."""
        step, workers = self._graphft() if self.system == "graphft" else self._train()
        if step < self.last:
            self.repeated += self.last - step
        self.last = step
        return step, workers

    def _graphft(self) -> tuple[int, int]:
        endpoints = read_note(self.folder / "job").endpoints
        try:
            with Etcd(endpoints.split(",") if endpoints else ["127.0.0.1:1"], deadline=0.5) as etcd:
                status = read_status(etcd, Keys("points"), deadline=0.5, brief=True)
        except GraphftError:
            return self.last, 0
        return (status.step or self.last), len(set(status.slots.values()))

    def _train(self) -> tuple[int, int]:
        file = self.folder / "progress"
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines or len(lines[-1].split()) < 2:
            return self.last, 0
        step, workers = map(int, lines[-1].split())
        return step, workers

    def until(self, what: Callable[[int, int], bool]) -> float:
        """Seconds until `what(step, workers)`. Raises if nothing of it is seen for LIMIT seconds."""
        began = time.monotonic()
        while not what(*self.look()):
            if self.process.poll() is not None:
                raise RuntimeError(f"it has ended with {self.process.poll()}: see {self.folder / 'output'}")
            if time.monotonic() - began > LIMIT:
                raise TimeoutError(f"it hangs at step {self.last}: see {self.folder}")
            time.sleep(POLL)
        return time.monotonic() - began

    def beyond(self) -> Callable[[int, int], bool]:
        """A step that was not complete so far. What graphft's status says is up to a second old."""
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            self.highest = max(self.highest, self.look()[0])
            time.sleep(POLL)
        return lambda step, workers, before=self.highest: step > before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def five_phases(system: str, folder: Path, nodes: Nodes) -> dict[str, float]:
    nodes.set(1)
    running = Running(system, folder, nodes, EPOCHS)
    seconds: dict[str, float] = {}
    try:
        seconds["start"] = running.until(lambda step, workers: step >= 1)
        running.until(further(running))
        seconds["up"] = scaled_up(running, nodes)
        for phase, lost, left in (("one", 1, 3), ("all", 3, 1)):
            running.until(further(running))
            killed = time.monotonic()
            for node in list(nodes.workers[:lost]):
                nodes.kill(node)
            new = running.beyond()
            nodes.set(left)
            running.until(new)
            seconds[phase] = time.monotonic() - killed
        running.until(further(running))
        seconds["again"] = scaled_up(running, nodes)
        running.until(further(running))
        ends = time.monotonic()
        running.set_pace(0.0)
        assert running.process.wait(LIMIT) == 0, (folder / "output").read_text()
        seconds["end"] = time.monotonic() - ends
        seconds["repeated"] = running.repeated
    finally:
        running.close()
    return seconds


def further(running: Running, steps: int = 15) -> Callable[[int, int], bool]:
    return lambda step, workers, at=running.last + steps: step >= at


def scaled_up(running: Running, nodes: Nodes) -> float:
    """Seconds until all workers work, on three nodes."""
    began = time.monotonic()
    nodes.set(workload.WORKERS)
    running.until(lambda step, workers: workers == workload.WORKERS)
    running.until(running.beyond())
    return time.monotonic() - began


def chaos(folder: Path, nodes: Nodes, kills: int, seed: int, epochs: int) -> None:
    """One job, all faults."""
    draw = random.Random(seed)
    nodes.set(3)
    running = Running("graphft", folder, nodes, epochs)
    done, recovered = 0, []
    try:
        running.until(lambda step, workers: step >= 5)
        while done < kills:
            running.set_pace(PACE if running.last < 0.8 * epochs * workload.STEPS_PER_EPOCH else 2.0)
            began = time.monotonic()
            count = min(draw.choice((1, 1, 1, 2, 3)), len(nodes.workers), kills - done)
            for node in draw.sample(nodes.workers, count):
                nodes.kill(node)
            done += count
            new = running.beyond()
            time.sleep(draw.uniform(0, 5))
            nodes.set(3)
            if draw.random() < 0.2:  # the next comes while it recovers
                time.sleep(draw.uniform(0, 3))
                continue
            running.until(new)
            recovered.append(time.monotonic() - began)
            print(f"{done} of {kills} nodes killed, step {running.last}, {recovered[-1]:.1f} s", flush=True)
            time.sleep(draw.uniform(0, 3))
        running.set_pace(0.0)
        assert running.process.wait(10 * LIMIT) == 0, (folder / "output").read_text()
    finally:
        running.close()
    print(f"{done} nodes killed; until a new step {statistics.median(recovered):.1f} s (worst {max(recovered):.1f})")


def undisturbed(folder: Path, epochs: int) -> dict[str, Tensor]:
    folder.mkdir(parents=True)
    (folder / "pace").write_text("0")
    train(folder, epochs)
    return saved(folder)


def saved(folder: Path) -> dict[str, Tensor]:
    """Parameters and optimizer state of what the script has saved."""
    found = read_check_point(folder / "final")
    assert found is not None, f"{folder} has no final checkpoint"
    state = dict(found.states["model"])
    for name, states in found.states["optimizer"]["state"].items():
        state |= {f"{name}@{key}": value for key, value in states.items()}
    return state


def check(folder: Path, expected: dict[str, Tensor]) -> None:
    state = saved(folder)
    assert state.keys() == expected.keys()
    different = [name for name in expected if not expected[name].equal(state[name])]
    assert not different, f"not the bits of the undisturbed run: {different}"
    print(f"{len(state)} tensors: the bits of an undisturbed run", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--system", action="append", choices=tuple(DRIVERS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--chaos", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave what the jobs wrote there")
    options = parser.parse_args()
    if options.drive:
        system, folder, epochs = options.drive
        DRIVERS[system](Path(folder), int(epochs))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch, nodes_of_ray(Path(scratch), head_cpus=0) as nodes:
        base = options.keep or Path(scratch)
        epochs = max(EPOCHS, options.chaos)
        expected = undisturbed(base / "undisturbed", epochs)
        if options.chaos:
            chaos(base / "chaos", nodes, options.chaos, options.seed, epochs)
            check(base / "chaos", expected)
            return
        for number in range(options.rounds):
            for system in options.system or DRIVERS:
                folder = base / f"{system}-{number}"
                seconds = five_phases(system, folder, nodes) | {"load": os.getloadavg()[1]}
                found.setdefault(system, []).append(seconds)
                print(system, {name: round(value, 1) for name, value in seconds.items()}, flush=True)
                if system == "graphft":
                    check(folder, expected)
                if options.json:
                    options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
