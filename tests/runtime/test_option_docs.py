"""docs/options.md is made from the code, and every option says what it is for."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

import graphft
from docs.reference import docstrings, options_page
from graphft.runtime.launcher.options import LaunchOptions
from graphft.transpiler.config import JobConfig

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


@pytest.mark.parametrize("options", [JobConfig, LaunchOptions])
def test_every_option_says_what_it_is_for(options: type) -> None:
    assert docstrings(options).keys() >= {f.name for f in dataclasses.fields(options)}


def test_the_page_is_up_to_date_and_has_all_options_of_transpile() -> None:
    text = options_page()
    assert text == PAGE.read_text(), "make docs"
    for name, parameter in inspect.signature(graphft.transpile).parameters.items():
        assert parameter.kind is not parameter.KEYWORD_ONLY or f"| `{name}` |" in text
