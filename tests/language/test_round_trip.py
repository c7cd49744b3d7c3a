"""`parse(print(p)) == p`, for programs by hand and at random; each mistake in a text is reported with its place."""

from __future__ import annotations

import contextlib
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from graphft.ir import Kind, Operator, Program, Ref, Sym, Type
from graphft.ir.parser import ParseError, parse
from graphft.ir.printer import format_operator, format_program
from graphft.ir.registry import op
from tests.support.golden import assert_golden


@op("rt_defaults")
def _defaults(ctx: object, *values: object, momentum: float = 0.0, mode: str = "mean", count: int = 1) -> None:
    """An op with defaults."""


LABELS = st.text("abzAZ019_.@/-", min_size=1, max_size=12)
NAMES = st.from_regex(r"[a-z][A-Za-z0-9_.]{0,8}", fullmatch=True)
DIMS = st.one_of(st.integers(0, 10**12), st.sampled_from(["batch", "2*batch", "batch//2 + 1", "Max(1, 2*(seq - 1))"]))
TYPES = st.builds(
    Type,
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "chunk"]),
    st.none() | st.lists(DIMS, max_size=4).map(tuple),
)
WORDS = ("true", "false", "none", "inf", "nan")
SYMBOLS = st.from_regex(r"[a-z@][A-Za-z0-9_.@/-]{0,8}", fullmatch=True).filter(lambda s: s not in WORDS).map(Sym)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    SYMBOLS,
    st.characters(categories=["Cs", "Zl", "Zp", "Cc", "Co"]),
    LABELS.map(Ref),
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3).map(tuple), max_leaves=8)
ATTRS = st.dictionaries(st.one_of(LABELS, st.text(max_size=4)), VALUES, max_size=3)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program(draw(LABELS | st.text(max_size=6)), draw(ATTRS))
    names = draw(st.lists(LABELS, unique=True, min_size=1, max_size=8))
    for name in names:
        program.variable(name, draw(TYPES), draw(st.sampled_from(Kind))).attrs = draw(ATTRS)
    for label in draw(st.lists(LABELS | st.text(max_size=4), unique=True, max_size=3)):
        block = program.block(label)
        block.attrs = draw(ATTRS)
        for _ in range(draw(st.integers(0, 3))):
            outputs = draw(st.lists(st.none() | st.sampled_from(names), max_size=3))
            block.ops.append(
                Operator(draw(NAMES), draw(st.lists(VALUES, max_size=3).map(tuple)), draw(ATTRS), tuple(outputs))
            )
    return program


@given(programs())
def test_any_program_reads_back(program: Program) -> None:
    text = format_program(program)
    again = parse(text)
    assert again == program
    assert format_program(again) == text
    assert text.isprintable() or all(c == "\n" or c.isprintable() for c in text)


def example() -> Program:
    p = Program("trainer", {"role": "trainer", "seed": 0, "note": 'a "quoted"\nline'})
    p.variable("x", Type("float32", ("batch", 8)), Kind.INPUT)
    p.variable("fc.weight", Type("float32", (4, 8)), Kind.PARAM, trainable=True)
    p.variable("fc.weight@GRAD", Type("float32", (4, 8)))
    p.variable("running_mean", Type("float32", (4,)), Kind.BUFFER)
    step = p.block("step")
    weight = step.append_op("aten.t", Ref("fc.weight"))
    hidden = step.append_op("aten.mm", p.variables["x"], weight)
    step.append_op("aten.native_dropout", hidden, 0.5, True, outputs=["dropped", None])
    step.ops.append(Operator("send", (Ref("fc.weight@GRAD"),), {"shard": 0, "bucket": 1, "slices": ((0, 32),)}))
    step.ops.append(Operator("recv", (Ref("fc.weight"),), {"shard": 0, "bucket": 1, "slices": ((0, 32),)}))
    p.block("daemon", interval=0.5).append_op("etcd_keep_alive")
    p.block("idle")
    return p


def test_golden_text_of_a_program() -> None:
    assert_golden(str(example()), "language_program")
    assert parse(str(example())) == example()


def test_defaults_are_left_out_and_equal_what_is_left_out() -> None:
    p = Program()
    given_ = Operator("rt_defaults", (1,), {"momentum": 0.0, "mode": "sum", "count": 1})
    left_out = Operator("rt_defaults", (1,), {"mode": "sum"})
    assert format_operator(given_, p) == 'rt_defaults(1) {mode = "sum"}'
    assert given_ == left_out
    assert given_ != Operator("rt_defaults", (1,), {"mode": "sum", "count": 2})


@pytest.mark.parametrize(("a", "b"), [(1, 1.0), (1, True), (0.0, -0.0), ((1,), (1.0,)), ("1", 1), (None, False)])
def test_equality_is_exact(a: object, b: object) -> None:
    assert Program("p", {"v": a}) != Program("p", {"v": b})
    assert Operator("f", (a,)) != Operator("f", (b,))


def test_hand_written_text_may_have_comments_blanks_and_any_order_of_declarations() -> None:
    p = parse(
        """
        # a comment
        program p   # another
        temp %unused: int
        input %x: float32[ batch , 8 ] { note = "# not a comment" }

        block step :
        %y: float32[8, batch] = aten.t( %x )  # transposed
        %y, _ = f((1,), ( ), -1, 1e-05, -inf, torch.float32,) {b = (1, (2, "x")), a = none,}
    """.replace(",}", "}")
    )
    assert p.variables["x"].type == Type("float32", ("batch", 8))
    assert p.variables["x"].attrs == {"note": "# not a comment"}
    assert p.blocks["step"].ops[1] == Operator(
        "f", ((1,), (), -1, 1e-5, -math.inf, Sym("torch.float32")), {"a": None, "b": (1, (2, "x"))}, ("y", None)
    )
    assert parse(str(p)) == p


def test_printing_never_fails() -> None:
    """Errors print ops that may hold anything, and show no address."""
    assert format_operator(Operator("f", ([1], object()), {}, ("gone",)), Program()) == "%gone = f(<list>, <object>)"


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
