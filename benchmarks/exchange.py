"""Contestants of one synchronous exchange: 2 trainers hand in gradients, and have the updated parameters back.

`ours` and `pickle` have a server that sums and runs SGD; `gloo` all-reduces between the two and each runs SGD.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import zmq
from group import Group, Member, main_of, report, rounds_to_run

from graphft.runtime.process.role_process import role_environment
from graphft.runtime.protocol.messages import Parameters, Push, Query
from graphft.runtime.transport import Login, ZmqClient, ZmqServer
from graphft.runtime.transport.buffers import BucketBuffers, as_tensor, byte_view, unpack
from graphft.runtime.transport.port import Sent

TRAINERS = 2
BUCKET = 4 << 20
LR = 1e-3

ANYBODY = Login(admits=lambda public: True)


def shapes(width: int) -> list[tuple[int, ...]]:
    """The 62 parameters of a ResNet-18 whose first stage has `width` channels (64: 11.7 M elements)."""
    found: list[tuple[int, ...]] = [(width, 3, 7, 7), (width,), (width,)]
    before = width
    for channels in (width, 2 * width, 4 * width, 8 * width):
        for _ in range(2):
            found += [
                (channels, before, 3, 3),
                (channels,),
                (channels,),
                (channels, channels, 3, 3),
                (channels,),
                (channels,),
            ]
            if before != channels:
                found += [(channels, before, 1, 1), (channels,), (channels,)]
            before = channels
    return [*found, (1000, before), (1000,)]


def tensors(width: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s) for s in shapes(width)]


def buckets(width: int, limit: int = BUCKET) -> list[list[tuple[int, tuple[int, int]]]]:
    """(tensor, its slice) of each bucket of at most `limit` bytes, last tensors first."""
    found: list[list[tuple[int, tuple[int, int]]]] = [[]]
    room = limit // 4
    for i, shape in reversed(list(enumerate(shapes(width)))):
        start, numel = 0, torch.Size(shape).numel()
        while start < numel:
            end = min(numel, start + room)
            found[-1].append((i, (start, end)))
            room, start = room - (end - start), end
            if not room:
                found.append([])
                room = limit // 4
    return [b for b in found if b]


def drive(exchange: Callable[[], None]) -> None:
    report("ready")
    for rounds in rounds_to_run():
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            exchange()
            seconds.append(time.perf_counter() - start)
        report(seconds)


def our_server(width: str) -> None:
    """As a shard does: sums in slot order as soon as a bucket is there from all, and answers once all buckets are."""
    torch.set_num_threads(1)
    server = ZmqServer(login=ANYBODY)
    sizes = [sum(e - s for _, (s, e) in b) for b in buckets(int(width))]
    flats = [[torch.zeros(n) for n in sizes] for _ in range(2)]  # this version and the one before
    sums = [torch.zeros(n) for n in sizes]
    parts: dict[int, dict[int, torch.Tensor]] = {index: {} for index in range(len(sizes))}
    peers: set[bytes] = set()
    sends: list[list[Sent]] = [[], []]
    version, summed = 0, 0
    report(server.bind())
    while True:
        for peer, message, frame in server.poll(None):
            if isinstance(message, Query):
                server.send(peer, Parameters(0, 0, 0), b"")
                continue
            assert isinstance(message, Push)
            assert frame is not None
            peers.add(peer)
            got = parts[message.bucket]
            got[message.slot] = as_tensor(frame, torch.float32)
            if len(got) == TRAINERS:
                torch.add(got[0], got[1], out=sums[message.bucket])
                got.clear()
                summed += 1
        if summed < len(sums):
            continue
        version, summed = version + 1, 0
        now, before = flats[version % 2], flats[(version - 1) % 2]
        assert all(s.wait(10) for s in sends[version % 2])
        sends[version % 2] = []
        for index, total in enumerate(sums):
            torch.add(before[index], total, alpha=-LR / TRAINERS, out=now[index])
            answer = Parameters(generation=0, version=version, bucket=index)
            sends[version % 2] += [server.send(peer, answer, byte_view(now[index])) for peer in peers]


def our_trainer(address: str, slot: str, width: str) -> None:
    torch.set_num_threads(1)
    params, grads = tensors(int(width)), tensors(int(width))
    layout = buckets(int(width))
    slices = [[s for _, s in b] for b in layout]
    members = [([grads[i] for i, _ in b], [params[i] for i, _ in b]) for b in layout]
    buffers = [BucketBuffers(g, s) for (g, _), s in zip(members, slices, strict=True)]
    client = ZmqClient(f"trainer{slot}", login=ANYBODY)
    client.connect(0, address)
    client.send(0, Query())
    client.receive(None)  # the server has proven who it is: now it gets large frames

    def exchange() -> None:
        for index, (gradients, _) in enumerate(members):
            push = Push(generation=0, step=0, slot=int(slot), bucket=index, samples=1, want=True)
            buffers[index].pin(client.send(0, push, buffers[index].pack(gradients)))
        for _ in members:
            reply = client.receive(None)
            assert reply is not None
            assert isinstance(reply.message, Parameters)
            assert reply.frame is not None
            unpack(reply.frame, members[reply.message.bucket][1], slices[reply.message.bucket])

    drive(exchange)


def pickle_server(width: str) -> None:
    """Serves what one writes first: a request and a reply per pickled tensor, to push it and then to pull it."""
    torch.set_num_threads(1)
    params = tensors(int(width))
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    report(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    gradients: list[list[torch.Tensor]] = [[] for _ in params]
    waiting: list[tuple[bytes, dict[str, Any]]] = []
    version = 0
    while True:
        peer, data = socket.recv_multipart()
        request = pickle.loads(data)
        if request["op"] == "push":
            gradients[request["index"]].append(request["value"])
            socket.send_multipart([peer, pickle.dumps({"ok": True}, protocol=5)])
            if sum(map(len, gradients)) == TRAINERS * len(params):
                for i, parts in enumerate(gradients):
                    params[i] = params[i] - LR / TRAINERS * (parts[0] + parts[1])
                    parts.clear()
                version += 1
        else:
            waiting.append((peer, request))
        for peer, asked in [w for w in waiting if w[1]["version"] <= version]:
            socket.send_multipart([peer, pickle.dumps({"value": params[asked["index"]]}, protocol=5)])
        waiting = [w for w in waiting if w[1]["version"] > version]


def pickle_trainer(address: str, slot: str, width: str) -> None:
    torch.set_num_threads(1)
    params, grads = tensors(int(width)), tensors(int(width))
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)

    def ask(**request: object) -> dict[str, torch.Tensor]:
        socket.send(pickle.dumps(request, protocol=5))
        return pickle.loads(socket.recv())

    versions = itertools.count(1)

    def exchange() -> None:
        version = next(versions)
        for i, gradient in enumerate(grads):
            ask(op="push", index=i, value=gradient)
        for i, param in enumerate(params):
            param.copy_(ask(op="pull", index=i, version=version)["value"])

    drive(exchange)


def gloo_trainer(place: str, slot: str, width: str) -> None:
    """As DDP with `gradient_as_bucket_view`: the optimizer reads the reduced gradients in the buckets."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=int(slot), world_size=TRAINERS)
    params, grads = tensors(int(width)), tensors(int(width))
    members: list[list[int]] = [[]]
    for i in reversed(range(len(params))):
        if sum(params[j].nbytes for j in (*members[-1], i)) > 25 << 20:
            members.append([])
        members[-1].append(i)
    flats = [torch.empty(sum(params[i].numel() for i in inside)) for inside in members]
    for flat, inside in zip(flats, members, strict=True):
        for i, view in zip(inside, flat.split([params[i].numel() for i in inside]), strict=True):
            params[i].grad = view.view(params[i].shape)
    optimizer = torch.optim.SGD(params, lr=LR)

    def exchange() -> None:
        works = []
        for flat, inside in zip(flats, members, strict=True):
            torch._foreach_copy_([params[i].grad for i in inside], [grads[i] for i in inside])
            works.append(dist.all_reduce(flat, async_op=True))
        for work, flat in zip(works, flats, strict=True):
            work.wait()
            flat.div_(TRAINERS)
        optimizer.step()

    drive(exchange)


def group(kind: str, width: int) -> Group:
    """The contestant `ours`, `ours-plain` (without the allocator's settings), `pickle` or `gloo`."""
    environment = role_environment() if kind == "ours" else {}
    name = kind.partition("-")[0]
    if kind == "gloo":
        place = os.path.join(tempfile.mkdtemp(prefix="bench-"), "store")
        others = []
    else:
        others = [Member(__file__, f"{name}_server", width, **environment)]
        place = others[0].hear()
    driven = [Member(__file__, f"{name}_trainer", place, slot, width, **environment) for slot in range(TRAINERS)]
    for member in driven:
        member.hear()
    return Group(driven, others)


if __name__ == "__main__":
    main_of(
        {
            "ours_server": our_server,
            "ours_trainer": our_trainer,
            "pickle_server": pickle_server,
            "pickle_trainer": pickle_trainer,
            "gloo_trainer": gloo_trainer,
        }
    )
