"""Which checkpoint was put in the place of what was there: of its run, none before it counts."""

from __future__ import annotations

import msgspec

from graphft.runtime.checkpoint.manifest import Manifest


class Floor(msgspec.Struct, frozen=True):
    """The oldest checkpoint of a run that counts. `run`: "" in files of before it was written there; of any run.
    `earlier`: generations and steps of floors before this one, of the same run."""

    generation: int
    step: int
    run: str = ""
    earlier: tuple[tuple[int, int], ...] = ()

    def is_of(self, run: str) -> bool:
        return self.run in ("", run)

    def carries(self, manifest: Manifest) -> bool:
        """Whether it counts: it is of another run, or not below."""
        return not self.is_of(manifest.run) or _age(manifest) >= _age(self)

    @staticmethod
    def of(manifest: Manifest, before: Floor | None) -> Floor:
        """That of a checkpoint that was put in place; `before`: the one until then."""
        known = {_age(before), *before.earlier} if before is not None and before.is_of(manifest.run) else set()
        earlier = tuple(sorted(each for each in known if each < _age(manifest)))
        return Floor(manifest.generation, manifest.step, manifest.run, earlier)

    def at(self, step: int) -> Floor | None:
        """What the floor was when the run was at this step; None if nothing had been put in place by then."""
        known = [_age(self), *self.earlier]
        return max((Floor(*each, self.run) for each in known if each[1] <= step), default=None, key=_age)


def _age(floor: Floor | Manifest) -> tuple[int, int]:
    return floor.generation, floor.step
