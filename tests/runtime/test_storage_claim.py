"""Of machines that share nothing but a job's storage, one runs the job."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination import storage_claim
from graphft.runtime.coordination.storage_claim import (
    Claim,
    StorageClaim,
    check_claim,
    claim_elsewhere,
    claimed,
    forget_claim,
    is_away,
    newest_claim,
)
from graphft.runtime.fs import LocalFS
from graphft.runtime.process.identity import Identity, identify
from graphft.transpiler.record import MARKER
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.02), ("SILENT", 60.0), ("LOOK", 0.01)):
        monkeypatch.setattr(storage_claim, name, seconds)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    path.mkdir()
    (path / "job.json").touch()
    return path


def machine(place: Path, name: str) -> Path:
    """A copy of the job's folder."""
    folder = place.parent / name
    folder.mkdir(exist_ok=True)
    (folder / MARKER).write_text(json.dumps({"url": f"file://{place}"}))
    return folder


def write_claim(place: Path, number: int, process: Identity) -> None:
    (place / f"running-{number}.json").write_bytes(msgspec.json.encode(Claim(number, "far", process)))


def write_local(folder: Path, number: int) -> None:
    (folder / "storage-claim.json").write_bytes(msgspec.json.encode(Claim(number, "far", ELSEWHERE)))


def names(place: Path) -> list[str]:
    """But for the job's record, and what is being written."""
    return sorted(path.name for path in place.iterdir() if not path.name.startswith(".") and path.name != "job.json")


def test_it_is_left_to_a_storage_that_hangs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's end waited for it."""
    answers = threading.Event()
    with claimed(machine(place, "one"), None):
        monkeypatch.setattr(storage_claim, "LEAVE", 0.1)
        monkeypatch.setattr(LocalFS, "delete", lambda *_: answers.wait(120))
    answers.set()
    assert names(place) == ["running-1.beat", "running-1.json"]  # over in SILENT seconds


ELSEWHERE = Identity("another machine", "1", 12, 3)


def test_it_is_there_while_the_job_runs(place: Path) -> None:
    folder = machine(place, "one")
    with claimed(folder, None) as claim:
        assert claim is not None
        assert names(place) == ["running-1.beat", "running-1.json"]
        first = (place / "running-1.beat").read_text()
        until(lambda: (place / "running-1.beat").read_text() not in ("", first))
        check_claim(folder)
        assert claim_elsewhere(machine(place, "two")) == str(claim.claim)
    assert names(place) == []
    assert claim_elsewhere(folder) == ""
    check_claim(folder)
    with claimed(place.parent / "without-a-storage", None) as claim:
        assert claim is None


def test_of_a_launcher_that_is_dead_it_is_over(place: Path) -> None:
    write_claim(place, 7, msgspec.structs.replace(identify(), started=1))
    with claimed(machine(place, "one"), None):
        assert names(place) == ["running-8.beat", "running-8.json"]


def test_while_another_machine_runs_the_job_this_one_waits(place: Path) -> None:
    told: list[str] = []
    began = threading.Event()

    def second() -> None:
        with claimed(machine(place, "two"), told.append):
            began.set()

    with claimed(machine(place, "one"), None) as claim:
        assert claim is not None
        who = rf"is being run by pid {claim.claim.process.pid} on host "
        with pytest.raises(UsageError, match=who), claimed(machine(place, "two"), None):
            pass
        thread = threading.Thread(target=second)
        thread.start()
        until(lambda: bool(told))
        assert not began.is_set()
        assert not claim.lost
    thread.join(120)
    assert began.is_set()
    assert told == [str(claim.claim)]


def test_who_waits_can_be_told_to_end(place: Path) -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with claimed(machine(place, "one"), None):
        with pytest.raises(KeyboardInterrupt), claimed(machine(place, "two"), lambda holder: None, look):
            pass
        assert len(names(place)) == 2, "it has claimed nothing"


def test_a_launcher_that_stood_still_finds_who_followed_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pservers commit nothing from that moment on, also before it finds it."""
    monkeypatch.setattr(storage_claim, "SILENT", 1.0)
    monkeypatch.setattr(storage_claim, "BEAT", 3600.0)
    one, two = machine(place, "one"), machine(place, "two")
    frozen = StorageClaim(one, f"file://{place}")
    frozen.take(None)
    elsewhere = msgspec.structs.replace(frozen.claim, process=ELSEWHERE)
    write_claim(place, 1, ELSEWHERE)
    (one / "storage-claim.json").write_bytes(msgspec.json.encode(elsewhere))
    frozen.claim = elsewhere
    monkeypatch.setattr(storage_claim, "BEAT", 0.02)
    with claimed(two, None):
        with pytest.raises(OSError, match="runs the job in this storage: checkpoints of this machine do not count"):
            check_claim(one)
        check_claim(two)
        frozen._beat()
        assert "stood still: pid" in frozen.lost
        frozen._closed.set()
        frozen.close()
        assert names(place) == ["running-2.beat", "running-2.json"], "it leaves the other's alone"
    late = StorageClaim(one, f"file://{place}")
    late.claim = elsewhere
    late._beat()
    assert "its claim was deleted" in late.lost, "the other has even ended"


def test_of_two_that_follow_one_does(place: Path) -> None:
    write_claim(place, 1, ELSEWHERE)
    claims = [StorageClaim(machine(place, name), f"file://{place}") for name in ("one", "two")]
    before = newest_claim(LocalFS(), str(place))
    assert claims[0]._follow(before)
    assert not claims[1]._follow(before)
    with pytest.raises(UsageError, match="is being run by"):
        claims[1].take(None)
    assert names(place) == ["running-2.beat", "running-2.json"]
    claims[0].close()
    write_local(claims[1].job_dir, 1)
    with pytest.raises(OSError, match="another machine has run the job"):
        check_claim(claims[1].job_dir)
    forget_claim(claims[1].job_dir)
    check_claim(claims[1].job_dir)


@pytest.mark.parametrize("damage", [b"{", b'{"number":1,"host":"\xff"}', b"", b"[]"])
def test_a_claim_that_is_damaged_is_its_launchers_all_the_same(place: Path, damage: bytes) -> None:
    """One flipped bit killed the pservers of a healthy job at each checkpoint, until it failed."""
    folder = machine(place, "one")
    with claimed(folder, None) as claim:
        assert claim is not None
        whole = (place / "running-1.json").read_bytes()
        (place / "running-1.json").write_bytes(damage)
        check_claim(folder)
        with pytest.raises(UsageError, match="is being run by"), claimed(machine(place, "two"), None):
            pass
        until(lambda: (place / "running-1.json").read_bytes() == whole)
        assert not claim.lost
    assert names(place) == []


def test_a_damaged_claim_of_a_machine_that_is_gone_is_over(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_claim, "SILENT", 1.0)
    (place / "running-1.json").write_text("{")
    with claimed(machine(place, "one"), None):
        assert names(place) == ["running-2.beat", "running-2.json"]


@contextlib.contextmanager
def beating(claim: StorageClaim, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a claim whose own thread waits. At the end no beat is under way, which would meet what changes next."""
    monkeypatch.setattr(storage_claim, "BEAT", 0.02)
    thread = threading.Thread(target=claim._beat)
    thread.start()
    yield
    claim._closed.set()
    thread.join()
    claim._closed.clear()


def test_while_the_storage_is_away_nothing_follows_from_that(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is not mounted is an empty folder. The job was ended: 'its claim was deleted'."""
    folder, looks = machine(place, "one"), []
    monkeypatch.setattr(storage_claim, "is_away", lambda *at: looks.append(at) or is_away(*at))
    monkeypatch.setattr(storage_claim, "BEAT", 3600.0)
    with claimed(folder, None) as claim:
        assert claim is not None
        place.rename(place.parent / "away")
        place.mkdir()
        with pytest.raises(OSError, match=r"nothing of the job is in file://.*: is its file system mounted"):
            check_claim(folder)
        with beating(claim, monkeypatch):
            until(lambda: len(looks) > 3 or claim.lost)
        assert not claim.lost
        assert names(place) == [], "nothing is written there"
        place.rmdir()
        (place.parent / "away").rename(place)
        with beating(claim, monkeypatch):
            first = (place / "running-1.beat").read_text()
            until(lambda: (place / "running-1.beat").read_text() not in ("", first))
        check_claim(folder)
    assert names(place) == []


def test_a_storage_that_comes_back_between_two_looks_has_its_claim(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look found no claim in the empty folder, the second the job's record: 'its claim was deleted'."""
    folder, away = machine(place, "one"), place.parent / "away"
    monkeypatch.setattr(storage_claim, "BEAT", 3600.0)
    with claimed(folder, None):
        place.rename(away)
        place.mkdir()

        def comes_back(*at: Any) -> bool:
            place.rmdir()
            away.rename(place)
            return is_away(*at)

        monkeypatch.setattr(storage_claim, "is_away", comes_back)
        check_claim(folder)
