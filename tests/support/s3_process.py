"""moto's S3 server, with writes that are atomic, on a socket that listens: `-m tests.support.s3_process DESCRIPTOR`.

moto looks whether an object is there, and puts it, in two steps: two conditional puts at once may both succeed. S3
promises that one does, and a commit is just that.
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

from moto import server
from werkzeug.serving import make_server


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


def serve(host: str, port: int, app: Any, **options: Any) -> None:
    options = {name: options[name] for name in ("threaded", "request_handler") if name in options}
    make_server(host, port, Atomic(app), fd=int(sys.argv[1]), **options).serve_forever()


if __name__ == "__main__":
    server.run_simple = serve
    server.main(["-H", "127.0.0.1", "-p", "0"])
