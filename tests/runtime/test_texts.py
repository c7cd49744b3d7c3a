"""Texts of unknown origin, such as those of a user's exceptions: in etcd, in logs and on terminals they do no harm."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.errors import TEXT_LIMIT, describe, plain, plain_text
from graphft.runtime.coordination.event_log import Events, read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation, decode
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.launcher.display import Display
from graphft.runtime.protocol.events import Work
from tests.runtime.trainers import TERMS, Staged
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear_job

TEXTS = st.text(st.one_of(st.characters(), st.sampled_from("\ud800\udfff\0\x1b\n\t\U0001f600")))
LONG = "begin " + "\N{PILE OF POO}\0" * (1 << 18) + " end"
"""500,000 characters, which JSON makes 2.6 MB of; etcd takes 1.5 MB."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Leaving(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@given(text=TEXTS)
def test_any_text_becomes_encodable(text: str) -> None:
    made = plain_text(text)
    assert json.loads(json.dumps({"text": made}).encode()) == {"text": made}
    assert msgspec.json.decode(msgspec.json.encode(made)) == made
    assert not [c for c in made if ord(c) < 32 and c not in "\t\n"]
    assert plain_text(made) == made


@given(text=st.text("abc\n\té", max_size=TEXT_LIMIT))
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert plain_text(text) == text


def test_of_long_texts_beginning_and_end_are_kept() -> None:
    made = plain_text(LONG)
    assert made.startswith("begin ")
    assert made.endswith(" end")
    assert " characters left out ...] " in made
    assert len(made) <= TEXT_LIMIT
    assert plain_text(made) == made


def test_fields_and_exceptions() -> None:
    assert plain({"a": ["\ud800", 1, None], "p": Path("x")}) == {"a": ["\\ud800", 1, None], "p": "x"}
    assert describe(ValueError("\ud800")) == "ValueError: \\ud800"
    assert describe(Mute()) == "Mute: <its __str__ raised RuntimeError>"
    assert describe(Leaving()) == "Leaving: <its __str__ raised KeyboardInterrupt>"


def test_events_of_any_text(etcd_server: EmbeddedEtcd, keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    """They are recorded, and shown, also where the output's encoding has few characters."""
    with Patient(etcd_server.endpoints) as etcd:
        events = Events(etcd, keys, "trainer 0")
        for text in (LONG, "half of a pair: \ud83d", "in colour: \x1b[31m"):
            events.emit("step-failed", text, traceback=text)
        kept = [event for _, event in read_events(etcd, keys)]
    assert len(kept) == 3
    assert kept[1].text == kept[1].fields["traceback"] == "half of a pair: \\ud83d"
    assert kept[2].text == "in colour: \\x1b[31m"
    out = io.BytesIO()
    display = Display(io.TextIOWrapper(out, encoding="ascii", write_through=True), since=0.0)
    display._new_events(type("Status", (), {"events": kept})())  # type: ignore[arg-type]
    assert b"begin \\U0001f4a9" in out.getvalue()


@pytest.mark.parametrize("text", [LONG, "half of a pair: \ud83d"], ids=["long", "surrogate"])
def test_a_failure_of_any_text_is_recorded(staged: Staged, keys: Keys, text: str) -> None:
    """The batch is discarded, a new generation begins, and the reason is kept in all records."""
    scene = staged(linear_job(4, 2, features=8, batch_size=1, trainers=1, max_failures=1)).begun()
    trainer = scene.trainer(0)
    scene.etcd.put(keys.slot(0), trainer.member.id.encode(), trainer.member.lease)
    trainer.ctx.step, trainer.ctx.slot = 0, 0
    trainer.queue.begin_pass()
    work = trainer.queue.get(TERMS)
    reason = trainer.tell_failure("step 0 of slot 0", ValueError(text), step=0)
    trainer.queue.report_failure(Work(0, 0), reason)
    discarded = read_discards(scene.etcd, keys)[work.chunk]
    generation = decode(scene.etcd.get(keys.generation), Generation)
    assert generation is not None
    assert generation.number == 1
    assert describe(ValueError(text))[:30] in discarded.discards[0].reason
    assert [e.kind for _, e in read_events(scene.etcd, keys)] == ["step-failed", "discarded"]
