"""An S3 server of its own on loopback: moto's, which speaks the protocol; see s3_process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

KEYS = {"key": "graphft", "secret": "graphft"}


@contextlib.contextmanager
def s3_server(bucket: str) -> Iterator[dict[str, Any]]:
    """Yields the `storage_options` with which s3fs reaches it. The bucket is made."""
    import s3fs

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        number = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.s3_process", str(number)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
        )
    try:
        end = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(url, timeout=10).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < end, "the S3 server does not answer"
                time.sleep(0.05)
        options = {**KEYS, "endpoint_url": url}
        s3fs.S3FileSystem(**options).mkdir(bucket)
        yield options
    finally:
        process.kill()
        process.wait()
