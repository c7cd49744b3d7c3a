"""Every mistake in a text is reported with its line, column and a caret."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.ir.parser import ParseError, parse
from tests.support.golden import assert_golden

HEAD = "program p\n"
STEP = "program p\nblock step:\n"

CASES = [
    ("", 1, 1, "got the end of the text"),
    ("# only a comment\n", 2, 1, "got the end of the text"),
    ("block step:\n", 1, 1, "expected `program NAME`, got 'block'"),
    ("program\n", 1, 8, "expected the program's name, got the end of the line"),
    ("program p q\n", 1, 11, "expected the end of the line, got 'q'"),
    (HEAD + "  send(%x)\n", 2, 3, "outside of any block"),
    (HEAD + "what %x: int\n", 2, 1, "expected an op, a block or a declaration"),
    (HEAD + "param x: int\n", 2, 7, "expected a variable (%name), got 'x'"),
    (HEAD + "param %: int\n", 2, 8, "expected a name after %"),
    (HEAD + "param %x int\n", 2, 10, "expected ':' and the variable's type, got 'int'"),
    (HEAD + "param %x: 8\n", 2, 11, "expected a type"),
    (HEAD + "param %x: float32[a;b]\n", 2, 19, "expected a dimension"),
    (HEAD + "param %x: float32[1, \n", 2, 22, "expected a dimension"),
    (HEAD + "param %x: float32[1\n", 2, 20, "expected ',' or ']'"),
    (HEAD + "param %x: int\nparam %x: int\n", 3, 7, "%x is declared twice"),
    (HEAD + "param %x: int {a = 1, a = 2}\n", 2, 23, "attribute a is given twice"),
    (HEAD + "param %x: int {a 1}\n", 2, 18, "expected '=' after a, got '1'"),
    (HEAD + "param %x: int {a = 1\n", 2, 21, "expected ',' or '}' after an attribute"),
    (HEAD + "block step\n", 2, 11, "expected ':' after the block's head"),
    (STEP + "block step:\n", 3, 7, "block step stands here a second time"),
    (STEP + "param %x: int\n", 3, 1, "expected an op or a block"),
    (STEP + "  %t: = aten.t(%x)\n", 3, 7, "expected a type such as float32[batch, 8], got '='"),
    (STEP + "  %t: int, = f()\n", 3, 12, "expected a variable (%name), got '='"),
    (STEP + "  %t: int f()\n", 3, 11, "expected '=' or ',' after a result"),
    (STEP + "  %t: int = 8()\n", 3, 13, "expected the name of an op"),
    (STEP + "  %t: int = f\n", 3, 14, "expected '(' after f"),
    (STEP + "  %t: int = f()\n  %t: bool = f()\n", 4, 3, "%t is bool here, but int where it was declared"),
    (STEP + "  f(1 2)\n", 3, 7, "expected ',' or ')', got '2'"),
    (STEP + "  f(1, 2\n", 3, 9, "expected ',' or ')', got the end of the line"),
    (STEP + "  f(,)\n", 3, 5, "expected a value, got ','"),
    (STEP + "  f((1))\n", 3, 5, "a value in parentheses is no tuple"),
    (STEP + "  f(1_000)\n", 3, 5, "expected a value, got '1_000'"),
    (STEP + "  f(0x10)\n", 3, 5, "expected a value, got '0x10'"),
    (STEP + '  f("abc)\n', 3, 5, "this string does not end on its line"),
    (STEP + '  f("a\\qb")\n', 3, 7, "unknown escape \\q"),
    (STEP + '  f("\\u12")\n', 3, 6, "unknown escape \\u"),
    (STEP + '  f("\\UFFFFFFFF")\n', 3, 6, "unknown escape \\U"),
    (STEP + "  f() {a = 1} g()\n", 3, 15, "expected the end of the line, got 'g'"),
    (STEP + "  f(" + "9" * 5000 + ")\n", 3, 5, "a number of 5000 digits is too long"),
    (STEP + "  f(" + "(" * 1000 + ")\n", 3, 69, "nested more than 64 deep"),
    (STEP + "  f(__import__('os'))\n", 3, 15, "expected ',' or ')', got '('"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), CASES, ids=range(len(CASES)))
def test_error_says_where(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse(text, "file.gft")
    error = caught.value
    assert (error.line, error.column) == (line, column), str(error)
    assert message in error.message
    assert f"file.gft:{line}:{column}" in str(error)


VALID = """program p {seed = 0, note = "a\\"b"}
param %w: float32[2*batch, Max(1, 8)] {trainable = true}
block step {interval = 0.5}:
  %t: float32[8], _, %u: chunk = aten.t(%w, (1, (2,)), -1e-05, torch.float32)
  send(%t) {shard = none}
"""


@settings(max_examples=300)
@given(st.data())
def test_damaged_text_gives_a_parse_error_or_a_program(data: st.DataObject) -> None:
    """Nothing but ParseError, whatever is cut out, put in or doubled."""
    text = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 12)))
        text = text[:start] + data.draw(st.text('(){}[]%,=:"\\_ \n#abx01.-', max_size=4)) + text[end:]
    found = attempt(text)
    if isinstance(found, ParseError):
        assert 1 <= found.line <= text.count("\n") + 1
        assert 1 <= found.column <= len(found.text) + 1
    else:
        assert parse(str(found)) == found


def attempt(text: str) -> Program | ParseError:
    try:
        return parse(text)
    except ParseError as error:
        return error


def test_parse_error_is_a_graphft_error_with_a_rule() -> None:
    with pytest.raises(GraphftError) as caught:
        parse("nonsense")
    assert caught.value.rule == "syntax"


def test_golden_text_of_a_parse_error() -> None:
    with pytest.raises(ParseError) as caught:
        parse(STEP + "\tsend(%x, 'single') {shard = 0}\n", "trainer.gft")
    assert_golden(str(caught.value), "language_parse_error")
