"""Messages of every kind with any values, and what every effect must be, so that a driver can carry it out."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import hypothesis.strategies as st

from graphft.runtime.protocol.messages import CODES, AnyMessage, Message, decode, encode

KINDS = get_args(AnyMessage)
EDGES = [-(2**63), -2, 5, 2**31 - 1, 2**63 - 1]
INTS = st.sampled_from([-1, *[0] * 6, *[1] * 6, *[2] * 4, 3, 4, *EDGES])
"""Mostly what the machines under test are about, so that a wrong value meets right ones."""
TEXTS = st.sampled_from(["", "j", "p", "a", "shard-1", "i0", "A", "x" * 3000])
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS, bool: st.booleans(), str: TEXTS, list[tuple[int, int]]: st.lists(st.tuples(INTS, INTS), max_size=3)}

PAYLOADS = st.sampled_from([None, b"", b"frame"])
FIELDS = {kind: st.fixed_dictionaries({
    name: st.sampled_from([*sorted(CODES), "", "x" * 3000]) if name == "code" else VALUES[hint]
    for name, hint in get_type_hints(kind).items()}) for kind in KINDS}


def any_messages(*expected: type[Message]) -> st.SearchStrategy[list[tuple[Message, Any]]]:
    """A few messages with their frames: of every kind, the `expected` ones more often; every field by itself."""
    kinds = st.sampled_from([*KINDS, *expected * 6])
    return st.lists(st.tuples(kinds.flatmap(_of_kind), PAYLOADS), min_size=1, max_size=6)


def _of_kind(kind: type[Message]) -> st.SearchStrategy[Message]:
    return FIELDS[kind].map(lambda fields: kind(**fields))


def check_sent(message: Message) -> None:
    """What a machine sends is a message that its receiver can read, and has a bound."""
    data = encode(message)
    assert decode(data) == message
    assert len(data) < 2000, "a peer's text is not sent back in full length, over and over"
