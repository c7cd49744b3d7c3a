"""The page of a launch: served as long as the launch lasts, and no harm to it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from graphft.runtime.launcher.tell import tell
from graphft.runtime.page.time_keeper import TimeKeeper

log = logging.getLogger("graphft")


class LaunchPage:
    """Raises UsageError if it cannot be served: before anything of the job is started."""

    def __init__(self, job_dir: Path, port: int) -> None:
        from graphft.runtime.launcher.page_looks import FolderLooks  # most launches need none of it
        from graphft.runtime.page.job_page import JobPage
        from graphft.runtime.page.server import OneJob, PageServer

        self._looks = FolderLooks(job_dir)
        self._page = JobPage(self._looks)
        self._server = PageServer(OneJob(self._page), port)
        tell(f"page: {self._server.url}")

    def follow(self, keeper: TimeKeeper) -> None:
        """From now on it shows the account of this launch."""
        self._looks.kept, self._looks.at_work = keeper.export, True

    def close(self) -> None:
        self._looks.at_work = False
        self._page.look_again()
        try:
            self._server.show_end()
            self._server.close()
        except Exception:
            log.debug("the page could not be closed", exc_info=True)


@contextlib.contextmanager
def page_of(job_dir: Path, page: bool | int | None) -> Iterator[LaunchPage | None]:
    """`page`: as `LaunchOptions` has it."""
    if page is None or page is False:
        yield None
        return
    served = LaunchPage(job_dir, 0 if page is True else page)
    try:
        yield served
    finally:
        served.close()
