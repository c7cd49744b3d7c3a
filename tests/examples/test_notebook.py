"""The notebook runs from top to bottom, as its reader would run it (`make examples`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "trainer.ipynb"


@pytest.mark.skipif("GRAPHFT_EXAMPLES" not in os.environ, reason="by hand: make examples")
@pytest.mark.timeout(600)
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # nothing is written into the user's own
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def told(source: str) -> str:
        """Returns what the cell with this line printed, and its value."""
        (cell,) = (cell for cell in cells if source in cell.source.splitlines())
        return "".join(found.get("text") or found.data["text/plain"] for found in cell.outputs)

    assert "'epoch': 1," in told("trainer.train()")
    assert "'preemptions': 2" in told("trainer.train(max_retries=0, epochs=3)")
    assert told("for event in trainer.events():").count("died (killed by SIGKILL") == 2
    assert "'accuracy': 0.9" in told("trainer.validate()")
    assert "() 4" in told("print(trainer.workers(), trainer.epoch)")
    assert "'epoch': 6," in told("while trainer.epoch < 6:")
    assert (tmp_path / "digits-checkpoints").is_dir()
