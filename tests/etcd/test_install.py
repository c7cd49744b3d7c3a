"""Which etcd is used, and how one is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.cli import main
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError, binary, find_etcd
from graphft.runtime.etcd.binary import cache_dir, fetch_etcd, trusted


def test_trusted_versions() -> None:
    good = [(3, 4, 21), (3, 4, 30), (3, 5, 6), (3, 6, 0)]
    bad = [(3, 3, 25), (3, 4, 20), (3, 5, 0), (3, 5, 5)]
    assert [version for version in good + bad if trusted(version)] == good


def program(folder: Path, version: str) -> Path:
    """A program that says that it is this version of etcd."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "etcd"
    path.write_text(f"#!/bin/sh\necho etcd Version: {version}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any etcd."""
    monkeypatch.delenv("ETCD_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(binary, "checkout_dir", lambda: tmp_path / ".etcd")
    return tmp_path


def test_order_of_search(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(bare / "cache" / "graphft" / "etcd" / "usr" / "bin", "3.4.23")
    assert find_etcd().path == cached
    unpacked = program(bare / ".etcd" / "usr" / "bin", "3.5.16")
    assert find_etcd().path == unpacked
    program(bare / "bin", "3.5.1")  # on PATH, but of a version that loses data
    assert find_etcd().path == unpacked
    on_path = program(bare / "bin", "3.6.1")
    assert (find_etcd().path, find_etcd().version) == (on_path, (3, 6, 1))
    chosen = program(bare / "chosen", "3.4.30")
    monkeypatch.setenv("ETCD_BIN", str(chosen))
    assert find_etcd().path == chosen


def test_a_chosen_etcd_must_be_good(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_BIN", str(program(bare / "chosen", "3.5.2")))
    with pytest.raises(EtcdError, match=r"3\.5\.2, which may lose data") as caught:
        find_etcd()
    assert "ETCD_BIN" in caught.value.help
    monkeypatch.setenv("ETCD_BIN", str(bare / "nothing"))
    with pytest.raises(EtcdError, match="not a working etcd"):
        find_etcd()


def test_no_etcd_at_all(bare: Path, tmp_path: Path) -> None:
    program(bare / "bin", "3.3.25")
    with pytest.raises(EtcdError, match=r"3\.3\.25") as caught:
        EmbeddedEtcd(tmp_path).start()
    assert "apt-get install etcd-server" in caught.value.help


def test_fetch_says_why_it_cannot(bare: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EtcdError, match="no apt-get"):
        fetch_etcd(bare / "dest")
    for name in ("apt-get", "dpkg"):
        path = program(bare / "bin", "")
        path.rename(bare / "bin" / name)
        (bare / "bin" / name).write_text("#!/bin/sh\necho E: no network >&2\nexit 100\n")
    with pytest.raises(EtcdError, match="E: no network"):
        fetch_etcd(bare / "dest")
    assert not (bare / "dest").exists()


def distribution(folder: Path) -> None:
    """An apt-get that has the package; a dpkg that unpacks an etcd."""
    folder.mkdir(exist_ok=True)
    (folder / "apt-get").write_text("#!/bin/sh\n> etcd-server_3_amd64.deb\n")
    unpack = f"/bin/mkdir -p $3/usr/bin && /bin/cp {program(folder / 'unpacked', '3.4.23')} $3/usr/bin/etcd"
    (folder / "dpkg").write_text(f"#!/bin/sh\n{unpack}\n")
    for name in ("apt-get", "dpkg"):
        (folder / name).chmod(0o755)


def test_an_installation_without_a_checkout_gets_etcd_by_one_command(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lands where every later start looks for it."""
    assert main(["etcd"]) == 2
    assert "help: graphft etcd --install puts one into your cache" in capsys.readouterr().err
    distribution(bare / "bin")
    installed = cache_dir() / "usr" / "bin" / "etcd"
    for arguments in (["etcd", "--install"], ["etcd"], ["etcd", "--install"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"etcd 3.4.23: {installed}\n"
    assert find_etcd().path == installed


def test_installing_uses_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["etcd", "--install", "--to", str(tmp_path)]) == 0
    assert str(find_etcd().path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_installing_fails_clearly(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ETCD_BIN", str(bare / "nothing"))
    assert main(["etcd", "--install", "--to", str(bare)]) == 2
    assert "not a working etcd" in capsys.readouterr().err
    assert main(["etcd", "--to", str(bare)]) == 2
    assert "--to is for --install" in capsys.readouterr().err
