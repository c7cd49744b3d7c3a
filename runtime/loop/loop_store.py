"""The versions that a training loop has saved, and which of them are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.manifest import LOOP, Manifest, directory_key, directory_name
from graphft.runtime.checkpoint.versioned_store import VersionedStore


def superseded(what: str) -> GraphftError:
    """Another process has committed this version, or a later one: two save to one place."""
    return GraphftError(
        what,
        rule="superseded",
        help="only one process may save to a path: trainer 0. Is an earlier one of this job still running? One that "
        "goes on from there loads it first",
    )


class LoopStore(VersionedStore):
    """A version has one file; its manifest is made only if there is none: that is the commit."""

    def versions(self) -> list[int]:
        """Returns all that left a folder, whole or not; the newest first."""
        return [number for number, generation in map(directory_key, self.directories()) if generation == LOOP]

    def all_committed(self) -> list[int]:
        """Returns the versions that count, if they are not damaged; the newest first.

        While another process saves and deletes here, all that were listed may be gone when they are looked at.
        """
        found: list[int] = []
        listed: list[int] = []
        while not found and listed != (now := self.versions()):
            listed, found = now, [version for version in now if self.committed(version)]
        return found

    def committed(self, version: int) -> bool:
        """True if it has a manifest: then it counts, if it is not damaged."""
        return self.has_manifest(directory_name(LOOP, version))

    def manifest(self, version: int) -> Manifest:
        """Raises DamagedCheckpoint; DeletedCheckpoint where there is none."""
        return self.read_manifest(directory_name(LOOP, version))

    def write(self, version: int, meta: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes a version and commits it. Raises OSError, GraphftError[superseded]; GraphftError[save] for a dtype
        that cannot be saved."""
        part = self.write_part(LOOP, version, 0, 1, tensors)
        newer = [v for v in self.all_committed() if v > version]
        if newer or not self.create_manifest(Manifest(LOOP, version, "", (part,), meta)):
            self.fs.delete(self._at(part.file))
            raise superseded(f"{self.url}: another process has saved version {max([version, *newer])} meanwhile")

    def collect(self, keep: Collection[int]) -> list[int]:
        """Deletes the versions older than the newest, but for those to keep; also what crashes left behind. Returns
        these versions."""
        newest = max(self.all_committed(), default=-1)
        gone = [v for v in self.versions() if v < newest and v not in keep]
        self.discard([directory_name(LOOP, v) for v in gone])
        return gone


@dataclass(frozen=True, slots=True)
class Keep:
    """What is not deleted. The newest checkpoint never is.

    Attributes:
        newest: So many of the newest.
        every: And the first of each so many versions: 0, 10, 20 ... for 10 (where 20 is missing, 21); 0: none.
        best: And the one with the best value of this metric of `TrainStatus.metrics`; "": none.
        mode: "min" or "max": which value is the best.
    """

    newest: int = 3
    every: int = 0
    best: str = ""
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0 or self.mode not in ("min", "max"):
            raise UsageError(
                f"{self}: expected newest >= 1, every >= 0, and mode 'min' or 'max'", rule="keep", help="keep=3"
            )

    def of(self, versions: Sequence[tuple[int, float | None]]) -> set[int]:
        """Returns those to keep, of (version, value of the metric `best`). None, and what is no number, is never the
        best."""
        known = sorted(versions, reverse=True)
        kept = {version for version, _ in known[: self.newest]}
        if self.every:
            kept |= set({version // self.every: version for version, _ in known}.values())
        sign = 1 if self.mode == "min" else -1
        values = [(sign * value, -version) for version, value in known if value is not None and not math.isnan(value)]
        return kept | ({-min(values)[1]} if values else set())
