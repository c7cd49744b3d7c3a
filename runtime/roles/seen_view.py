"""The watched view, as a main thread that looks for itself is given it."""

from __future__ import annotations

from graphft.ops.context import ViewPort
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member


class SeenView(ViewPort):
    """The ViewPort of a pserver and of the coordinator.

    `seen`: the view as op `etcd_state_watch` took it in last, which the main thread acts on.
    """

    def __init__(self, member: Member) -> None:
        self.member, self.seen = member, JobView()

    def watch(self) -> None:
        self.seen = self.member.view
        self.member.wake()
