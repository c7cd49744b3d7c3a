"""Sixty faults, made by hand in what must be right, each of which a test has to find: `python -m tests.mutants`.

A mutant is a file, a piece of its text, and what stands there instead. Each is tried in a copy of the checkout with the
tests of its file (`TESTS`), then, if these pass, with the simulation (`SIMULATED`). The command prints which test found
it, and ends with 1 if one was found by none. `python -m tests.mutants 3 17` tries these alone. Before tests are cut,
and after, the same mutants are to be found. `tests/test_sources.py` sees to it that the texts still occur.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS, NO_TESTS = 400, 5
SIMULATED = (("--mode", "sync"), ("--mode", "async"), ("--mode", "async", "--dispatch", "coordinator"))
PROTOCOL = "runtime/protocol/"
TESTS = {
    PROTOCOL: ("tests/protocol",),
    "runtime/queue/": ("tests/runtime",),
    "runtime/checkpoint/": ("tests/runtime",),
    "runtime/roles/": ("tests/runtime",),
    "runtime/etcd/": ("tests/etcd",),
    "runtime/launcher/": ("tests/runtime",),
}

MUTANTS = [
    # A sync shard: which contributions count, and when a step closes.
    ("sync_shard", "step == self.version and self.phase", "step <= self.version and self.phase"),
    ("sync_shard", 'if outcome == "conflict":', 'if outcome == "never":'),
    ("sync_shard", "or self.finished or not self.round.complete", "or self.finished"),
    ("sync_shard", "if nonfinite or not contributions:", "if not contributions:"),
    ("sync_shard", "or self.partial_sums.missing():", "or False:"),
    ("sync_shard", "self.partial_sums.advance(self.version)", "self.partial_sums.own = {}"),
    ("shard", "if generation < self.generation:", "if False:"),
    ("shard", "if generation > self.generation:", "if False:"),
    ("sync_shard", "if event.generation <= self.generation:", "if event.generation < self.generation:"),
    ("sync_shard", "self.waiting, self.checkpoints = {}, set()", "self.checkpoints = set()"),
    (
        "sync_shard",
        "(message.generation, message.step) != (self.generation, self.version)",
        "message.step != self.version",
    ),
    ("sync_shard", "if step > self.version or (self.finished", "if (self.finished"),
    (
        "sync_shard",
        'self.phase, self.previous = "collecting", previous',
        'self.phase, self.previous = "collecting", "current"',
    ),
    ("sync_shard", "or version in self.checkpoints or", "or"),
    ("sync_shard", 'if self.options.on_barrier_timeout == "rollback":', "if False:"),
    ("sync_shard", "if event.step <= self.version:", "if False:"),
    # One step's contributions.
    ("round", "if part.samples != push.samples:", "if False:"),
    ("round", "if push.bucket in part.payloads:", "if False:"),
    ("round", "part.finite = part.finite and push.finite", "part.finite = push.finite"),
    ("round", "sorted(self._partial.items())", "self._partial.items()"),
    ("round", "if shard in self._others:", "if False:"),
    (
        "round",
        "self.own[step] if s == self.shard else self._others[s] for s in range(self.shards)",
        "[self.own[step], *self._others.values()][s] for s in range(self.shards)",
    ),
    # A sync trainer: what it contributes, and what it does again.
    ("sync_trainer", "state.next = min(state.next, message.version)", "pass"),
    ("sync_trainer", "current.redo = True\n            return [", "return ["),
    ("sync_trainer", "if not current.redo:", "if True:"),
    ("sync_trainer", "self.connections[shard].version >= self._current.work.step\n", "True\n"),
    (
        "sync_trainer",
        'message.generation != self.generation:\n            return [self.count("other-bucket"',
        'False:\n            return [self.count("other-bucket"',
    ),
    ("sync_trainer", "for cache in self.caches.values():\n            cache.clear()", "pass"),
    ("sync_trainer", "if not state.confirm\n", "\n"),
    # An async shard: each batch once.
    ("async_shard", "if self.ledger.has(*key):\n            reason", "if False:\n            reason"),
    ("async_shard", "self.wrong_generation(peer, message.generation)", "[]"),
    ("async_shard", "if 0 <= self.options.max_staleness < staleness:", "if False:"),
    ("async_shard", "(copy.version, copy.samples) != (message.version, message.samples)", "False"),
    ("async_shard", "for one in (peer, *replaced):", "for one in replaced:"),
    ("async_shard", "self.retained.pushed(self.peers[peer], message.version)", "pass"),
    ("ledger", "chunk in self._whole.get(pass_index, NONE) or", ""),
    ("ledger", "if len(ranges) == batches:", "if len(ranges) >= batches - 1:"),
    ("ledger", "self._ends[i - 1] = self._ends.pop(i)", "self._ends.pop(i)"),
    # An async trainer.
    ("async_trainer", "held.unknown.add(shard)", "pass"),
    ("async_trainer", "cache.have = cache.loaded = -1", "cache.have = -1"),
    ("async_trainer", "connection.skipped.discard((key, message.batch))", "pass"),
    ("async_trainer", "return not any(self.held[key].lacks)", "return not all(self.held[key].lacks)"),
    ("async_trainer", "return pushed[:-1] if whole and current.closed is None else pushed", "return pushed"),
    # The chunk queue: one transaction each.
    ("chunk_queue", 'Compare(pending_key(prefix, chunk), "create", 0),', ""),
    ("chunk_queue", 'mine = (Compare(pending_key(prefix, chunk), "create", fence),)', "mine = ()"),
    (
        "chunk_queue",
        "failures = 0 if progress > self.progress else self.failures + (self.open and vanished)",
        "failures = self.failures + (self.open and vanished)",
    ),
    ("runtime/queue/transactions.py", " and ages[kv.key] > timeout:", ":"),
    ("chunk_queue", "failures = self.failures + 1 if batch == self.progress else 1", "failures = self.failures + 1"),
    ("chunk_queue", "set(before) & set(now) or set(now)", "set(before) | set(now)"),
    ("slot_assignment", "floor, ceiling = min(floor, 1), 1", "pass"),
    ("slot_assignment", "return set(live) - set(barred) or set(live)", "return set(live)"),
    # The coordinator's queue.
    ("task_queue", "if isinstance(call, GetTasks) and call.call < newest:", "if False:"),
    ("task_queue", "task.attempt == attempt and task.holder == call.trainer", "task.holder == call.trainer"),
    ("task_queue", "if task.holder not in trainers:", "if False:"),
    ("task_queue", "if task.call <= call.call and", "if"),
    # Commit: which checkpoint counts.
    ("runtime/checkpoint/commit.py", "if len(parts) < (1 if self.alone else self.shards):", "if not parts:"),
    ("runtime/checkpoint/commit.py", "if self.etcd.txn([fence, before],", "if self.etcd.txn([before],"),
    (
        "runtime/checkpoint/commit.py",
        "generation = max(current.number, above, self.store.latest_generation()) + 1",
        "generation = current.number + 1",
    ),
    ("runtime/checkpoint/commit.py", "limit = committed.step\n", "raise\n"),
    (
        "runtime/checkpoint/commit.py",
        "max(own, key=lambda m: (m.generation, m.step), default=None)",
        "max(own, key=lambda m: m.step, default=None)",
    ),
    # The queue's drivers.
    ("runtime/queue/etcd_queue.py", "left_over.append(chunk_queue.displace(prefix, located.chunk, pending))", "pass"),
    ("runtime/queue/sync_queue.py", "if claim.last_step >= lowest}", "if claim.last_step > lowest}"),
    ("runtime/queue/passes.py", "(pending or chunk_queue.pending_key(prefix, planned.chunk) not in records)", "True"),
]


def located(mutant: tuple[str, str, str]) -> tuple[Path, str, str]:
    """Returns the mutant's file, relative to the checkout, and its texts."""
    file, old, new = mutant
    return Path(file if "/" in file else f"{PROTOCOL}{file}.py"), old, new


def problem(mutant: tuple[str, str, str], root: Path = ROOT) -> str:
    """Returns why the mutant cannot be made; "" if it can."""
    path, old, _ = located(mutant)
    count = (root / path).read_text().count(old) if (root / path).exists() else 0
    return "" if count == 1 else f"{path} has {count} times {old!r}"


def found_by(mutant: tuple[str, str, str], root: Path) -> str:
    """Returns which test, or which simulation, fails with the mutant; "" if none does. Leaves `root` as it was."""
    path, old, new = located(mutant)
    original = (root / path).read_text()
    (root / path).write_text(original.replace(old, new))
    try:
        tests = next(tests for folder, tests in TESTS.items() if str(path).startswith(folder))
        command = ["-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        for kind in ("not runTest", "runTest"):  # Hypothesis' histories take longest
            if result := run(root, [*command, "-k", kind]):
                return result
        for options in SIMULATED:
            if run(root, ["-m", "tests.sim", *options, "--seeds", "60"]):
                return f"simulation {' '.join(options)}"
        return ""
    finally:
        (root / path).write_text(original)


def run(root: Path, command: list[str]) -> str:
    """Returns the first failure, "" if the command succeeds."""
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "a test that did not end"
    if done.returncode in (0, NO_TESTS):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "the run"


def main() -> int:
    chosen = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".*", "jobs", "out"))
        (root / ".etcd").symlink_to(ROOT / ".etcd")
        for number in chosen:
            mutant = MUTANTS[number]
            path, old, new = located(mutant)
            by = problem(mutant, root) or found_by(mutant, root)
            survivors += not by
            print(
                f"{number:2} {path.name}: {old.split(chr(10))[0]!r} -> {new.split(chr(10))[0]!r}: {by or 'NOT FOUND'}"
            )
            sys.stdout.flush()
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
