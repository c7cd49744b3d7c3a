"""Whatever bytes arrive: a message of ours, or a refusal; never another exception."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphft.runtime.protocol.messages import Hello, Ledger, PartialsQuery, Push, Query, encode, refusal_of_stranger
from graphft.runtime.transport.address import advertise_host, endpoint, is_loopback, listen_host, split_endpoint
from graphft.runtime.transport.port import Limits
from graphft.runtime.transport.wire import Malformed, parse


@pytest.mark.parametrize(
    ("address", "parts"),
    [("tcp://10.0.0.1:80", ("10.0.0.1", 80)), ("tcp://[::1]:65535", ("::1", 65535)), ("tcp://node7:1", ("node7", 1))],
)
def test_addresses_split_and_join(address: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(address) == parts
    assert endpoint(*parts) == address


def test_the_host_to_advertise_and_to_listen_on() -> None:
    assert advertise_host(environ={"GRAPHFT_HOST": "node7"}) == listen_host([], {"GRAPHFT_HOST": "node7"}) == "node7"
    assert advertise_host(["127.0.0.1"], environ={}) == listen_host(["127.0.0.1"], environ={}) == "127.0.0.1"
    assert advertise_host(["host.invalid"], environ={}) == advertise_host(environ={}) == "127.0.0.1"
    outside = advertise_host(["127.0.0.1", "192.0.2.1"], environ={})  # loopback on a machine without a network
    assert outside == advertise_host(["192.0.2.1"], environ={})
    for wildcard in ("0.0.0.0", "*"):
        assert listen_host(["127.0.0.1"], environ={"GRAPHFT_HOST": wildcard}) == wildcard
        assert advertise_host(["127.0.0.1"], environ={"GRAPHFT_HOST": wildcard}) == "127.0.0.1"


def test_loopback_is_known() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "node7", "fe80::1%eth0"]))


VALID = [
    encode(m)
    for m in (
        Hello("run", "t"),
        Query(),
        Push(1, 2, 3, 4, 5, True),
        PartialsQuery(1, 2, 0),
        Ledger(0, 1, [(0, 2), (5, 9)]),
    )
]


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda data, at, new: data[: at % len(data)] + new + data[at % len(data) + 1 :],
            st.sampled_from(VALID),
            st.integers(0, 50),
            st.binary(max_size=12),
        ),
    )
)
@example(b"\x93\xa9partials?\x01" + b"\xcf" + b"\xff" * 8)  # 2**64 - 1, and a field too few
@example(b"\x95\xa9partials?\x01\x02\x03\x04")
@example(b"\x94\xa6ledger\x00\x00\xdd\xff\xff\xff\xff")  # a list of four billion ranges, of which none is there
@example(b"\x94\xa6ledger\x00\x00" + b"\x91" * 10_000)
@example(b"\xc7\xff\x01" + b"x" * 255)
@example(b"\x93\xa6ledger\xd9\xff")
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    try:
        message, frame = parse([memoryview(data)], Limits())
    except Malformed:
        message, frame = refusal_of_stranger("malformed"), None
        told = (message.reason, message.generation, message.version)
    else:
        told = ("", -1, -1)
    assert told == ("", -1, -1), "a refusal tells nothing"
    assert frame is None
    assert parse([memoryview(encode(message))], Limits())[0] == message
