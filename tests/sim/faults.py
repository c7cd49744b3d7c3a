"""A seed decides how a job's world is, what happens in it, and when that ends."""

from __future__ import annotations

import errno
import random
import signal

from graphft.runtime.roles.environment import RoleSpec
from tests.sim.compare import ComparedSimulation
from tests.sim.transport import Faults
from tests.sim.variants import Variant
from tests.sim.world import Process

KINDS = {
    "kill": 6,
    "kill-all": 1,
    "lose-power": 1,
    "stop": 3,
    "leave": 1,
    "join": 1,
    "cut-etcd": 3,
    "end-etcd": 1,
    "cut": 2,
    "block": 1,
    "disk": 1,
}
"""Weights."""
TTL = 5.0


class FaultySimulation(ComparedSimulation):
    """A job among faults of the seed's own."""

    def __init__(self, seed: int, variant: Variant) -> None:
        pick = self.pick = random.Random(seed)
        noise = pick.choice((0.0, 0.0, 1.0))
        self.compute = pick.choice((0.0, 0.01, 0.1, 0.3))
        super().__init__(
            seed,
            variant,
            Faults(
                seed,
                drop=0.002 * noise,
                duplicate=0.03 * noise,
                delay=0.05 * noise,
                reorder=0.02 * noise,
                max_delay=0.3,
            ),
            latency=pick.choice((1e-4, 1e-3, 0.02)),
            pace=lambda: pick.uniform(0, self.compute),
        )
        self.until = pick.uniform(0.2, 20.0)
        self.interval = pick.choice((0.1, 0.5, 2.0))
        self.lethal = pick.choice((0.0, 0.3, 0.6))
        """The share of the processes that die at an effect of theirs."""
        self.restored = pick.random() < 0.1

    def begin_all(self) -> None:
        pick = self.pick
        self.way.lossy, self.way.latency = pick.choice((0.0, 0.0, 0.02, 0.1)), pick.choice((0.001, 0.005, 0.05))
        self.way.lag = pick.choice((0.001, 0.02, 0.5))
        self.disk.slow = pick.choice((0.0, 0.002, 0.2))
        options = dict(self.variant.options)
        slots, wait = options["trainers"], options.get("on_trainer_loss") == "wait"
        self.begin(trainers=pick.randint(slots if wait else 1, slots + 1))
        self.world.after(pick.uniform(0, self.interval), self.fault)
        self.world.at(self.until, self.heal)
        if self.restored:
            self.world.at(pick.uniform(0, self.until), self.take_backup)

    def heal(self) -> None:
        """From now on nothing more happens; everything must come to its end."""
        self.world.tell("faults", "are over")
        self.way.lossy = 0.0

    def take_backup(self) -> None:
        if self.state != "running" or not self.store.get(self.keys.generation):
            return
        restore = self.way.backup()
        self.world.after(self.pick.uniform(0.1, 5.0), lambda: None if self.over else restore())

    def started(self, process: Process) -> None:
        process.skew = self.pick.choice((0.0, 0.0, 3600.0, -3600.0))
        if self.world.now < self.until and self.pick.random() < self.lethal:
            process.dies_at = self.pick.randint(1, self.pick.choice((30, 300, 1500)))

    # -- faults -----------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        if self.world.now > self.until or self.over:
            return
        (kind,) = self.pick.choices(list(KINDS), list(KINDS.values()))
        self.counts[kind] += 1
        what = getattr(self, "fault_" + kind.replace("-", "_"))()
        self.world.tell("fault", "%s%s", (kind, f": {what}" if what else ""))
        self.world.after(self.pick.expovariate(1 / self.interval), self.fault)

    def some(self, kind: str = "") -> Process | None:
        found = [p for p in self.living() if self.roles[p].kind.startswith(kind)]
        return self.pick.choice(found) if found else None

    def fault_kill(self) -> None:
        if process := self.some():
            process.kill()

    def fault_kill_all(self) -> None:
        for process in self.living():
            process.kill()

    def fault_lose_power(self) -> None:
        self.fault_kill_all()
        self.world.after(0, self.disk.lose_power)
        if not self.restored:  # a backup may name a checkpoint that newer ones have replaced
            self.world.after(0, self.check_committed)

    def fault_stop(self) -> None:
        if process := self.some():
            process.freeze(self.pick.choice((self.pick.uniform(0, 2), self.pick.uniform(0, 4 * TTL))))

    def fault_leave(self) -> None:
        if process := self.some("trainer"):
            process.signal(signal.SIGTERM)

    def fault_join(self) -> None:
        if len(self.living()) < 9:
            self.start(RoleSpec("trainer", self.pick.randint(0, 5)))

    def fault_cut_etcd(self) -> None:
        if process := self.some():
            self.way.cut(process, self.pick.choice((self.pick.uniform(0, 1), self.pick.uniform(0, 2 * TTL))))

    def fault_end_etcd(self) -> None:
        self.way.cut(None, self.pick.uniform(0.1, 1.6 * TTL))

    def fault_cut(self) -> str:
        if not self.network.servers:
            return ""
        server = self.pick.choice(sorted(self.network.servers))
        self.network.cut(server)
        return f"all connections of {server}"

    def fault_block(self) -> str:
        clients = sorted({(link.client.identity, link.address) for link in self.network.links})
        if not clients:
            return ""
        pair, seconds = self.pick.choice(clients), self.pick.uniform(0.5, 15.0)
        self.network.blocked.append(pair)
        self.world.after(seconds, lambda: self.network.blocked.remove(pair))
        return f"nothing passes between {' and '.join(pair)} for {seconds:.1f} s"

    def fault_disk(self) -> str:
        """It is full, or fails, for a while."""
        number, share = self.pick.choice((errno.ENOSPC, errno.EIO)), self.pick.choice((0.3, 1.0))
        seconds = self.pick.uniform(0.1, 5.0)
        end = self.world.now + seconds

        def trouble() -> OSError | None:
            here = self.world.current is not None and self.world.now < end and self.pick.random() < share
            return OSError(number, "the disk has trouble") if here else None

        self.disk.trouble = trouble
        return f"{errno.errorcode[number]} in {share:.0%} of its calls for {seconds:.1f} s"
