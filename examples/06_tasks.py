"""A loop of one's own whose tasks a coordinator gives out: each piece of the data is worked on once, whatever dies.

Two workers score handwritten digits with a model, piece by piece. While they work, a worker and the coordinator
that serves are killed. Every piece has one result in the end, and one of the workers, elected, puts them together.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import graphft


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def describe(folder: Path) -> None:
    """The job: its data in chunks, which are the tasks. Its program is for trainers, of which none is started here."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    program = graphft.build(make_model(), loss_fn, inputs={"x": (None, 64), "y": ((None,), torch.int64)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=x, y=y, chunk_size=20)
    graphft.transpile(
        program, data=data, batch_size=5, ft=True, sync=False, dispatch="coordinator", name="scores", lease_ttl=5
    ).save(folder)


def work(folder: Path, etcd: str, seconds: float) -> None:
    """A worker. A result is a file that is there as a whole or not at all: to do a task again does no harm."""
    model, count = make_model().eval(), 0
    with graphft.TaskLoop(folder, etcd) as tasks, torch.no_grad():
        while (found := tasks.get(4)) is not None:
            for task in found:
                scores = torch.cat([model(batch["x"]) for batch in tasks.batches(task)])
                scratch = folder / "scores" / f"{task.chunk}-{task.attempt}.new"
                with scratch.open("wb") as file:
                    np.save(file, scores.numpy())
                scratch.replace(folder / "scores" / f"{task.chunk}.npy")
                time.sleep(seconds)  # what a larger model would take
            lost = tasks.finish(found)
            count += len(found) - len(lost)
            if not found:
                time.sleep(0.1)  # others hold what is left
        if tasks.request_save_model(60):
            chunks = range(len(tasks.job.config.data.chunks))
            parts = [np.load(folder / "scores" / f"{chunk}.npy") for chunk in chunks]
            np.save(folder / "scores.npy", np.concatenate(parts))
            print("this worker puts the scores together")
    print(f"{count} tasks done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, default=Path("jobs/scores"))
    parser.add_argument("--worker", metavar="ETCD", help="be a worker, with the etcd there")
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()
    seconds = 0.02 if options.small else 0.1
    if options.worker:
        work(options.job, options.worker, seconds)
        return
    if options.job.exists():
        print(f"{options.job} is there already: delete it to begin anew")
        return
    describe(options.job)
    (options.job / "scores").mkdir(exist_ok=True)
    with graphft.EmbeddedEtcd(options.job / "etcd") as server:
        (etcd,) = server.endpoints
        where = ["--job", str(options.job), "--etcd", etcd]
        serves = start("-m", "graphft", "start", "coordinator", *where)
        workers = [start(__file__, "--job", str(options.job), "--worker", etcd) for _ in range(2)]
        await_results(options.job, 5)
        stands_by = start("-m", "graphft", "start", "coordinator", *where)
        await_results(options.job, 20)
        workers[0].kill()
        serves.kill()
        print("a worker and the coordinator are killed")
        for process in (*workers[1:], stands_by):
            assert process.wait(120) == 0
    print(f"scores of {len(np.load(options.job / 'scores.npy')):,} records in {options.job / 'scores.npy'}")


def await_results(folder: Path, count: int) -> None:
    while len(list((folder / "scores").glob("*.npy"))) < count:
        time.sleep(0.05)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments])


if __name__ == "__main__":
    main()
