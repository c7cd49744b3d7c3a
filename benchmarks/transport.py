"""The data plane against plain TCP, bare pyzmq, gloo and pickle: `python benchmarks/transport.py [--json FILE]`.

Times on a shared machine wander, so passes of all contestants are interleaved, and what counts are the ratios of
their medians; where others keep the cores busy, the processor time per round says more. The plain TCP baseline is a
Python loop around sendall / recv_into: it stands for C, since all its time passes in the kernel. All contestants run
in one network of their own, under the same TCP congestion control, since some machines' default (bbr) throttles
loopback.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from group import Group, isolate


@dataclass(frozen=True)
class Bar:
    """A ratio to reach: ours over the other's, in seconds or (`higher`) in bytes per second."""

    gate: float
    aim: float
    higher: bool = False

    def met(self, ratio: float, limit: float) -> bool:
        return ratio >= limit if self.higher else ratio <= limit


@dataclass(frozen=True)
class Race:
    name: str
    ours: str
    others: dict[str, Bar]
    start: Callable[[str], Group]
    rounds: int
    size: int = 0
    """Bytes that one round moves, for the speed column."""


GLOO = {17: Bar(1.5, 1.0), 64: Bar(1.8, 1.4)}
"""By width of the ResNet-18: 0.93 M and 11.7 M parameters."""
PICKLE = Bar(0.30, 0.22)


def races(quick: bool) -> list[Race]:
    # Here, since importing torch starts threads, after which no process may change its network.
    import exchange
    import push

    found = []
    for mb in (4,) if quick else (4, 8, 16):
        size = mb << 20
        found.append(
            Race(
                f"acknowledged push of {mb} MB",
                "ours",
                {"tcp": Bar(0.60, 0.80, higher=True)},
                lambda kind, size=size: push.group(kind, size),
                30 if quick else 60,
                size,
            )
        )
    found.append(
        Race(
            "round trip of a 1 KB push",
            "ours",
            {"bare": Bar(1.5, 1.2)},
            lambda kind: push.group(kind, 1024),
            500 if quick else 3000,
        )
    )
    for width in (17,) if quick else (17, 64):
        numel = sum(t.numel() for t in exchange.tensors(width))
        found.append(
            Race(
                f"exchange of {numel / 1e6:.2f} M parameters",
                "ours",
                {"gloo": GLOO[width], "pickle": PICKLE},
                lambda kind, width=width: exchange.group(kind, width),
                10 if width == 64 else 30,
            )
        )
    return found


@dataclass
class Result:
    """A contestant's seconds per round: the median of each pass, and the processor time of all its processes."""

    medians: list[float]
    cpu: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.medians)


def run(race: Race, passes: int) -> dict[str, Result]:
    groups = {kind: race.start(kind) for kind in (race.ours, *race.others)}
    try:
        for group in groups.values():
            group.run(max(3, race.rounds // 5))
        before = {kind: group.cpu_seconds() for kind, group in groups.items()}
        medians: dict[str, list[float]] = {kind: [] for kind in groups}
        for _ in range(passes):
            for kind, group in groups.items():
                medians[kind].append(statistics.median(group.run(race.rounds)))
        return {
            kind: Result(medians[kind], (group.cpu_seconds() - before[kind]) / (passes * race.rounds))
            for kind, group in groups.items()
        }
    finally:
        for group in groups.values():
            group.end()


def judge(race: Race, results: dict[str, Result]) -> list[dict[str, Any]]:
    rows = []
    ours = results[race.ours]
    for kind, bar in race.others.items():
        other = results[kind]
        ratio = other.seconds / ours.seconds if bar.higher else ours.seconds / other.seconds
        verdict = "aim" if bar.met(ratio, bar.aim) else "gate" if bar.met(ratio, bar.gate) else "MISSED"
        rows.append(
            {
                "race": race.name,
                "against": kind,
                "ratio": ratio,
                "bar": asdict(bar),
                "verdict": verdict,
                "ours": asdict(ours) | {"seconds": ours.seconds},
                "other": asdict(other) | {"seconds": other.seconds},
            }
        )
    return rows


def show(row: dict[str, Any]) -> None:
    bar, ours, other = row["bar"], row["ours"], row["other"]
    sign = ">=" if bar["higher"] else "<="
    print(
        f"{row['race']:31} {row['against']:6} {ours['seconds'] * 1e3:9.3f} {other['seconds'] * 1e3:9.3f} "
        f"{ours['cpu'] * 1e3:8.2f} {other['cpu'] * 1e3:8.2f} {row['ratio']:6.2f} {sign} {bar['gate']:.2f} / "
        f"{bar['aim']:.2f}  {row['verdict']}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=5, help="interleaved passes (at least 3 to judge by)")
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    control = isolate()
    print(f"TCP congestion control {control}; {options.passes} interleaved passes; medians")
    print(f"{'':38} {'ours':>9} {'other':>9} {'CPU ours':>8} {'other':>8}  ratio    gate / aim   (ms per round)")
    rows = []
    for race in races(options.quick):
        for row in judge(race, run(race, options.passes)):
            show(row)
            rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"congestion_control": control, "rows": rows}, indent=1) + "\n")
    return int(any(row["verdict"] == "MISSED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
