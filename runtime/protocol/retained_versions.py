"""Which versions of a shard's parameters its trainers may still push gradients of: their copies are to be kept."""

from __future__ import annotations

LIMIT = 6
"""Versions per trainer. One that computes has two: what it computes from, and what it was sent meanwhile."""


class RetainedVersions:
    """By trainer, the versions that it was sent and has not gone beyond, lowest first: the lowest, which it most likely
    computes from, and the newest, which it will go on to; `LIMIT` of them at most."""

    def __init__(self) -> None:
        self._sent: dict[str, list[int]] = {}

    def sent(self, trainer: str, version: int) -> None:
        """The trainer may compute from this version from now on."""
        versions = self._sent.setdefault(trainer, [])
        if version not in versions:
            versions.append(version)
            del versions[1 : 1 - LIMIT]

    def pushed(self, trainer: str, version: int) -> None:
        """A gradient of this version came: parameters only get newer, so it computes from no older one any more."""
        self._sent[trainer] = [v for v in self._sent.get(trainer, ()) if v >= version]

    def left(self, trainer: str) -> None:
        self._sent.pop(trainer, None)

    def has(self, trainer: str, version: int) -> bool:
        return version in self._sent.get(trainer, ())

    def trainers(self) -> frozenset[str]:
        return frozenset(self._sent)

    def all(self) -> frozenset[int]:
        """The versions whose copies are needed."""
        return frozenset(v for versions in self._sent.values() for v in versions)
