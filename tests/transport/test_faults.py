"""The fault injector and the simulated network: what happens is a function of the seed."""

from __future__ import annotations

import pytest
from transport.rigs import FaultyRig, SimRig, ZmqRig, collect

from graphft.errors import GraphftError
from graphft.runtime.protocol.messages import Parameters, Push, Query
from graphft.runtime.transport.faults import Faults, FaultSchedule, FaultyClient, FaultyServer
from graphft.runtime.transport.zeromq_client import ZmqClient
from graphft.runtime.transport.zeromq_server import ZmqServer
from tests.sim.transport import SimNetwork

ALL = Faults(seed=1, drop=0.2, duplicate=0.2, delay=0.2, reorder=0.2, max_delay=0.01)


def push(step: int) -> Push:
    return Push(generation=0, step=step, slot=0, bucket=0, samples=1, want=True)


def train(network: SimNetwork, client_faults: Faults, server_faults: Faults) -> list[tuple[float, str]]:
    """A client that pushes step after step and repeats what gets no answer; a server that applies each step once.

    The story: what either side sees, and when.
    """
    story: list[tuple[float, str]] = []
    server = FaultyServer(network.server(), server_faults, network.time)
    client = FaultyClient(network.client("t0"), client_faults, network.time)
    client.connect(0, server.bind())
    version, tries, steps = 0, 0, 40
    while version < steps:
        tries += 1
        assert tries < 50 * steps
        client.send(0, push(version), bytes([version]) * 100_000)
        for peer, message, frame in server.poll(0.02):
            story.append((network.now, f"got {message.step}"))
            assert frame is not None
            assert bytes(frame) == bytes([message.step]) * 100_000
            server.send(peer, Parameters(generation=0, version=message.step + 1, bucket=0), frame)
        while (reply := client.receive(0.005)) is not None:
            story.append((network.now, f"version {reply.message.version}"))
            version = max(version, reply.message.version)
    return story


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_tells_the_same_story(seed: int) -> None:
    faults = Faults(seed=seed, drop=0.1, duplicate=0.1, delay=0.2, reorder=0.2, max_delay=0.02)
    inside = train(SimNetwork(faults), Faults(), Faults())
    assert inside == train(SimNetwork(faults), Faults(), Faults())
    around = train(SimNetwork(), faults, faults)
    assert around == train(SimNetwork(), faults, faults)
    other = Faults(seed=seed + 100, drop=0.1, duplicate=0.1, delay=0.2, reorder=0.2, max_delay=0.02)
    assert inside != train(SimNetwork(other), Faults(), Faults())
    assert around != train(SimNetwork(), other, other)


def test_a_rate_leaves_the_other_faults_where_they_were() -> None:
    few, many = FaultSchedule(Faults(seed=3, drop=0.1)), FaultSchedule(Faults(seed=3, drop=0.1, duplicate=0.5))
    fates = [(few.next(), many.next()) for _ in range(500)]
    assert [not a for a, _ in fates] == [not b for _, b in fates]
    assert 20 < sum(not a for a, _ in fates) < 80
    assert 180 < sum(len(b) == 2 for _, b in fates) < 280


@pytest.mark.parametrize("driver", ["sim", "zeromq"])
@pytest.mark.parametrize(
    ("faults", "arrived"),
    [
        (Faults(drop=1), []),
        (Faults(duplicate=1, max_delay=0), [0, 0, 1, 1, 2, 2]),
        (Faults(delay=1, max_delay=0.03), [0, 1, 2]),
        (Faults(), [0, 1, 2]),
    ],
)
def test_each_fault_alone(driver: str, faults: Faults, arrived: list[int]) -> None:
    inner = SimRig() if driver == "sim" else ZmqRig()
    rig = FaultyRig(inner, faults)
    server, client = inner.server(), rig.client()
    client.connect(0, server.bind())
    for step in range(3):
        client.send(0, push(step), bytes([step]) * 70_000)
    for _ in range(4):
        assert client.receive(0.02) is None
    assert [(g.message.step, bytes(g.frame or b"")[-1]) for g in collect(server, len(arrived))] == [
        (step, step) for step in arrived
    ]
    assert server.poll(0.05) == []
    kind = next((k for k in ("drop", "duplicate", "delay") if getattr(faults, k)), None)
    assert client.counters["faults.drop"] + client.counters["faults.duplicate"] + client.counters["faults.delay"] == (
        3 if kind else 0
    )
    rig.close()


@pytest.mark.parametrize("wrapped", [True, False])
def test_reordered_messages_all_arrive(wrapped: bool) -> None:
    faults = Faults(seed=2, reorder=0.5, max_delay=0.02)
    network = SimNetwork(None if wrapped else faults)
    server = network.server()
    client = FaultyClient(network.client("t0"), faults if wrapped else Faults(), network.time)
    client.connect(0, server.bind())
    for step in range(50):
        client.send(0, push(step))
        network.advance(0.001)
    assert client.receive(0.1) is None
    got = [g.message.step for g in server.poll(0)]
    assert sorted(got) == list(range(50))
    assert got != sorted(got)


def test_late_messages_to_a_replaced_connection_are_forgotten() -> None:
    network = SimNetwork()
    server = network.server()
    client = FaultyClient(network.client("t0"), Faults(delay=1, max_delay=0.1), network.time)
    address = server.bind()
    client.connect(0, address)
    client.send(0, push(1))
    client.connect(0, address)
    client.send(0, push(2))
    assert client.receive(0.5) is None
    assert [g.message.step for g in server.poll(0)] == [2]


def test_a_late_frame_is_copied_so_that_its_buffer_is_free() -> None:
    server = ZmqServer()
    client = FaultyClient(ZmqClient("t0"), Faults(delay=1, max_delay=0.05))
    client.connect(0, server.bind())
    frame = bytearray(b"a" * 200_000)
    assert client.send(0, push(1), frame).done
    frame[:] = b"b" * 200_000
    assert client.receive(0.1) is None
    assert bytes(collect(server, 1)[0].frame or b"") == b"a" * 200_000
    client.close()
    server.close()


def test_a_wake_passes_through_the_wrapper_while_messages_are_late() -> None:
    network = SimNetwork()
    server = FaultyServer(network.server(), ALL, network.time)
    server.bind()
    server.wake()
    assert server.poll(None) == []


def test_a_cut_loses_what_is_in_flight_and_the_simulated_frame_is_read_on_arrival() -> None:
    network = SimNetwork(latency=1.0)
    server = network.server()
    address = server.bind()
    client = network.client("t0")
    client.connect(0, address)
    lost = client.send(0, push(1), bytes(100_000))
    assert not lost.done
    network.cut(address)
    assert lost.done
    frame = bytearray(100_000)
    sent = client.send(0, push(2), frame)
    frame[:] = b"x" * 100_000  # too early
    assert sent.wait(2)
    (got,) = server.poll(0)
    assert (got.message.step, bytes(got.frame or b"")) == (2, b"x" * 100_000)


def test_a_simulated_server_that_dies_loses_what_is_in_flight_and_keeps_what_waits() -> None:
    network = SimNetwork(latency=1.0)
    first = network.server()
    address = first.bind()
    client = network.client("t0")
    client.connect(0, address)
    client.send(0, push(1))
    first.close()
    client.send(0, push(2))
    second = network.server()
    second.bind(port=int(address.rpartition(":")[2]))
    assert [g.message.step for g in second.poll(5)] == [2]


def test_waiting_for_ever_for_nothing_is_an_error_in_the_simulation() -> None:
    network = SimNetwork()
    client = network.client("t0")
    client.connect(0, network.server().bind())
    client.send(0, Query())
    with pytest.raises(GraphftError, match="sim-deadlock"):
        client.receive(None)


@pytest.mark.parametrize("wrong", [{"drop": 1.1}, {"reorder": -0.1}, {"max_delay": -1}])
def test_senseless_rates_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(GraphftError, match=r"error\[faults\]"):
        Faults(**wrong)  # type: ignore[arg-type]
