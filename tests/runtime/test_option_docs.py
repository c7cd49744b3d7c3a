"""docs/options.md is made from the code, and every option says what it is for."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

import graphft
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.reference import docstrings, options_page
from graphft.transpiler.config import JobConfig

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


@pytest.mark.parametrize("options", [JobConfig, LaunchOptions])
def test_every_option_says_what_it_is_for(options: type) -> None:
    assert docstrings(options).keys() >= {f.name for f in dataclasses.fields(options)}


def test_the_page_is_up_to_date() -> None:
    assert options_page() == PAGE.read_text(), "make docs"


def test_the_page_has_all_options_of_transpile_and_run() -> None:
    text = options_page()
    named = [n for n, p in inspect.signature(graphft.transpile).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in [*named, "name", "checkpoint_every", "exact", "trainers", "fresh", "on_status"]:
        assert f"| `{name}` |" in text
    assert "| `mode` | `'async'` or `'dc_asgd'` or `'half_async'` or `'geo_sgd'` | `'async'` |" in text
    assert "| `torch_version` |" not in text, "what is found out, not given"
