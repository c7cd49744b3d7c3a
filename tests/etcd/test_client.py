"""Outcomes of calls when answers, requests or the server are lost; login, TLS, endpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from etcd.servers import enable_login, value

from graphft.runtime.cli import main
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.status import unknown_job
from graphft.runtime.etcd import (
    Ambiguous,
    EmbeddedEtcd,
    Etcd,
    EtcdError,
    EtcdUnreachable,
    TransientEtcdError,
    Watch,
    absent,
    free_ports,
    get_op,
    put_op,
)
from graphft.runtime.etcd.channel import Endpoint, target_of
from tests.support.proxy import Proxy
from tests.support.waiting import until

HERE = Path(__file__).parent


@pytest.fixture
def proxy(etcd_server: EmbeddedEtcd) -> Iterator[Proxy]:
    with Proxy(etcd_server.endpoints[0]) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: Proxy) -> Iterator[Etcd]:
    """A client behind the proxy, connected, with short tries."""
    with Etcd([proxy.endpoint], timeout=0.3, deadline=60) as client:
        client.ping(deadline=60)
        yield client


def heal_after(proxy: Proxy, seconds: float) -> None:
    threading.Timer(seconds, proxy.heal).start()


def test_nobody_there_is_a_clear_error_soon() -> None:
    (port,) = free_ports(1)
    with Etcd([f"127.0.0.1:{port}"]) as client:
        started = time.monotonic()
        with pytest.raises(EtcdUnreachable) as caught:
            client.ping(deadline=0.5)
        assert time.monotonic() - started < 30
        assert f"127.0.0.1:{port}" in str(caught.value)
        with pytest.raises(EtcdUnreachable):  # never sent, hence not ambiguous
            client.txn([], [put_op("/a", b"")], deadline=0.3)


class NoAnswer(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = (lambda: code), (lambda: details)


@pytest.mark.parametrize("waiting", [0, 2])
def test_tries_wait_for_a_connection_and_tell_why_there_is_none(waiting: int) -> None:
    """gRPC before 1.80 connects only while a call waits; a call that waits is not told what is wrong."""
    tries: list[bool] = []

    def method(request: object, *, wait_for_ready: bool, **rest: object) -> str:
        tries.append(wait_for_ready)
        if not wait_for_ready:
            raise NoAnswer(grpc.StatusCode.UNAVAILABLE, "a bad certificate")
        if tries.count(True) <= waiting:
            raise NoAnswer(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        return "answer"

    with Etcd(["127.0.0.1:1"]) as client:
        assert client.repeat(method, None, deadline=60) == "answer"
        assert tries == [False, True] * (waiting + 1)
        tries.clear()
        waiting = 1 << 30
        with pytest.raises(EtcdUnreachable, match="UNAVAILABLE, a bad certificate"):
            client.repeat(method, None, deadline=0.2)
        assert True in tries


def test_reads_and_puts_outlast_lost_answers(far: Etcd, proxy: Proxy, prefix: str) -> None:
    far.put(prefix + "a", b"1")
    proxy.drop_replies = True
    heal_after(proxy, 0.7)
    assert value(far, prefix + "a") == b"1"
    proxy.drop_requests = True
    heal_after(proxy, 0.7)
    far.put(prefix + "a", b"2")
    assert value(far, prefix + "a") == b"2"


def test_txn_whose_answer_is_lost_is_ambiguous(far: Etcd, proxy: Proxy, etcd: Etcd, prefix: str) -> None:
    proxy.drop_replies = True
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(far.txn, [absent(prefix + "a")], [put_op(prefix + "a", b"me")], deadline=60)
        until(lambda: etcd.get(prefix + "a"))  # this one was applied
        proxy.cut()
        with pytest.raises(Ambiguous):
            sent.result()
    with pytest.raises(EtcdUnreachable):  # and now that nothing gets through, nothing is sent
        far.txn([absent(prefix + "b")], [put_op(prefix + "b", b"me")], deadline=0.5)
    proxy.heal()
    assert etcd.get(prefix + "b") is None


def test_a_token_finds_the_try_whose_answer_was_lost(far: Etcd, proxy: Proxy, etcd: Etcd, prefix: str) -> None:
    key = prefix + "claim"
    proxy.drop_replies = True
    heal_after(proxy, 0.7)
    done = far.txn([absent(key)], [put_op(key, b"me, 1"), put_op(prefix + "b", b"")], token=key)
    assert done.ok
    assert [(kv.version, kv.mod_revision) for kv in etcd.range(key).kvs] == [(1, done.revision)]


def test_a_token_does_not_claim_what_another_took(far: Etcd, proxy: Proxy, etcd: Etcd, prefix: str) -> None:
    key = prefix + "claim"
    proxy.drop_requests = True
    threading.Timer(0.7, lambda: (etcd.put(key, b"you"), proxy.heal())).start()
    done = far.txn([absent(key)], [put_op(key, b"me, 1")], [get_op(prefix + "none"), get_op(key)], token=key)
    assert not done.ok
    assert [kv and kv.value for kv in map(done.kv, range(len(done.responses)))] == [None, b"you"]


FORKED = """
import os, sys
from graphft.runtime.etcd import Etcd, EtcdError
client = Etcd(sys.argv[1:])
client.ping(deadline=60)
if os.fork() == 0:
    try:
        client.get("/a")
    except EtcdError as e:
        os.write(1, e.rule.encode())
    os._exit(0)
os.wait()
client.ping(deadline=60)
"""


def test_use_in_a_forked_child_is_refused(etcd_server: EmbeddedEtcd) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, *etcd_server.endpoints], capture_output=True, timeout=120)
    assert done.stdout == b"etcd-fork"
    assert done.returncode == 0, done.stderr


def test_login(tmp_path: Path) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        enable_login(server)
        patience = {"timeout": 10, "deadline": 60}
        for user, password, rule in (
            (None, None, "etcd-request"),
            ("root", "wrong", "etcd-request"),
            ("guest", "guest", "etcd-denied"),
        ):
            with Etcd(server.endpoints, user, password, **patience) as client, pytest.raises(EtcdError) as caught:
                client.get("/a")
            assert caught.value.rule == rule
            assert not isinstance(caught.value, TransientEtcdError)
        friend = Etcd(server.endpoints, user="root", password="secret", **patience)
        with friend as client, Watch(client, "/") as watch:
            client.put("/a", b"1")
            assert watch.wait(lambda view: "/a" in view, 60)
            server.restart()  # which forgets the tokens it gave
            client.put("/b", b"2")
            assert watch.wait(lambda view: "/b" in view, 60)
            lease, _ = client.lease_grant(60)
            assert client.lease_keepalive_once(lease) == 60


def test_a_user_of_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedEtcd(tmp_path) as server:
        command = ["etcd-user", "mine", "--etcd", ",".join(server.endpoints)]
        assert main(command) == 0
        assert "auth enable" in capsys.readouterr().err
        enable_login(server)
        for name, value in (("USER", "root"), ("PASSWORD", "secret")):
            monkeypatch.setenv(f"GRAPHFT_ETCD_{name}", value)
        assert main(command) == 0  # a new password
        told = dict(line.removeprefix("export ").split("=", 1) for line in capsys.readouterr().out.splitlines())
        user, password = told["GRAPHFT_ETCD_USER"], told["GRAPHFT_ETCD_PASSWORD"]
        with Etcd(server.endpoints, user, password, timeout=10, deadline=60) as client:
            for key in ("/mine/spec", "/mine.events/1"):
                client.put(key, b"1")
                assert [kv.key for kv in client.range(key).kvs] == [key]
            for key in ("/mine-2/spec", "/min", "/other/spec"):
                with pytest.raises(EtcdError) as caught:
                    client.put(key, b"1")
                assert caught.value.rule == "etcd-denied"
            assert "may not see" in str(unknown_job(client, Keys("mine")).help)


def test_tls(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"https://127.0.0.1:{port}"
    key, certificate = str(HERE / "tls" / "key.pem"), str(HERE / "tls" / "cert.pem")
    options = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}", "--client-cert-auth"]
    options += [f"--key-file={key}", f"--cert-file={certificate}", f"--trusted-ca-file={certificate}"]
    server = EmbeddedEtcd(tmp_path, options=options)
    server.launch()
    try:
        with Etcd([url, url], ca_cert=certificate, cert_key=key, cert_cert=certificate, deadline=60) as client:
            client.ping(deadline=60)
            client.put("/a", b"1")
            with Watch(client, "/") as watch:
                assert set(watch.snapshot()) == {"/a"}
        for ca_cert in (None, certificate):  # nobody vouches for the server, nor for the client
            with Etcd([url], ca_cert=ca_cert) as client, pytest.raises(EtcdUnreachable):
                client.ping(deadline=0.3)
    finally:
        server.kill()


def test_targets() -> None:
    assert target_of([Endpoint("127.0.0.1", 1), Endpoint("127.0.0.2", 2)]) == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert target_of([Endpoint("::1", 1), Endpoint("::1", 2)]) == "ipv6:[::1]:1,[::1]:2"
    assert target_of([Endpoint("etcd.example", 1)]) == "dns:///etcd.example:1"
    for other in ("::1", "no-such-host.invalid", "a..b"):
        with pytest.raises(EtcdUnreachable):
            target_of([Endpoint("127.0.0.1", 1), Endpoint(other, 1)])


@pytest.mark.parametrize(
    ("endpoints", "options", "rule"),
    [
        *(([text], {}, "etcd-endpoint") for text in ("", "a:b", "a:0", "a:65536", "ftp://a:1", "::1", "a:1/b")),
        ([], {}, "etcd-endpoint"),
        ("127.0.0.1:1", {}, "etcd-endpoint"),
        (["http://127.0.0.1:1", "https://127.0.0.1:2"], {}, "etcd-tls"),
        (["127.0.0.1:1"], {"ca_cert": os.devnull + "/none"}, "etcd-tls"),
        (["127.0.0.1:1"], {"cert_key": os.devnull}, "etcd-tls"),
    ],
)
def test_bad_options(endpoints: list[str], options: dict[str, str], rule: str) -> None:
    with pytest.raises(EtcdError) as caught:
        Etcd(endpoints, **options)
    assert caught.value.rule == rule
