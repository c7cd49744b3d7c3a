"""Decides in etcd, fenced by revision, which checkpoint counts, and which generation the job is in.

A checkpoint is committed by one transaction that compares the generation's record and the record of the checkpoint
before it; so one that began before a rollback cannot be committed after it, and two shards cannot commit twice.
A rollback is one transaction too: it raises the generation and names the step that everyone returns to.

An etcd that was restored from a backup, or lost, knows less than the disk. `catch_up` finds out, and lets the job go on
from the disk; `_newest_on_disk` says why that is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from graphft.errors import GraphftError, plain_text
from graphft.runtime.checkpoint.manifest import DECIDED, PASSES, VALIDATE, Manifest, Part, tell_again
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Asked, Committed, Generation, Validating, decode
from graphft.runtime.etcd import absent, delete_op, delete_prefix_op, get_op, mod_is, put_op, range_op
from graphft.runtime.etcd.model import KV, Compare, Op, Store
from graphft.runtime.protocol.decisions import Decided

MAX_DELETES = 100
"""A transaction deletes so many records of parts (etcd takes 128 operations); a later checkpoint deletes the rest."""


def record_of(manifest: Manifest) -> Committed:
    """Returns the record that commits this checkpoint."""
    return Committed(manifest.generation, manifest.step, manifest.directory, int(manifest.meta.get(PASSES, 0)))


def reaches(known: Committed | None, wanted: Committed | None) -> bool:
    """True if a checkpoint holds at least what another one of its generation holds; None holds nothing."""
    if known is None or wanted is None:
        return wanted is None
    return (known.step, known.passes) >= (wanted.step, wanted.passes)


@dataclass(frozen=True, slots=True)
class Commits:
    """One shard's view of the commit protocol. Every method may be repeated after any crash."""

    etcd: Store
    keys: Keys
    store: CheckpointStore
    shard: int
    shards: int
    run: str
    process: str
    """Unique to this process: tells its own writes from those of the processes before it."""
    alone: bool = False
    """Async: a checkpoint is this shard's part alone. Then `keys` and `store` are the shard's own."""
    _fences: dict[int, Compare] = field(default_factory=dict, init=False, repr=False, compare=False)

    # -- committing ---------------------------------------------------------------------------------------------

    def publish(self, generation: int, step: int, part: Part, meta: Mapping[str, Any] | None = None) -> Manifest | None:
        """Records this shard's part; commits the checkpoint if it was the last one missing. `meta`: the manifest's.

        Returns the manifest if the checkpoint is committed now (by whomever), None if parts are missing or the
        generation has moved on (the checkpoint is then void). Raises EtcdError; it may be repeated then. One
        transaction for a part and one for the commit.
        """
        key = f"{self.keys.parts(generation, step)}{self.shard}"
        mine = [put_op(key, msgspec.json.encode(part)), range_op(self.keys.all_parts), get_op(self.keys.committed)]
        while True:
            fence = self._fences.get(generation) or self._find_fence(generation)
            if fence is None:
                return None
            found = self.etcd.txn([fence], mine, token=key)
            if found.ok:
                break
            del self._fences[generation]  # what is known of the generation is not true any more
        if not found.responses:  # it was made, but the generation has moved on since
            return None
        kvs, current = found.range(1).kvs, found.kv(2)
        prefix = self.keys.parts(generation, step)
        parts = sorted(
            (msgspec.json.decode(kv.value, type=Part) for kv in kvs if kv.key.startswith(prefix)), key=lambda p: p.shard
        )
        manifest = Manifest(generation, step, self.run, tuple(parts), dict(meta or {}))
        if decode(current, Committed) == record_of(manifest):  # an answer was lost
            return self.store.read_manifest(manifest.directory)
        if len(parts) < (1 if self.alone else self.shards):
            return None
        self.store.write_manifest(manifest)
        also = [*self._through_with(kvs, manifest), *self._opens(manifest)]
        return manifest if self._commit(manifest, fence, current, also) else None

    def _opens(self, manifest: Manifest) -> list[Op]:
        """Opens this checkpoint's validation, if it is to have one; that of the same step in a history that is over
        does not count."""
        if not manifest.meta.get(VALIDATE):
            return []
        record, step = Validating(manifest.generation, manifest.directory), manifest.step
        return [
            put_op(self.keys.validating(step), msgspec.json.encode(record)),
            delete_op(self.keys.validated(step)),
            delete_prefix_op(self.keys.ranges(step)),
        ]

    def _validations(self, target: Manifest | None) -> list[Op]:
        """Returns what makes the decisions those of `target`, to which everyone goes (back): nothing is decided of a
        later step, and an etcd that was lost, or restored, knows again what was until then. Its own validation is
        opened if it was not made, or has to be made again to decide."""
        kv, step = self.etcd.get(self.keys.decided), target.step if target is not None else 0
        known = msgspec.json.decode(kv.value, type=Decided) if kv is not None else None
        kept = target.meta.get(DECIDED) if target is not None else None
        decided, ops = msgspec.convert(kept, Decided) if kept is not None else Decided(), list[Op]()
        if known is not None and decided.step <= known.step <= step:
            decided = known
        elif decided.step:
            ops = [put_op(self.keys.decided, msgspec.json.encode(decided))]
        elif known is not None:
            ops = [delete_op(self.keys.decided)]
        if target is None or not target.meta.get(VALIDATE):
            return ops
        read = self.etcd.txn([], [get_op(self.keys.validating(step)), get_op(self.keys.validated(step))])
        undecided = known is not None and decided.step < step
        opens = read.kv(0) is None and (read.kv(1) is None or undecided)
        return ops + (self._opens(target) if opens else [])

    def _undone(self, step: int) -> list[Op]:
        """Returns what closes the validations of later steps that are not over: everyone comes there again."""
        open_ones = [kv.key for kv in self.etcd.range(self.keys.all_validating).kvs]
        return [delete_op(key) for key in open_ones if int(key.removeprefix(self.keys.all_validating)) > step]

    def is_current(self, generation: int) -> bool:
        """True if the job is in this generation. Raises EtcdError."""
        return self._find_fence(generation) is not None

    def _find_fence(self, generation: int) -> Compare | None:
        """Returns what holds as long as the job is in this generation; None if it is not. Read once per generation."""
        kv = self.etcd.get(self.keys.generation)
        current = decode(kv, Generation)
        if kv is None or current is None or current.number != generation:
            return None
        self._fences.clear()
        fence = self._fences[generation] = mod_is(self.keys.generation, kv.mod_revision)
        return fence

    def _through_with(self, parts: Sequence[KV], manifest: Manifest) -> list[Op]:
        """Deletes the records of this checkpoint's parts, and of those before it, void ones included."""
        keys = [kv.key for kv in parts if self._written_at(kv.key) <= (manifest.generation, manifest.step)]
        return [delete_op(key) for key in keys[:MAX_DELETES]]

    def _written_at(self, key: str) -> tuple[int, int]:
        generation, step = key.removeprefix(self.keys.all_parts).split("/")[0].split("-")
        return int(generation), int(step)

    def _commit(self, manifest: Manifest, fence: Compare, kv: KV | None, also: Sequence[Op]) -> bool:
        """`kv`: the checkpoint before, as it was read. `also` is done with it."""
        record = record_of(manifest)
        while True:
            current = decode(kv, Committed)
            if current is not None and reaches(current, record):
                return current == record
            before = mod_is(self.keys.committed, kv.mod_revision if kv is not None else 0)
            put = put_op(self.keys.committed, msgspec.json.encode(record))
            if self.etcd.txn([fence, before], [put, *also], token=self.keys.committed).ok:
                return True
            if self._find_fence(manifest.generation) != fence:
                return False
            kv = self.etcd.get(self.keys.committed)

    def ask(self, asked: Asked, before: Asked | None) -> bool:
        """Asks all shards for a checkpoint, unless somebody has since `before`, or the generation has moved on."""
        kv, current_kv = self.etcd.get(self.keys.checkpoint_at), self.etcd.get(self.keys.generation)
        current = decode(current_kv, Generation)
        if current_kv is None or current is None or current.number != asked.generation or decode(kv, Asked) != before:
            return False
        same = [
            mod_is(self.keys.generation, current_kv.mod_revision),
            mod_is(self.keys.checkpoint_at, kv.mod_revision if kv is not None else 0),
        ]
        return self.etcd.txn(same, [put_op(self.keys.checkpoint_at, msgspec.json.encode(asked))]).ok

    # -- starting and going back --------------------------------------------------------------------------------

    def begin(self) -> tuple[Generation, bool]:
        """Returns the generation to start in, and whether this is a restart of a shard that has served before: known by
        its record, which an etcd that was restored may lack, or by a checkpoint behind the generation's."""
        self.ensure_generation()
        started = self.keys.started(self.shard)
        fresh = self.etcd.txn([absent(started)], [put_op(started, self.process.encode())], token=started).ok
        current = decode(self.etcd.get(self.keys.generation), Generation)
        assert current is not None
        known = self.committed()
        return current, not fresh or (known is not None and known.step > current.step)

    def ensure_generation(self, resume: bool = True) -> Generation | None:
        """Makes the first generation: step 0, or (to `resume`) the newest checkpoint's on disk if etcd's data is new.

        Its number is none that has written files here, committed or not. Returns it if this process made it of a
        checkpoint. Raises StorageUnavailable.
        """
        if self.etcd.get(self.keys.generation) is not None:
            return None
        newest = self._newest_on_disk((-1, -1)) if resume else None
        reason = "start" if newest is None else "etcd is new; checkpoint found on disk"
        current, ops = self._generation(self.store.latest_generation() + 1, newest, reason, None)
        made = self.etcd.txn([absent(self.keys.generation)], ops, token=self.keys.generation).ok
        return current if made and newest is not None else None

    def _generation(
        self, number: int, target: Manifest | None, reason: str, committed: Committed | None
    ) -> tuple[Generation, list[Op]]:
        """Returns a generation that begins at `target` (None: the initial values), and what makes it the job's."""
        if target is not None:
            self.store.make_durable(target)
            tell_again(self.etcd, self.keys, target.meta)
        step, checkpoint = (target.step, target.directory) if target is not None else (0, "")
        raised = Generation(number, step, checkpoint, plain_text(reason))
        put = put_op(self.keys.generation, msgspec.json.encode(raised))
        ops = [put, *self._recommit(committed, target), *self._undone(step), *self._validations(target)]
        return raised, ops

    def catch_up(self) -> Generation | None:
        """Makes up for an etcd that was restored from a backup: the job goes on from what lies on disk.

        Returns the generation that begins there; None if etcd knows all that the disk holds. Raises StorageUnavailable.
        """
        current, committed = decode(self.etcd.get(self.keys.generation), Generation), self.committed()
        assert current is not None
        known = (current.number, committed.step if committed is not None else -1)
        if self._newest_on_disk(known) is None and self.store.latest_generation() <= current.number:
            return None
        return self.rollback("etcd is older than the checkpoints on disk")

    def committed(self) -> Committed | None:
        """Returns the newest committed checkpoint."""
        return decode(self.etcd.get(self.keys.committed), Committed)

    def overtake(self, generation: int, mine: Committed | None = None) -> Generation | None:
        """Makes up for an etcd that was restored from a backup while this process lived on: raises the generation.

        `generation`: the one that the process is in; `mine`: the newest checkpoint that it has committed in it.
        Returns None if etcd knows of both, or of a later generation. Raises StorageUnavailable.
        """
        read = self.etcd.txn([], [get_op(self.keys.generation), get_op(self.keys.committed)])
        current, committed = decode(read.kv(0), Generation), decode(read.kv(1), Committed)
        if current is None:
            return None
        if current.number > generation or (current.number == generation and reaches(committed, mine)):
            return None
        return self.rollback("etcd is older than its processes", above=generation)

    def rollback(self, reason: str, *, below: int | None = None, above: int = -1) -> Generation:
        """Raises the generation: everyone returns to the newest committed checkpoint (older than `below`, if given).

        The new generation is higher than any that has left files, and than `above`. Returns the generation that holds
        afterwards: ours, or the one that another process raised meanwhile. Raises StorageUnavailable.
        """
        while True:
            current_kv, committed_kv = self.etcd.get(self.keys.generation), self.etcd.get(self.keys.committed)
            current, committed = decode(current_kv, Generation), decode(committed_kv, Committed)
            assert current_kv is not None
            assert current is not None
            target = self._target(current, committed, below)
            generation = max(current.number, above, self.store.latest_generation()) + 1
            raised, ops = self._generation(generation, target, reason, committed)
            compare = [
                mod_is(self.keys.generation, current_kv.mod_revision),
                mod_is(self.keys.committed, committed_kv.mod_revision if committed_kv else 0),
            ]
            # Of two shards that write the very same record, either may take the other's for its own: no harm.
            if self.etcd.txn(compare, ops, token=self.keys.generation).ok:
                return raised
            now = decode(self.etcd.get(self.keys.generation), Generation)
            assert now is not None
            if now.number > max(current.number, above):
                return now

    def _recommit(self, committed: Committed | None, target: Manifest | None) -> list[Op]:
        """Returns what makes `target` the newest committed checkpoint: later steps are to be committed once more."""
        if target is None:
            return [delete_op(self.keys.committed)] if committed is not None else []
        if committed is not None and target.directory == committed.checkpoint:
            return []
        return [put_op(self.keys.committed, msgspec.json.encode(record_of(target)))]

    def _target(self, current: Generation, committed: Committed | None, below: int | None) -> Manifest | None:
        """Returns the checkpoint to go back to; None: the initial values. `below`: of an earlier step."""
        if below is None:
            newer = self._newest_on_disk((current.number, committed.step if committed is not None else -1))
            if newer is not None:
                return newer
        return self._usable(committed, below) if committed is not None else None

    def _newest_on_disk(self, known: tuple[int, int]) -> Manifest | None:
        """Returns the newest whole checkpoint of the highest generation that left one, if it is newer than `known`.

        `known`: etcd's generation, and the step that is committed. Newer is a higher generation (then etcd was
        restored from a backup), or a later step of the same one (then etcd was restored, or a process ended between
        writing the manifest and committing it). That it was perhaps never committed does no harm: a manifest is
        written only when all parts of one generation are there, so each shard's state is that of this step, in any
        history. In async mode the state and the ledger of what is in it are one file. What was begun in an older
        generation than etcd's stays void: batches may have been left out since.
        """
        own = (m for m in self.store.manifests() if m.run == self.run)
        newest = max(own, key=lambda m: (m.generation, m.step), default=None)
        return newest if newest is not None and (newest.generation, newest.step) > known else None

    def _usable(self, committed: Committed, below: int | None) -> Manifest | None:
        """Returns the committed checkpoint's manifest, or the newest other one on disk that is whole and no later."""
        limit = committed.step + 1 if below is None else below
        if committed.step < limit:
            try:
                return self.store.read_manifest(committed.checkpoint)
            except DamagedCheckpoint:
                limit = committed.step
        for m in self.store.manifests():
            if m.run == self.run and m.step < limit:
                return m
        return None

    def manifest_of(self, current: Generation) -> Manifest | None:
        """Returns the manifest of the checkpoint that the generation began at; None for the initial values."""
        if not current.checkpoint:
            return None
        manifest = self.store.read_manifest(current.checkpoint)
        if manifest.run != self.run:
            raise GraphftError(
                f"checkpoint {current.checkpoint} is of run {manifest.run}, this is {self.run}",
                rule="checkpoint",
                help="use the job directory that the checkpoint was written with",
            )
        return manifest
