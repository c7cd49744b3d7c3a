"""Contestants of one acknowledged push: ours, bare pyzmq, and a plain TCP stream."""

from __future__ import annotations

import socket
import time

import zmq
from group import Group, Member, main_of, report, rounds_to_run

from graphft.runtime.process.role_process import role_environment
from graphft.runtime.protocol.messages import Push, Welcome, decode, encode
from graphft.runtime.transport import Login, ZmqClient, ZmqServer
from graphft.runtime.transport.address import split_endpoint

ANYBODY = Login(admits=lambda public: True)
ACK = Welcome(shard=0, incarnation="0123456789abcdef", generation=0, version=0)
PUSH = Push(generation=0, step=0, slot=0, bucket=0, samples=1, want=True)


def our_server() -> None:
    server = ZmqServer(login=ANYBODY)
    report(server.bind())
    while True:
        for peer, _, _ in server.poll(None):
            server.send(peer, ACK)


def our_client(address: str, size: str) -> None:
    client = ZmqClient("bench", login=ANYBODY)
    client.connect(0, address)
    client.send(0, PUSH, b"")
    client.receive(None)  # the server has proven who it is: now it gets large frames
    frames = [bytearray(int(size)) for _ in range(2)]
    report("ready")
    for rounds in rounds_to_run():
        seconds = []
        for i in range(rounds):
            start = time.perf_counter()
            client.send(0, PUSH, frames[i % 2])
            client.receive(None)
            seconds.append(time.perf_counter() - start)
        report(seconds)


def bare_server() -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    report(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    while True:
        peer, header, _ = socket.recv_multipart()
        decode(header)
        socket.send_multipart([peer, encode(ACK)])


def bare_client(address: str, size: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    frame = bytearray(int(size))
    report("ready")
    for rounds in rounds_to_run():
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            socket.send_multipart([encode(PUSH), frame])
            decode(socket.recv())
            seconds.append(time.perf_counter() - start)
        report(seconds)


def tcp_server(size: str) -> None:
    """Stands for C: the interpreter only repeats one system call, which reads into the same warm memory."""
    listener = socket.create_server(("127.0.0.1", 0))
    report(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(int(size)))
    while True:
        got = 0
        while got < len(memory):
            got += connection.recv_into(memory[got:], 0, socket.MSG_WAITALL)
        connection.sendall(b"k")


def tcp_client(address: str, size: str) -> None:
    connection = socket.create_connection(split_endpoint(address))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frames = [bytearray(int(size)) for _ in range(2)]
    report("ready")
    for rounds in rounds_to_run():
        seconds = []
        for i in range(rounds):
            start = time.perf_counter()
            connection.sendall(frames[i % 2])
            connection.recv(1)
            seconds.append(time.perf_counter() - start)
        report(seconds)


def group(kind: str, size: int) -> Group:
    """The contestant `ours`, `bare` or `tcp`, pushing `size` bytes; each side on a core of its own."""
    environment = role_environment() if kind == "ours" else {}
    server = Member(__file__, f"{kind}_server", *([size] if kind == "tcp" else []), cpu=-1, **environment)
    client = Member(__file__, f"{kind}_client", server.hear(), size, cpu=0, **environment)
    client.hear()
    return Group([client], [server])


if __name__ == "__main__":
    main_of(
        {
            "ours_server": our_server,
            "ours_client": our_client,
            "bare_server": bare_server,
            "bare_client": bare_client,
            "tcp_server": tcp_server,
            "tcp_client": tcp_client,
        }
    )
