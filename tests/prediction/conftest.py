"""The processes of these tests are forks of one that has imported torch."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def from_a_nursery(forks: None) -> None:
    """Fork servers of the jobs."""
