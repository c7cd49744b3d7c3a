"""A watch's view misses nothing that lasts, whatever happens to the server and the way to it."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

from etcd.servers import compact

from graphft.runtime.etcd import KV, EmbeddedEtcd, Etcd, Event, RangeResult, Watch, WatchBatch
from graphft.runtime.etcd.watch import View
from tests.support.proxy import Proxy
from tests.support.waiting import until


class Record:
    """Keeps each view that a watch has told of, by its revision."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.views: list[tuple[int, dict[str, KV]]] = []

    def __call__(self) -> None:
        if self.watch is not None:
            self.views.append((self.watch.revision, self.watch.snapshot()))


def caught_up(watch: Watch, etcd: Etcd, timeout: float = 120) -> bool:
    """Wait until the view is what a list says."""
    expected = {kv.key: kv for kv in etcd.range(watch.prefix).kvs}
    return bool(watch.wait(lambda view: dict(view) == expected, timeout))


def test_no_change_that_lasts_is_missed_over_kills_of_the_server(tmp_path: Path) -> None:
    record = Record()
    written: list[int] = []
    with (
        EmbeddedEtcd(tmp_path) as server,
        Etcd(server.endpoints, deadline=120) as etcd,
        Watch(etcd, "/w/", record) as watch,
    ):
        stop, record.watch = threading.Event(), watch

        def write() -> None:
            while not stop.wait(0.002):
                written.append(etcd.put(f"/w/{len(written) % 7}", b"%d" % len(written)))

        def await_changes() -> None:
            puts, views = len(written) + 20, len(record.views) + 20
            until(lambda: len(written) >= puts and len(record.views) >= views)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(4):
            await_changes()
            server.restart()
        await_changes()
        stop.set()
        writer.join()
        assert caught_up(watch, etcd)
        until(lambda: watch.connected)
    told = [revision for revision, _ in record.views]
    assert told == sorted(set(told)), "out of order, or twice"
    seen = {kv.mod_revision for _, kvs in record.views for kv in kvs.values()}
    assert set(written[-7:]) <= seen, "the last change of a key was not seen"
    assert len(set(written) & seen) > 50


def test_a_long_disconnect_with_compaction(etcd: Etcd, etcd_server: EmbeddedEtcd, prefix: str) -> None:
    etcd.put(prefix + "kept", b"1")
    etcd.put(prefix + "gone", b"1")
    etcd.put(prefix + "remade", b"1")
    etcd.put(prefix + "changed", b"1")
    with (
        Proxy(etcd_server.endpoints[0]) as proxy,
        Etcd([proxy.endpoint], timeout=0.5, deadline=60) as far,
        Watch(far, prefix, record := Record()) as watch,
    ):
        record.watch = watch
        proxy.refuse = True
        proxy.cut()
        etcd.delete(prefix + "gone")
        etcd.delete(prefix + "remade")
        etcd.put(prefix + "remade", b"2")
        etcd.put(prefix + "changed", b"2")
        etcd.put(prefix + "passing", b"")
        etcd.delete(prefix + "passing")
        compact(etcd, etcd.put(prefix + "new", b"1"))
        until(lambda: not watch.connected)
        assert watch.snapshot().keys() == {prefix + name for name in ("kept", "gone", "remade", "changed")}
        proxy.heal()
        assert caught_up(watch, etcd)
        etcd.put(prefix + "after", b"")
        assert watch.wait(lambda view: prefix + "after" in view, 60)
    told = [{key.removeprefix(prefix): kv.value for key, kv in kvs.items()} for _, kvs in record.views]
    new = {"kept": b"1", "remade": b"2", "changed": b"2", "new": b"1"}
    assert told == [new, new | {"after": b""}]
    assert record.views[0][1][prefix + "remade"].version == 1


def test_a_store_that_was_restored_and_has_grown_past_what_was_seen(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server, Etcd(server.endpoints, deadline=60) as etcd:
        etcd.put("/w/lasts", b"")
        server.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "backup")
        server.start()
        with Watch(etcd, "/w/") as watch:
            etcd.put("/w/lost", b"")
            assert watch.wait(lambda view: "/w/lost" in view, 60)
            server.kill()
            shutil.rmtree(tmp_path / "data")
            (tmp_path / "backup").rename(tmp_path / "data")
            server.start()
            with Etcd(server.endpoints, deadline=60) as other:
                other.put("/w/other", b"")  # at the revision of what was lost
                for _ in range(3):
                    other.put("/elsewhere", b"")
            assert watch.wait(lambda view: "/w/lost" not in view, 60)
            assert caught_up(watch, etcd)
            assert set(watch.snapshot()) == {"/w/lasts", "/w/other"}


def test_a_view_from_lists_and_events_in_any_mixture() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        state: dict[str, KV] = {}
        states, events = [dict(state)], []
        for revision in range(1, 40):
            key = draw.choice("abc")
            old = state.get(key)
            if old is not None and draw.random() < 0.4:
                del state[key]
                events.append(Event("delete", KV(key, b"", 0, revision, 0)))
            else:
                created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
                state[key] = KV(key, b"", created, revision, version)
                events.append(Event("put", state[key]))
            states.append(dict(state))
        view, at = View(), 0
        while at < 39:
            before = dict(view.kvs)
            if draw.random() < 0.3:
                at = draw.randint(at, 39)
                changed = view.relist(RangeResult(tuple(states[at].values()), at))
            else:
                start = draw.randint(max(0, at - 3), at)  # a resumed stream may repeat
                at = draw.randint(at, 39)
                changed = view.apply(WatchBatch(39, tuple(events[start:at])))
            assert view.kvs == states[view.revision]
            assert changed or view.kvs == before
            assert view.revision == at
