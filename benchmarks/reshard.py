"""Measures the cost of going on with other pservers:
`python benchmarks/reshard.py [--millions 100] [--pservers 1 8 3 1]`.

A sync job with so many million parameters and Adam has a checkpoint of the first number of pservers. It is cut anew for
the next one, and so on, as `graphft launch` does it; printed are the seconds of each, beside those that the disk takes
to read and write as many bytes, fsynced. At the end every value must be what it was at the beginning, to the bit.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from stall import disk_seconds
from torch import Tensor, nn

import graphft
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.reshard import carry_over
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.interchange.training_state import JobState, read_job

WIDTH, STEP = 2048, 1


def build(millions: float) -> graphft.Program:
    torch.manual_seed(0)
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    program = graphft.build(model, lambda m, x: m(x).square().mean(), {"x": (None, WIDTH)})
    graphft.minimize(program, graphft.Adam(lr=1e-4))
    return program


def make_job(program: graphft.Program, pservers: int) -> graphft.Job:
    data = graphft.arrays(x=torch.zeros(8, WIDTH))
    return graphft.transpile(program, data=data, batch_size=4, trainers=1, pservers=pservers, ft=True, name="reshard")


def save_first(job: graphft.Job, folder: Path) -> None:
    """A checkpoint whose values are all different: what a job would have after its first step."""
    job.save(folder)
    store, generator, parts = checkpoints_of(folder), torch.Generator().manual_seed(1), []
    for shard in range(job.config.pservers):
        values = job.pserver_program(shard).values
        state = {
            n: torch.rand(v.shape, generator=generator) if v.dim() and v.is_floating_point() else v
            for n, v in values.items()
        }
        parts.append(store.write_part(0, STEP, shard, job.config.pservers, state))
    store.write_manifest(Manifest(0, STEP, job.run_id, tuple(parts)))


def same(one: JobState, other: JobState) -> bool:
    def tensors(state: JobState) -> dict[str, Tensor]:
        return {**state.model, **{f"{n} {k}": t for n, each in state.optimizer.items() for k, t in each.items()}}

    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=100.0, help="of parameters")
    parser.add_argument("--pservers", type=int, nargs="+", default=[1, 8, 3, 1])
    options = parser.parse_args()
    program = build(options.millions)
    with tempfile.TemporaryDirectory(prefix="graphft-reshard-") as scratch:
        root = Path(scratch)
        folders = [root / f"{i}-of-{n}" for i, n in enumerate(options.pservers)]
        save_first(make_job(program, options.pservers[0]), folders[0])
        count = sum(f.stat().st_size for f in folders[0].rglob("*.safetensors") if "step-" in f.parent.name)
        print(f"{count / 1e9:.2f} GB of parameters and optimizer state", flush=True)
        for (before, after), (source, target) in zip(pairwise(options.pservers), pairwise(folders), strict=True):
            job = make_job(program, after)
            job.save(target)
            os.sync()
            disk = disk_seconds(count, root)
            start = time.perf_counter()
            assert carry_over(source, job, target) == STEP
            seconds = time.perf_counter() - start
            print(f"{before} -> {after} pservers: {seconds:.2f} s, {seconds / disk:.2f} of a plain write", flush=True)
        equal = same(read_job(folders[0]), read_job(folders[-1]))
        print(f"every value as at the beginning, to the bit: {'yes' if equal else 'NO'}")
        raise SystemExit(0 if equal else 1)


if __name__ == "__main__":
    main()
