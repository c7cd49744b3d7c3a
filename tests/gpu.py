"""Everything of graphft that needs a GPU, in one table: `make gpu`, or `python -m tests.gpu [--json FILE] [ROW ...]`.

Without a GPU each row says so, and what of it a CPU can do is done, small: so that the script itself is tested
everywhere. It ends with 1 if a row fails. No network is needed; on one GPU and 16 cores it takes some minutes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import graphft
from graphft.runtime.data import open_reader
from graphft.runtime.execute import accelerator
from graphft.runtime.transport.buffers import BucketBuffers, CopyStream, DeviceBucket, unpack
from graphft.transpiler.job import Job
from tests.support.zoo import CASES, HUGGING_FACE, Case

GPU = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator().type if GPU else "cpu"
LARGE = DEVICE == "cuda"
MB = 1 << 20
BLOCK, VOCABULARY = (256, 50304) if LARGE else (32, 256)


def bfloat16() -> Case:
    """The MLP under autocast."""
    case = CASES["mlp"]()

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    return Case(case.model, loss_fn, case.inputs, case.batch)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; where torch's kernel is of no use (devices made for tests), by its definition."""
    if DEVICE in ("cpu", "cuda"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], device=q.device).triu(1)
    return (scores - 1e9 * later).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = attend(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """24 layers of width 1024 have 354 million parameters."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight
        return self.head(self.norm(self.layers(x)))


def next_token(model: nn.Module, ids: Tensor, following: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
        logits = model(ids)
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def language_job(model: nn.Module, steps: int, batch: int = 4, **options: Any) -> Job:
    """Two trainers, two pservers, ft=True."""
    ids = {"ids": ((None, BLOCK), torch.int64), "following": ((None, BLOCK), torch.int64)}
    program = graphft.build(model.to(DEVICE), next_token, ids, name="gpt")
    graphft.minimize(program, graphft.AdamW(lr=1e-4))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (2 * batch * steps, BLOCK + 1), generator=generator)
    data = graphft.arrays(chunk_size=2 * batch, ids=text[:, :-1].contiguous(), following=text[:, 1:].contiguous())
    shape: dict[str, Any] = {"trainers": 2, "pservers": 2, "ft": True, "data": data, "batch_size": batch}
    return graphft.transpile(program, **shape, **options)


@dataclass
class Watch:
    """Looks at a job while it runs: kills what `kills` says at a share of its steps; notes times and memory."""

    kills: Sequence[tuple[float, str, int]] = ()
    seen: list[tuple[float, int]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    dead: dict[str, tuple[float, int]] = field(default_factory=dict)
    recovered: dict[str, float] = field(default_factory=dict)

    def __call__(self, supervisor: Any, status: Any) -> None:
        now, step = time.monotonic(), status.step
        self.seen.append((now, step))
        for share, role, index in self.kills:
            name = f"{role} {index}"
            due = name not in self.dead and step >= share * status.spec["total_steps"]
            if due and supervisor.signal(role, index, signal.SIGKILL):
                self.dead[name] = now, step
        for name, (at, before) in self.dead.items():
            if step > before + 1:
                self.recovered.setdefault(name, now - at)
        for process in psutil.Process().children(recursive=True):
            try:
                name, used = process.name(), process.memory_info().rss
            except psutil.Error:
                continue
            if name.startswith(("trainer", "pserver")):
                self.memory[name] = max(used, self.memory.get(name, 0))

    @property
    def ms_per_step(self) -> float:
        """Over the second half of what was seen."""
        half = self.seen[len(self.seen) // 2 :]
        steps = half[-1][1] - half[0][1] if half else 0
        return 1e3 * (half[-1][0] - half[0][0]) / steps if steps else float("nan")


def train(job: Job, watch: Watch, folder: Path) -> dict[str, Tensor]:
    return load_file(job.run(job_dir=str(folder), quiet=True, on_status=watch).model)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def seconds(work: Callable[[], object], times: int = 5) -> float:
    """Median of what the device needs for it."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if GPU:
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


# -- rows: each returns what it found, or raises ----------------------------------------------------------------------


def bits(folder: Path) -> str:
    """Three steps of ten models, beside eager torch on the same device. Recurrent nets have kernels of their own there,
    which programs have not: they agree within rounding."""
    cases = {**CASES, **HUGGING_FACE, "bfloat16": bfloat16}
    other = [name for name, make in cases.items() if not has_the_bits(name, make)]
    return f"of {len(cases)} models, {len(cases) - len(other)} have the bits of eager torch; within rounding: {other}"


def has_the_bits(name: str, make: Callable[[], Case]) -> bool:
    """Raises AssertionError for losses or weights that differ by more than rounding."""
    torch.manual_seed(0)
    case = make()
    eager, batches = copy.deepcopy(case.model).to(DEVICE), [case.batch(8) for _ in range(3)]
    program = graphft.build(case.model.to(DEVICE), case.loss_fn, case.inputs)
    graphft.minimize(program, graphft.SGD(lr=0.1))
    executor, optimizer = graphft.Executor(DEVICE, check=False), torch.optim.SGD(eager.parameters(), 0.1)
    pairs = []
    for number, batch in enumerate(batches):
        there = {column: values.to(DEVICE) for column, values in batch.items()}
        torch.manual_seed(number)
        found = executor.run(program, there, "loss")["loss"]
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = case.loss_fn(eager, **there)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        pairs.append((f"the loss of step {number}", found, loss.detach()))
    final = graphft.state_dict(program, executor.state(program))
    pairs += [(n, final[n], value) for n, value in eager.state_dict().items()]
    for what, ours, theirs in pairs:
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), msg=lambda text, what=what: f"{name}: {what}: {text}")
    return all(torch.equal(ours.cpu(), theirs.cpu()) for _, ours, theirs in pairs)


def copies(folder: Path) -> str:
    """Buckets go to the device and back whole; how fast, and which share of it is hidden behind matrix products."""
    numel, count = 4 * MB if LARGE else MB // 4, 16
    there = torch.device(DEVICE)
    stream = CopyStream(there) if GPU else None
    gradients = [torch.randn(numel // 4, device=there) for _ in range(4)]
    slices = [(0, numel // 4)] * 4
    out = BucketBuffers(gradients, slices, stream=stream)

    def leave() -> memoryview:
        frame = out.pack(gradients)
        if out.copied is not None:
            out.copied.synchronize()
        return frame

    back = [torch.zeros_like(one) for one in gradients]
    if stream is not None:
        DeviceBucket(stream, numel, torch.float32).unpack(leave(), back, slices)
        torch.accelerator.synchronize()
    else:
        unpack(leave(), back, slices)
    assert all(map(torch.equal, back, gradients)), "a bucket came back as another one"
    square = torch.randn(*[4096 if LARGE else 256] * 2, device=there)

    def compute() -> None:
        for _ in range(count):
            torch.mm(square, square)

    def both() -> None:
        for _ in range(count):
            torch.mm(square, square)
            out.pack(gradients)

    alone = seconds(lambda: [out.pack(gradients) for _ in range(count)])
    computing, together = seconds(compute), seconds(both)
    hidden = max(0.0, min(1.0, (alone + computing - together) / min(alone, computing)))
    return f"{count * numel * 4 / alone / 1e9:.1f} GB/s; {hidden:.0%} of the shorter one is hidden"


def step(folder: Path) -> str:
    """A step of two trainers and two pservers, beside eager torch and beside DDP of one rank."""
    layers, width, steps = (8, 512, 60) if LARGE else (1, 32, 20)
    torch.manual_seed(0)
    model = GPT(layers, width, 4)
    watch = Watch()
    train(language_job(copy.deepcopy(model), steps), watch, folder / "job")
    eager = model.to(DEVICE)
    ids = torch.randint(VOCABULARY, (2, 4, BLOCK), device=DEVICE)

    optimizer = torch.optim.AdamW(eager.parameters(), 1e-4)

    def one(module: nn.Module) -> None:
        for batch in ids:  # as many samples as both trainers have
            next_token(module, batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain = seconds(lambda: one(eager))
    with process_group(folder):
        ddp = seconds(functools.partial(one, nn.parallel.DistributedDataParallel(eager)))
    exchanged = 2 * 2 * 4 * sum(p.numel() for p in eager.parameters()) / watch.ms_per_step / 1e6  # there and back
    others = f"eager {1e3 * plain:.1f} ms, DDP {1e3 * ddp:.1f} ms for as many samples"
    return f"{watch.ms_per_step:.1f} ms a step, {exchanged:.3f} GB/s exchanged; {others}"


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    backend = "nccl" if LARGE and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kills(folder: Path) -> str:
    """A trainer and a pserver are killed: the same bits, and how long until the next step."""
    layers, width, steps = (4, 256, 400) if LARGE else (1, 32, 150)
    torch.manual_seed(0)
    model = GPT(layers, width, 4)
    quiet = train(language_job(copy.deepcopy(model), steps), Watch(), folder / "quiet")
    watch = Watch([(0.3, "trainer", 1), (0.6, "pserver", 0)])
    killed = train(language_job(copy.deepcopy(model), steps), watch, folder / "killed")
    assert len(watch.dead) == 2, f"killed only {list(watch.dead)}"
    assert same(quiet, killed), "other bits than without a kill"
    times = ", ".join(f"{name} {at:.1f} s" for name, at in watch.recovered.items())
    return f"the same bits after kills; next step seen (looked at twice a second) after: {times}"


def half(folder: Path) -> str:
    """float16 with a gradient scaler that overflows at first, beside torch's: the same scales, steps left out alike."""
    case, steps, options = CASES["mlp"](), 24, {"init_scale": 2.0**30, "growth_interval": 4}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.float16):
            return F.mse_loss(model(x).float(), y)

    eager, columns = copy.deepcopy(case.model).to(DEVICE), case.batch(8 * steps)
    program = graphft.build(case.model.to(DEVICE), loss_fn, case.inputs)
    graphft.minimize(program, graphft.SGD(lr=0.1), grad_scaler=graphft.GradScaler(**options))
    data = graphft.arrays(chunk_size=8 * steps, **columns)
    shape: dict[str, Any] = {"trainers": 1, "pservers": 2, "ft": True, "data": data, "batch_size": 8}
    job = graphft.transpile(program, on_nonfinite="skip", **shape)
    result = job.run(job_dir=folder / "job", quiet=True)
    scaler, optimizer, scales = torch.amp.GradScaler(DEVICE, **options), torch.optim.SGD(eager.parameters(), 0.1), []
    reader = open_reader(job.config.data, ".", job.config.seed)
    for batch in (reader.batch(0, 0, number, 8) for number in range(steps)):
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(loss_fn(eager, **{name: values.to(DEVICE) for name, values in batch.items()})).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [scale for _, scale in result.metrics["loss_scale"]] == scales, f"{result.metrics['loss_scale']}, {scales}"
    left_out = sum(after < before for before, after in zip(scales, [*scales[1:], scaler.get_scale()], strict=True))
    assert result.skipped_steps == left_out
    weights = load_file(result.model)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(weights[name], value.cpu())
    return f"the scales of torch.amp.GradScaler, {left_out} of {steps} steps left out, the same weights"


def large(folder: Path) -> str:
    """Twenty steps of a GPT of 354 million parameters: memory of each role."""
    layers, width = (24, 1024) if LARGE else (2, 32)
    torch.manual_seed(0)
    watch = Watch()
    train(language_job(GPT(layers, width, 16 if LARGE else 2), 20, 2), watch, folder / "job")
    memory = ", ".join(f"{name} {used / (1 << 30):.1f} GiB" for name, used in sorted(watch.memory.items()))
    return f"{watch.ms_per_step:.0f} ms a step; on the host {memory}{on_the_device()}"


def on_the_device() -> str:
    free, total = torch.cuda.mem_get_info() if LARGE else (0, 0)
    return f"; {(total - free) / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB of the GPU are taken" if LARGE else ""


def pservers(folder: Path) -> str:
    """Pservers on the device, too: the same bits whatever is killed."""
    torch.manual_seed(0)
    model = GPT(1, 32, 2)
    found = [
        train(language_job(copy.deepcopy(model), 100, pserver_device=DEVICE), Watch(kills), folder / str(n))
        for n, kills in enumerate([(), [(0.5, "pserver", 1)]])
    ]
    assert same(*found), "other bits than without a kill"
    return f"the same bits with pserver_device={DEVICE!r}"


ROWS: dict[str, Callable[[Path], str]] = {f.__name__: f for f in (bits, half, copies, step, kills, pservers, large)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    if GPU:
        accelerator.prepare(argparse.Namespace(exact=True, tf32=False))  # eager torch, too, by the same rules
    where = accelerator.describe_device(DEVICE) or "no GPU: on the CPU, small"
    print(f"torch {torch.__version__}, {where}", flush=True)
    table, failed = [], 0
    for name in options.rows or ROWS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = ROWS[name](Path(folder))
            except Exception as error:
                traceback.print_exc()
                found, failed = f"FAILED: {error}", 1
        table.append({"row": name, "found": found, "gpu": GPU, "seconds": round(time.monotonic() - began, 1)})
        print(f"{name:9} {'' if GPU else 'no GPU; '}{found} ({table[-1]['seconds']} s)", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"torch": str(torch.__version__), "device": where, "rows": table}, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
