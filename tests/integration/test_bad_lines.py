"""Lines that are no records are discarded, and nothing dies of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import graphft
from tests.integration.plays import play

pytestmark = pytest.mark.timeout(600)
FILES, LINES = 2, 600
BAD = {(0, 5): "red,1\n", (0, 6): "1\n", (0, 370): "1,2,3\n", (1, 5): "1,two\n", (1, 450): "x,1\n"}


@pytest.mark.slow
def test_many_lines_cost_no_process(folder: Path, tmp_path: Path) -> None:
    """46 bad lines of 21,000 cost 114 deaths of trainers, and more than --max-restarts allows in a row."""
    for number in range(FILES):
        lines = [BAD.get((number, i), f"{i / LINES},{i * 2 / LINES}\n") for i in range(LINES)]
        (tmp_path / f"{number}.csv").write_text("x,y\n" + "".join(lines))
    data = graphft.files(
        str(tmp_path / "*.csv"), "csv", {"x": ["x"], "y": ["y"]}, {"x": "float32", "y": "float32"}, 300
    )
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    program = graphft.build(model, lambda m, x, y: nn.functional.mse_loss(m(x), y), {"x": (None, 1), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    job = graphft.transpile(
        program, data=data, batch_size=20, ft=True, trainers=2, pservers=1, epochs=2, max_discarded=0.1
    )
    result = play(job, folder).result
    assert not sum(result.failures.values()), result.failures
    found = sorted(record for lost in result.discarded for record in lost.records)
    assert found == [5, 6, 370, LINES + 5, LINES + 450]
    assert len(result.discarded) == 4, "those of a chunk at once"
    reasons = " ".join(lost.reason for lost in result.discarded)
    for text in ("line 7 of 0.csv: field x is 'red'", "line 8 of 0.csv", "line 372 of 0.csv", "line 452 of 1.csv"):
        assert text in reasons
