"""moto's S3 server on loopback, with writes that are atomic: `-m tests.support.s3_server DESCRIPTOR` of a socket.

moto looks whether an object is there, and puts it, in two steps: two conditional puts at once may both succeed. S3
promises that one does, and a commit is just that.
"""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import sys
import threading
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
            [sys.executable, "-m", "tests.support.s3_server", str(number)],
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


class Atomic:
    """A WSGI application that has one write at a time. What is written is read before, as a client may send slowly."""

    def __init__(self, app: Any) -> None:
        self._app, self._writes = app, threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._app(environ, start_response)
        length = None if environ.get("wsgi.input_terminated") else int(environ.get("CONTENT_LENGTH") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        with self._writes:
            return self._app(environ, start_response)


def main() -> None:
    from moto import server
    from werkzeug.serving import make_server

    def serve(host: str, port: int, app: Any, **options: Any) -> None:
        options = {name: options[name] for name in ("threaded", "request_handler") if name in options}
        make_server(host, port, Atomic(app), fd=int(sys.argv[1]), **options).serve_forever()

    server.run_simple = serve
    server.main(["-H", "127.0.0.1", "-p", "0"])


if __name__ == "__main__":
    main()
