"""Whatever bytes arrive: a message of ours, or a refusal; never another exception."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transport.rigs import LIMITS

from graphft.runtime.protocol.messages import (
    BatchAck,
    Hello,
    Ledger,
    Message,
    Parameters,
    PartialsQuery,
    Push,
    Query,
    Refused,
    Welcome,
    encode,
)
from graphft.runtime.transport.address import advertise_host, endpoint, is_loopback, listen_host, split_endpoint
from graphft.runtime.transport.port import Limits
from graphft.runtime.transport.zeromq import Malformed, accept, parse

NUMBER = st.integers(-(2**63), 2**63 - 1)
MESSAGES = st.one_of(
    st.builds(Push, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.booleans()),
    st.builds(Refused, st.text(), st.text(), NUMBER, NUMBER),
    st.builds(Parameters, NUMBER, NUMBER, NUMBER),
    st.builds(Welcome, NUMBER, st.text(), NUMBER, NUMBER),
    st.builds(Query),
    st.builds(BatchAck, NUMBER, NUMBER, NUMBER, NUMBER, st.booleans()),
    st.builds(Ledger, NUMBER, NUMBER, st.lists(st.tuples(NUMBER, NUMBER))),
)


def outcome(parts: list[bytes]) -> tuple[str, Counter[str]]:
    """How the parts are counted: received, or the reason of the refusal."""
    counters: Counter[str] = Counter()
    try:
        message, _ = accept([memoryview(p) for p in parts], LIMITS, counters)
    except Malformed as e:
        return e.reason, counters
    return ("received" if isinstance(message, Message) else "something else"), counters


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_parts_are_messages_or_malformed(parts: list[bytes]) -> None:
    what, counters = outcome(parts)
    assert what in ("received", "parts", "undecodable")
    assert counters["received" if what == "received" else f"refused.{what}"] == 1


@given(MESSAGES, st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_header_is_a_message_or_malformed(message: Message, where: int, value: int) -> None:
    header = bytearray(encode(message))
    assert parse([memoryview(header)], LIMITS) == (message, None)
    header[where % len(header)] = value
    assert outcome([bytes(header)])[0] in ("received", "undecodable")


@given(MESSAGES, st.integers(1, 100))
def test_a_cut_header_is_malformed(message: Message, cut: int) -> None:
    header = encode(message)
    with pytest.raises(Malformed):
        parse([memoryview(header[: max(0, len(header) - cut)])], LIMITS)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("tcp://10.0.0.1:80", ("10.0.0.1", 80)), ("tcp://[::1]:65535", ("::1", 65535)), ("tcp://node7:1", ("node7", 1))],
)
def test_addresses_split_and_join(address: str, parts: tuple[str, int]) -> None:
    assert split_endpoint(address) == parts
    assert endpoint(*parts) == address


def test_the_host_to_advertise() -> None:
    """Where the way to etcd begins; loopback when etcd is there, whatever else this machine has."""
    assert advertise_host(environ={"GRAPHFT_HOST": "node7"}) == "node7"
    assert advertise_host(["127.0.0.1"], environ={}) == "127.0.0.1"
    assert advertise_host(["host.invalid", "localhost"], environ={}) in ("127.0.0.1", "::1")
    assert advertise_host(["host.invalid"], environ={}) == advertise_host(environ={}) == "127.0.0.1"
    outside = advertise_host(["127.0.0.1", "192.0.2.1"], environ={})  # loopback on a machine without a network
    assert outside == advertise_host(["192.0.2.1"], environ={})


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "*"])
def test_every_interface_is_listened_on_only_when_asked_for(wildcard: str) -> None:
    """What others are told is an address all the same."""
    assert listen_host(["127.0.0.1"], environ={"GRAPHFT_HOST": wildcard}) == wildcard
    assert advertise_host(["127.0.0.1"], environ={"GRAPHFT_HOST": wildcard}) == "127.0.0.1"
    assert listen_host(["127.0.0.1"], environ={}) == "127.0.0.1"
    assert listen_host(["127.0.0.1"], environ={"GRAPHFT_HOST": "node7"}) == "node7"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node7", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


VALID = [
    encode(m)
    for m in (
        Hello("run", "secret", "t"),
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
    """Whatever else were raised here would end the role that reads it."""
    try:
        message, frame = parse([memoryview(data)], Limits())
    except Malformed as error:
        message, frame = error.refusal(), None
        told = (message.reason, message.generation, message.version)
    else:
        told = ("", -1, -1)
    assert told == ("", -1, -1), "a refusal tells nothing"
    assert frame is None
    assert parse([memoryview(encode(message))], Limits())[0] == message
