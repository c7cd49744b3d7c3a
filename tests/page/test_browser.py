"""The page in a real browser: live, safe, and on a phone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.errors import GraphftError
from graphft.runtime.coordination.records import Event
from graphft.runtime.page.job_page import JobPage
from graphft.runtime.page.server import PageServer
from tests.page.plays import Job, status
from tests.support.browser import MISSING, Browser

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture
def job() -> Job:
    job = Job()
    job.events = [Event(time.time(), "trainer 1", "step-failed", f"ValueError: {NASTY}", {"step": 400})]
    return job


@pytest.fixture
def server(job: Job) -> Iterator[PageServer]:
    served = PageServer(JobPage(job.look))
    yield served
    served.close()


@pytest.mark.slow
def test_a_job_from_training_to_its_end(job: Job, server: PageServer, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.until(lambda: "step 400 of 1,000" in browser.text("#head"))
        assert "goodput" in browser.text("#time")
        browser.until(lambda: "Validation of step 300: loss 0.5" in browser.text("#curves"))
        assert "validating step 400" in browser.text("#curves")
        assert NASTY in browser.text("#events"), "as a text"
        assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        browser.evaluate("window.same = true")

        job.status = status(440)
        browser.until(lambda: "Training, step 440" in browser.text("#head"))
        assert browser.evaluate("document.querySelectorAll('svg .line').length") == 2
        assert browser.evaluate("document.querySelectorAll('svg .mark').length") == 2, "the fault, on both curves"
        job.status = status(440, trainers={name: t for name, t in status().trainers.items() if name == "0-aa"})
        browser.until(lambda: "Recovering" in browser.text("#head"))
        assert "time left: not known" in browser.text("#head")
        assert "1 of 3 slots" not in browser.text("#trainers"), "etcd has not freed it yet"
        job.error = GraphftError("etcd does not answer")
        browser.until(lambda: "etcd does not answer" in browser.text("#away"))
        job.error, job.status = None, status(1000, state="complete", trainers={}, pservers={}, slots={})
        browser.until(lambda: "Complete: 1,000 steps" in browser.text("#head"))
        assert browser.text("#away") == ""
        assert browser.evaluate("window.same") is True, "it was never loaded again"
        assert "owned" not in browser.evaluate("document.title")
        server.close()
        browser.until(lambda: "has ended" in browser.text("#foot"))
        refused = [
            error for error in browser.errors if "ERR_CONNECTION" not in error and "Failed to fetch" not in error
        ]
        assert not refused, "no script failed, and the policy refused nothing"
