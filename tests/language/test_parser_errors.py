"""Every mistake in a text is reported with its line and column."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from graphft.ir.parser import ParseError, parse
from tests.support.golden import assert_golden

HEAD = "program p\n"
STEP = "program p\nblock step:\n"

CASES = [
    ("", 1, 1),
    ("block step:\n", 1, 1),
    (HEAD + "  send(%x)\n", 2, 3),
    (HEAD + "what %x: int\n", 2, 1),
    (HEAD + "param %x: 8\n", 2, 11),
    (HEAD + "param %x: float32[a;b]\n", 2, 18),
    (HEAD + "param %x: float32[1\n", 2, 18),
    (HEAD + "param %x: int\nparam %x: int\n", 3, 7),
    (HEAD + "param %x: int {a = 1, a = 2}\n", 2, 23),
    (HEAD + "param %x: int {a = 1\n", 2, 21),
    (STEP + "block step:\n", 3, 7),
    (STEP + "param %x: int\n", 3, 1),
    (STEP + "  %t: int, = f()\n", 3, 12),
    (STEP + "  %t: int f()\n", 3, 11),
    (STEP + "  %t: int = f()\n  %t: bool = f()\n", 4, 7),
    (STEP + "  f(1 2)\n", 3, 7),
    (STEP + "  f(,)\n", 3, 5),
    (STEP + "  f((1))\n", 3, 7),
    (STEP + "  f(1_000)\n", 3, 5),
    (STEP + '  f("abc)\n', 3, 5),
    (STEP + '  f("a\\qb")\n', 3, 5),
    (STEP + "  f(" + "9" * 5000 + ")\n", 3, 5),
    (STEP + "  f(" + "(" * 1000 + ")\n", 3, 70),
    (STEP + "  f(__import__('os'))\n", 3, 15),
]


@pytest.mark.parametrize(("text", "line", "column"), CASES, ids=range(len(CASES)))
def test_error_says_where(text: str, line: int, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text, "file.gft")
    assert caught.value.message.startswith(f"file.gft:{line}:{column}: expected "), caught.value.message


VALID = """program p {seed = 0, note = "a\\"b"}
param %w: float32[2*batch, Max(1, 8)] {trainable = true}
block step {interval = 0.5}:
  %t: float32[8], _, %u: chunk = aten.t(%w, (1, (2,)), -1e-05, torch.float32)
  send(%t) {shard = none}
"""


@settings(max_examples=300)
@given(st.data())
def test_damaged_text_gives_a_parse_error_or_a_program(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + data.draw(st.text('(){}[]%,=:"\\_ \n#abx01.-', max_size=4)) + text[end:]
    with contextlib.suppress(ParseError):
        found = parse(text)
        assert parse(str(found)) == found


def test_golden_text_of_a_parse_error() -> None:
    with pytest.raises(ParseError) as caught:
        parse(STEP + "\tsend(%x, 'single') {shard = 0}\n", "trainer.gft")
    assert_golden(str(caught.value), "language_parse_error")
