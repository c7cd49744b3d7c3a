"""The parts of a message on the wire: [header] or [header, frame]; checked before anything looks inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import AnyMessage, Refused, decode
from graphft.runtime.transport.port import Frame, Limits

UNKNOWN = -1
"""Generation and version in a refusal by the transport, which knows neither."""


class Malformed(Exception):
    """What arrived is no message of ours. `reason` is one of parts, header-size, frame-size, undecodable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def refusal(self) -> Refused:
        """Tells nothing: who sent this may be anybody. What is wrong is counted here."""
        return Refused(code="malformed", reason="", generation=UNKNOWN, version=UNKNOWN)


def parse(parts: Sequence[memoryview], limits: Limits) -> tuple[AnyMessage, memoryview | None]:
    """The message and the frame of what arrived, without its routing part. Raises Malformed."""
    if not 1 <= len(parts) <= 2:
        raise Malformed("parts", f"expected a header and at most one frame, got {len(parts)} parts")
    header, frame = parts[0], parts[1] if len(parts) == 2 else None
    if header.nbytes > limits.max_header:
        raise Malformed("header-size", f"header of {header.nbytes} bytes, at most {limits.max_header} are accepted")
    if frame is not None and frame.nbytes > limits.max_frame:
        raise Malformed("frame-size", f"frame of {frame.nbytes} bytes, at most {limits.max_frame} are accepted")
    try:
        return decode(header), frame
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed("undecodable", str(e)) from None


def accept(parts: Sequence[memoryview], limits: Limits, counters: Counter[str]) -> tuple[AnyMessage, memoryview | None]:
    """`parse`, counted: `received` and `received_bytes`, or `refused.<reason>`."""
    try:
        message, frame = parse(parts, limits)
    except Malformed as e:
        counters[f"refused.{e.reason}"] += 1
        raise
    counters["received"] += 1
    counters["received_bytes"] += frame.nbytes if frame is not None else 0
    return message, frame


def count_sent(counters: Counter[str], frame: memoryview | None) -> None:
    counters["sent"] += 1
    counters["sent_bytes"] += frame.nbytes if frame is not None else 0


def check_frame(frame: Frame, limits: Limits) -> memoryview:
    """The frame to send, as bytes. Raises GraphftError when no receiver would take it."""
    view = memoryview(frame)
    if not view.c_contiguous:
        raise GraphftError(
            "the frame is not contiguous in memory",
            rule="frame",
            help="copy it into a flat buffer first (BucketBuffers.pack)",
        )
    if view.nbytes > limits.max_frame:
        raise GraphftError(
            f"frame of {view.nbytes} bytes, at most {limits.max_frame} can be sent",
            rule="frame-size",
            help="split it into smaller buckets, or raise Limits.max_frame on both sides",
        )
    return view.cast("B") if view.nbytes else memoryview(b"")
