"""A shard's memory: sums in slot order to the bit, copies that are not changed while they are sent."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.roles.pserver.shard_buffers import ShardBuffers
from graphft.runtime.transport.buffers import as_tensor, byte_view


@dataclass
class Sending:
    """A `Sent` that is done when the test says so."""

    done: bool = False

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.done


def memory_of(reduce: str = "weighted_mean", dtype: torch.dtype = torch.float32) -> ShardBuffers:
    scope = {"a": torch.arange(4).to(dtype), "b": torch.arange(3).to(dtype) + 10, "a@momentum": torch.zeros(4)}
    memory = ShardBuffers(scope)
    memory.make_bucket(0, ["a", "b"], reduce)
    return memory


def give(*parts: tuple[int, int, Tensor]) -> list[Contribution]:
    """Contributions of (slot, samples, bucket 0)."""
    return [Contribution(slot, samples, {0: byte_view(part)}) for slot, samples, part in parts]


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


# -- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["weighted_mean", "mean", "first"])
def test_a_single_contribution_is_taken_bit_by_bit(reduce: str) -> None:
    part = torch.tensor([0.1, -0.0, 1e-45, float("inf"), float("nan"), 3e38, -1 / 3])
    memory = memory_of(reduce)
    memory.reduce(give((3, 17, part)))
    assert same_bits(memory.buckets[0].total, part)


@pytest.mark.parametrize(("reduce", "weights"), [("weighted_mean", (8 / 13, 4 / 13, 1 / 13)), ("mean", (1 / 3,) * 3)])
def test_sums_are_made_in_slot_order(reduce: str, weights: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(7) * 10**e for e in (0, 4, -3)]
    memory = memory_of(reduce)
    memory.reduce(give(*((slot, n, part) for slot, n, part in zip((0, 1, 5), (8, 4, 1), parts, strict=True))))
    if reduce == "mean":
        wanted = (parts[0] + parts[1] + parts[2]) * weights[0]
    else:
        wanted = parts[0] * weights[0] + parts[1] * weights[1] + parts[2] * weights[2]
    assert same_bits(memory.buckets[0].total, wanted)
    exact = sum(p.double() * w for p, w in zip(parts, weights, strict=True))
    assert torch.allclose(memory.buckets[0].total.double(), exact, rtol=1e-5)


@pytest.mark.parametrize("samples", [(8, 4, 1), (5, 5, 5)])
def test_an_elements_bits_do_not_depend_on_its_place_in_the_bucket(samples: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(40) for _ in samples]
    whole = [torch.zeros(40) for _ in range(40)]
    for offset in range(40):
        scope = {"a": torch.zeros(40)}
        memory = ShardBuffers(scope)
        memory.make_bucket(0, ["a"], "weighted_mean")
        memory.reduce(
            [
                Contribution(slot, n, {0: byte_view(part.roll(offset).contiguous())})
                for slot, (n, part) in enumerate(zip(samples, parts, strict=True))
            ]
        )
        whole[offset] = memory.buckets[0].total.roll(-offset)
    assert all(same_bits(found, whole[0]) for found in whole)


def test_first_takes_the_lowest_slot_with_data() -> None:
    memory = memory_of("first", torch.int64)
    first, second = torch.arange(7) + 2**60, torch.zeros(7, dtype=torch.int64)
    memory.reduce(give((1, 4, first), (2, 9, second)))
    assert memory.buckets[0].total.tolist() == first.tolist()


# -- versions -------------------------------------------------------------------------------------------------------


def values(memory: ShardBuffers, version: int) -> list[float]:
    return as_tensor(memory.published(0, version).frame, torch.float32).tolist()


def test_the_current_and_the_previous_version_are_kept() -> None:
    memory = memory_of()
    for version in range(4):
        memory.scope["a"].fill_(version)
        memory.publish(version)
    memory.scope["a"].fill_(99)  # the optimizer goes on
    assert values(memory, 3)[:4] == [3] * 4
    assert values(memory, 2)[:4] == [2] * 4
    for gone in (1, 4):
        with pytest.raises(KeyError, match=f"version {gone}"):
            memory.published(0, gone)


def test_a_copy_is_not_written_over_while_it_is_sent() -> None:
    memory = memory_of()
    memory.publish(0)
    sending, done = Sending(), Sending(done=True)
    frame = memory.published(0, 0).frame
    before = bytes(frame)
    for sent in (done, sending, done):
        memory.published(0, 0).sends.append(sent)
    for version in range(1, 6):
        memory.scope["a"].fill_(version)
        memory.publish(version)
    assert bytes(frame) == before, "a peer that is slow to read still gets what it was promised"
    assert len({memory.published(0, v).flat.data_ptr() for v in (4, 5)}) == 2


# -- whole states ---------------------------------------------------------------------------------------------------


def test_restore_writes_through_the_views() -> None:
    memory = memory_of()
    saved = memory.clone(["a", "b", "a@momentum"])
    flat = memory.buckets[0].flat
    memory.scope["a"].fill_(-1)
    memory.scope["a@momentum"].fill_(-1)
    memory.restore(saved)
    assert flat.tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert memory.scope["a@momentum"].tolist() == [0] * 4
    assert memory.scope["a"].data_ptr() == flat.data_ptr()
    saved["a"].fill_(9)
    assert flat[0] == 0, "a snapshot and the memory share nothing"


@pytest.mark.parametrize(
    ("name", "value"),
    [("a", torch.ones(1)), ("a", torch.ones(4, dtype=torch.float64)), ("a", torch.ones(2, 2)), ("c", torch.ones(4))],
)
def test_restore_refuses_what_does_not_fit_and_changes_nothing(name: str, value: Tensor) -> None:
    memory = memory_of()
    with pytest.raises(GraphftError, match=f"%{name} is restored as"):
        memory.restore({"b": torch.zeros(3), name: value})
    assert memory.buckets[0].flat.tolist() == [0, 1, 2, 3, 10, 11, 12]


def test_faults_of_frames() -> None:
    memory = memory_of()
    assert memory.fault(0, memoryview(bytes(28))) == ""
    assert memory.fault(0, memoryview(bytes(24)))
    assert memory.fault(0, None)
    assert memory.fault(1, memoryview(b""))


# -- backups ---------------------------------------------------------------------------------------------------------


def test_a_backup_is_the_version_that_was_published() -> None:
    memory = memory_of()
    for version in range(4):
        memory.scope["a"].fill_(version)
        memory.scope["b"].fill_(10 * version)
        memory.publish(version, keep={0, 1})
    for version in (0, 1, 2, 3):
        memory.back_up(version)
        assert memory.scope["a@BACKUP"].tolist() == [version] * 4
        assert memory.scope["b@BACKUP"].tolist() == [10 * version] * 3
    memory.publish(4)
    with pytest.raises(KeyError):
        memory.back_up(1)
    memory.back_up(-1)
    assert memory.scope["a@BACKUP"].data_ptr() == memory.scope["a"].data_ptr(), "without a version: the live one"
