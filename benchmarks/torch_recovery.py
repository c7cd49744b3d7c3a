"""torchrun and torchft after a SIGKILL, on the model, the batches and the checkpoint interval of `recovery.py`:

    python benchmarks/torch_recovery.py [--system torchrun] [--system torchft] [--rounds 5]

Two workers train the flights with DDP over gloo; one of them is killed, again and again.

- torchrun: `--nproc-per-node 2 --max-restarts 100 --monitor-interval 0.1`. Rank 0 saves a checkpoint every 50 steps;
  the agent starts both workers again, and they load it.
- torchft (needs `pip install torchft`): two replica groups of one worker, a lighthouse with its documented options. The
  survivor goes on alone; the group that died is started again, and takes the state from it.

"next step" is the time until a worker has completed a step after the death, "new step" until one that was not complete
before (torchrun repeats those since the checkpoint), and "all back" until both workers have completed a step together.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from flights_model import CARDINALITIES, Flights
from torch import Tensor, nn

HERE = Path(__file__).resolve()
WORKERS, BATCH, EVERY, RECORDS = 2, 256, 50, 262_144
LIMIT, SETTLE, POLL = 120.0, 6.0, 0.002
ENOUGH = 120
"""Steps before the first kill: two checkpoints are behind."""


# -- a worker ---------------------------------------------------------------------------------------------------------


def batches(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * WORKERS + rank)
    codes = torch.stack([torch.randint(c, (BATCH,), generator=generator) for c in CARDINALITIES], 1)
    return codes, torch.randn(BATCH, generator=generator), torch.randint(2, (BATCH,), generator=generator)


def train(net: nn.Module, optimizer: Any, rank: int, step: Callable[[], int], done: Callable[[], None]) -> None:
    while True:
        codes, distance, y = batches(rank, step())
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(codes, distance), y).backward()
        optimizer.step()
        done()


class Progress:
    """A line per completed step: time, step, and how many workers took part."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        self.file = (folder / f"steps{rank}").open("a")

    def note(self, step: int, workers: int) -> None:
        self.file.write(f"{time.time()} {step} {workers}\n")
        self.file.flush()


def torchrun_worker(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank, at = torch.distributed.get_rank(), 0
    net = Flights()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        at = state["step"]
    progress = Progress(folder, rank)

    def done() -> None:
        nonlocal at
        at += 1
        progress.note(at, WORKERS)
        if rank == 0 and at % EVERY == 0:
            made = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": at}
            torch.save(made, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)

    train(nn.parallel.DistributedDataParallel(net), optimizer, rank, lambda: at, done)


def torchft_worker(folder: Path) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["REPLICA"])
    net = Flights()
    inner = torch.optim.Adam(net.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"flights_{rank}",
    )
    progress = Progress(folder, rank)
    train(
        DistributedDataParallel(manager, net),
        Optimizer(manager, inner),
        rank,
        manager.current_step,
        lambda: progress.note(manager.current_step(), manager.num_participants()),
    )


# -- the command ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def agent(system: str, folder: Path, workers: int, **environment: str) -> subprocess.Popen[bytes]:
    """Starts torchrun, which starts its workers again when one dies."""
    options = ["--nnodes=1", f"--nproc-per-node={workers}", "--max-restarts=100", "--monitor-interval=0.1"]
    address = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *address, str(HERE), "--worker", system]
    log = (folder / f"log{environment.get('REPLICA', '')}").open("wb")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "FOLDER": str(folder),
        **environment,
    }
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


@contextmanager
def running(system: str, folder: Path) -> Iterator[None]:
    if system == "torchrun":
        started = [agent(system, folder, WORKERS)]
    else:
        port = free_port()
        options = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", f"--bind=127.0.0.1:{port}"]
        lighthouse = Path(sys.executable).with_name("torchft_lighthouse")
        started = [subprocess.Popen([str(lighthouse), *options], stderr=subprocess.DEVNULL, start_new_session=True)]
        url = f"http://127.0.0.1:{port}"
        started += [agent(system, folder, 1, REPLICA=str(r), TORCHFT_LIGHTHOUSE=url) for r in range(WORKERS)]
    try:
        yield
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for rank in range(WORKERS):  # torchrun starts each worker in a session of its own
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)


def steps_of(folder: Path) -> list[tuple[float, int, int]]:
    """Returns when each step was completed, its number, and how many workers took part; of all workers."""
    found = []
    for path in folder.glob("steps*"):
        lines = path.read_text().splitlines(keepends=True)
        found += [(float(a), int(b), int(c)) for a, b, c in (line.split() for line in lines if line.endswith("\n"))]
    return sorted(found)


def wait_for(folder: Path, after: float, above: int = 0, workers: int = 1) -> float:
    """Returns when a step above this one was completed first, after this time, by so many workers."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        for at, step, together in steps_of(folder):
            if at > after and step > above and together >= workers:
                return at
        time.sleep(POLL)
    raise TimeoutError(f"no such step within {LIMIT:.0f} s; see {folder}")


def measure(system: str, rounds: int, folder: Path) -> list[tuple[float, ...]]:
    times = []
    with running(system, folder):
        wait_for(folder, 0.0, ENOUGH, WORKERS)
        for n in range(rounds):
            time.sleep(SETTLE)
            killed = time.time()
            os.kill(int((folder / f"pid{n % WORKERS}").read_text()), signal.SIGKILL)
            after = killed + 0.05  # a step in which both took part may just end
            time.sleep(0.05)
            highest = max(step for at, step, _ in steps_of(folder) if at < after)
            found = [wait_for(folder, after, *more) for more in ((), (highest,), (highest, WORKERS))]
            times.append(tuple(at - killed for at in found))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="kills (default 5)")
    parser.add_argument("--system", choices=("torchrun", "torchft"), action="append", help="only this one")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        {"torchrun": torchrun_worker, "torchft": torchft_worker}[options.worker](Path(os.environ["FOLDER"]))
        return
    print(f"{'system':10} {'n':>3} {'next step':>10} {'new step':>10} {'all back':>10}   medians")
    for system in options.system or ("torchrun", "torchft"):
        with tempfile.TemporaryDirectory() as folder:
            times = measure(system, options.rounds, Path(folder))
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        print(f"{system:10} {len(times):>3} " + " ".join(f"{m:>8.2f} s" for m in medians), times, flush=True)


if __name__ == "__main__":
    main()
