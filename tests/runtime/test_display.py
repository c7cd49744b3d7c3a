"""The panel, at any width and when its terminal is resized; and the lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from graphft.runtime.coordination.records import Event, Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.display import Display, format_line, render


def status_of(*events: Event, **changes: object) -> JobStatus:
    spec = {"program": "p", "trainers": 2, "pservers": 2, "sync": True, "ft": True, "passes": 3, "total_steps": 12}
    values = {
        "job": "tiny",
        "state": "running",
        "spec": spec,
        "generation": 1,
        "pass_index": 1,
        "step": 7,
        "checkpoint": 5,
        "events": list(events),
        "queue": {"todo": 2, "pending": 1, "done": 1},
    }
    return JobStatus(**{**values, **changes})  # type: ignore[arg-type]


def event(at: float, text: str, who: str = "pserver 0") -> Event:
    return Event(at, who, "kind", text)


def test_line() -> None:
    trainers = {"0-aa": {"samples_per_second": 1234.0}, "1-bb": {}}
    shard = {"version": 7, "metrics": {"loss": 0.12345, "accuracy": 0.625, "f1": None}}
    line = format_line(status_of(trainers=trainers, pservers={0: shard}, slots={0: "0-aa", 1: "1-bb"}))
    assert line == (
        "epoch 2/3  step 7/12  loss 0.1235  accuracy 0.625  1,234 samples/s  "
        "2 trainers  1/2 pservers  chunks 2 todo 1 pending 1 done"
    )
    waiting = format_line(status_of(trainers=trainers, slots={1: "1-bb"}))
    assert "2 trainers  0/2 pservers  1 of 2 slots wait for a trainer  chunks" in waiting
    assert "loss -  0 samples/s  0 trainers  0/2 pservers  chunks 2 todo" in format_line(status_of())


def test_display_without_a_terminal_prints_each_event_of_this_launch_once() -> None:
    stream = io.StringIO()
    display = Display(stream, since=0.5)
    first, second = event(1.0, "took over slot 2"), event(2.0, "died [/b] [red]:warning: 100%")
    display.show(status_of(event(0.4, "died in a launch before"), first))
    display.show(status_of(first, second, step=8))
    display.show(status_of(first, second, step=9))
    display.close(status_of(first, second, event(3.0, "done"), step=12, state="complete"))
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines if "[pserver 0]" in line] == [
        "[pserver 0] took over slot 2",
        "[pserver 0] died [/b] [red]:warning: 100%",
        "[pserver 0] done",
    ]
    assert [line.split("step ")[1][:5] for line in lines if line.startswith("epoch ")] == ["7/12 "], (
        "a line at once, then each five seconds; none of a complete job, whose roles have left"
    )


def drawn(status: JobStatus, width: int, left: float | None = None) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, markup=False).print(render(status, left))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


BUSY: dict[str, Any] = {
    "slots": {0: "0-aa", 1: "1-bb"},
    "pservers": {
        0: {
            "host": "h",
            "pid": 4,
            "version": 7,
            "learning_rates": {"lr": 0.125, "lr_1": 1e-05},
            "checkpoint_age": 12.4,
            "metrics": dict.fromkeys(("loss", "acc", "f1", "auc", "map"), 0.5),
        },
        1: {"host": "h", "pid": 5, "version": 7, "learning_rates": {"lr": 0.125}, "checkpoint_age": 13.0},
    },
    "trainers": {
        "0-aa": {"host": "h", "pid": 6, "step": 7},
        "1-bb": {"host": "h", "pid": 7, "step": 7, "learning_rates": {}},
    },
}


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_tells_all_at_any_width(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = status_of().spec | {"folder": str(tmp_path / "jobs" / "tiny")}
    validated = Validated(4, 2, 50, {"loss": 0.25, "auc": "nan"}, 0.0)
    changes = BUSY | {"spec": spec, "validated": validated, "validating": [8]}
    lines = drawn(status_of(event(1.0, "took over slot 2"), **changes), width, 754.0)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for wanted in (
        *("step 7/12", "13 min left", "acc 0.5 f1 0.5 auc 0.5 map 0.5", "lr 0.125, lr_1 1e-05"),
        *("checkpoint at step 5, 12 s ago", "folder jobs/tiny", "2 trainers 2/2 pservers", "chunks 2 todo"),
        *("validation of step 4: loss 0.25, auc nan", "validating step 8"),
        *("pserver 1 h:5 version 7", "trainer 1-bb h:7 step 7 1 0 samples/s", "took over slot 2"),
        *(("role process at slots doing",) if width > 40 else ()),
    ):
        assert wanted in text, text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_on_a_terminal_shows_a_panel_and_leaves_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(stream, since=0.0)
    for step in (7, 8):
        display.show(status_of(event(1.0, "took over slot 2"), step=step))
    display.close(status_of(event(1.0, "took over slot 2"), step=12))
    panel, left = stream.getvalue().rsplit("\x1b[?25h", 1)  # the cursor is shown again
    assert "graphft job tiny" in panel
    assert "took over slot 2" in left
    assert "step 12/12" in left
