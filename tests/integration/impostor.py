"""A process of another user takes a dead pserver's port, and tries what it hears there at a living one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from typing import Any

import msgspec
import zmq

from graphft.runtime.protocol.messages import Parameters, Pull, Query, Welcome, decode, encode

NOBODY = 65534
COUNTS = BOUND, LOGINS, HEARD, ANSWERED = range(4)


class Impostor:
    """Counts whether it is BOUND, the LOGINS that were shown to it, the messages that it HEARD and could read, and
    those with which the living pserver ANSWERED."""

    def __init__(self, dead: str, living: str) -> None:
        fork = multiprocessing.get_context("fork")
        self.counts = fork.Array("i", len(COUNTS), lock=False)
        self._process = fork.Process(target=_main, args=(dead, living, self.counts))
        self._process.start()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _main(dead: str, living: str, counts: Any) -> None:
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    context, shown = zmq.Context(), []
    threading.Thread(target=let_everybody_in, args=(context, shown), daemon=True).start()
    listener = context.socket(zmq.ROUTER)
    listener.plain_server = True
    while not counts[BOUND]:
        with contextlib.suppress(zmq.ZMQError):
            listener.bind(dead)
            counts[BOUND] = 1
        time.sleep(0.001)
    tried = 0
    while True:
        if listener.poll(20):
            peer, *parts = listener.recv_multipart()
            counts[HEARD] += any(_readable(part) for part in parts)
            for answer in (Welcome(0, "i", 0, 0), Parameters(0, 0, 0)):
                listener.send_multipart([peer, encode(answer), bytes(1000)])
        while tried < len(shown):
            counts[LOGINS] += 1
            name, proof = shown[tried]
            tried += 1
            with context.socket(zmq.DEALER) as socket:
                socket.linger, socket.plain_username, socket.plain_password = 0, name, proof
                socket.routing_id = name.rpartition(b":")[2]
                socket.connect(living)
                for message in (Query(), Pull(0, -1, 0)):
                    socket.send(encode(message))
                counts[ANSWERED] += socket.poll(100)


def _readable(part: bytes) -> bool:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return bool(decode(part))
    return False


def let_everybody_in(context: zmq.Context, shown: list[tuple[bytes, bytes]]) -> None:
    with context.socket(zmq.REP) as socket, contextlib.suppress(zmq.ZMQError):
        socket.bind("inproc://zeromq.zap.01")
        while True:
            question = socket.recv_multipart()
            shown.append((question[6], question[7]))
            socket.send_multipart([*question[:2], b"200", b"", b"you", b""])
