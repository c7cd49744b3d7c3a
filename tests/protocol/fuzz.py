"""Messages of every kind with any values; and what every message that is sent must be."""

from __future__ import annotations

import random
from typing import Any, get_args, get_type_hints

import hypothesis.strategies as st
import msgspec

from graphft.runtime.protocol.messages import WITH_A_FRAME, AnyMessage, Code, Message, decode, encode

KINDS = get_args(AnyMessage)
FIELDS = {kind: get_type_hints(kind) for kind in KINDS}
TEXTS = ["", "j", "p", "a", "shard-1", "i0", "A", "x" * 3000]
SEEDS = st.integers(0, 2**32 - 1)
"""Draws a handful of messages. One draw of them all: so many single ones would take longer than what they test."""


def messages(seed: int, *expected: type[Message]) -> list[tuple[Message, Any]]:
    """Twenty messages with their frames, but for those that cannot be decoded: of every kind, the `expected` ones more
    often. Values are mostly what the machines under test are about, so that a wrong one meets right ones; frames are
    mostly where they belong."""
    rng = random.Random(seed)
    made: list[tuple[Message, Any]] = []
    for kind in rng.choices([*KINDS, *expected * 6], k=20):
        message = kind(**{name: _value(rng, name, hint) for name, hint in FIELDS[kind].items()})
        try:
            decode(encode(message))
        except msgspec.ValidationError:
            continue
        right = b"frame" if isinstance(message, WITH_A_FRAME) else None
        made.append((message, rng.choice([None, b"", b"frame"]) if rng.random() < 0.1 else right))
    return made


def _value(rng: random.Random, name: str, hint: Any) -> Any:
    if name == "code":
        return rng.choice(get_args(Code))
    if hint is int:
        edges = [-(2**63), -2, -1, 3, 4, 5, 2**31 - 1, 2**63 - 1]
        return rng.choice(edges) if rng.random() < 0.2 else rng.choice([0, 0, 1, 1, 2, 2])
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice(TEXTS)
    return [(_value(rng, "", int), _value(rng, "", int)) for _ in range(rng.randrange(3))]


def check_sent(message: Message) -> None:
    """Its receiver can read it, and it has a bound."""
    data = encode(message)
    assert decode(data) == message
    assert len(data) < 2000, "a peer's text is not sent back in full length, over and over"
