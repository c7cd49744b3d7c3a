"""A job decides by its validations as torch and Keras do."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import torch
from hypothesis import given

import graphft
from graphft.runtime.protocol.decisions import Decided, RangeResult, decide, sums_as_text, totals
from graphft.transpiler.validation import ValidationConfig

DATA = graphft.arrays(x=torch.zeros(4, 1), chunk_size=4)
values = st.lists(st.sampled_from([0.1, 0.2, 0.20001, 0.5, 1.0, 1.5, -2.0, math.inf, math.nan]), max_size=12)


def terms(**options: Any) -> ValidationConfig:
    return graphft.Validation(data=DATA, **options).config()


def decided(config: ValidationConfig, losses: list[float]) -> Decided:
    found = Decided()
    for number, loss in enumerate(losses, 1):
        found = decide(config, found, 10 * number, {"loss": loss if math.isfinite(loss) else str(loss)})
        found = msgspec.json.decode(msgspec.json.encode(found), type=Decided)  # as etcd has it
    return found


@given(values, st.integers(0, 2), st.integers(0, 2), st.sampled_from(["min", "max"]), st.sampled_from(["rel", "abs"]))
def test_learning_rates_go_down_as_torchs_do(
    losses: list[float], patience: int, cooldown: int, mode: Any, threshold_mode: Any
) -> None:
    losses = [loss for loss in losses if not math.isinf(loss)]
    options: dict[str, Any] = {"mode": mode, "patience": patience, "cooldown": cooldown, "factor": 0.5}
    options |= {"threshold": 0.1, "threshold_mode": threshold_mode}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options, min_lr=0.2, eps=0.0)
    if threshold_mode == "rel" and any(loss < 0 for loss in losses):
        return  # torch's margin has the wrong sign there
    for loss in losses:
        scheduler.step(loss)
    config = terms(plateau=graphft.ReduceLROnPlateau("loss", **options, min_scale=0.2))
    assert decided(config, losses).scale == optimizer.param_groups[0]["lr"]


@given(values, st.integers(1, 3), st.sampled_from([0.0, 0.15]))
def test_it_stops_as_keras_does(losses: list[float], patience: int, min_delta: float) -> None:
    config = terms(stop=graphft.EarlyStopping("loss", patience=patience, min_delta=min_delta))
    best, wait, stopped_at = math.inf, 0, 0
    for number, loss in enumerate(losses, 1):
        if loss < best - min_delta:
            best, wait = loss, 0
        else:
            wait += 1
        if wait >= patience and not stopped_at:
            stopped_at = number
    found = [bool(decided(config, losses[:n]).stopped) for n in range(1, len(losses) + 1)]
    assert found == [bool(stopped_at) and n >= stopped_at for n in range(1, len(losses) + 1)]


@given(values)
def test_the_first_of_the_best_is_the_best(losses: list[float]) -> None:
    found = decided(terms(best="loss"), losses)
    finite = [(loss, number) for number, loss in enumerate(losses, 1) if math.isfinite(loss)]
    assert (found.best, found.best_step) == ((min(finite)[0], 10 * min(finite)[1]) if finite else (None, -1))


def test_which_way_is_better_follows_from_the_name() -> None:
    assert terms(best="val_loss").best == graphft.Criterion("val_loss", "min")
    assert terms(best="auc").best == graphft.Criterion("auc", "max")
    assert terms(stop=graphft.EarlyStopping("auc", "min")).stop == graphft.EarlyStopping("auc", "min")


def test_terms_come_back_from_a_record() -> None:
    config = terms(best="loss", stop=graphft.EarlyStopping(patience=1), plateau="loss", every=7)
    again = ValidationConfig.from_json(msgspec.json.decode(msgspec.json.encode(config.to_json())))
    assert again is not None
    assert (again.criteria, again.every) == (config.criteria, 7)
    assert terms(every=7).to_json().keys() == {"data", "batch_size", "every"}


def test_totals_are_means_over_all_samples_in_the_order_of_the_ranges() -> None:
    records = {1: RangeResult(1, ("0.3",)), 0: RangeResult(3, ("0.1",))}
    assert totals(records, 2) == (4, ((0.0 + 0.1 + 0.3) / 4,))
    assert totals(records, 3) is None


@given(st.lists(st.floats(), min_size=1, max_size=5), st.integers(1, 9))
def test_sums_are_kept_to_the_bit(values: list[float], samples: int) -> None:
    record = RangeResult(samples=samples, sums=sums_as_text(values))
    read = msgspec.json.decode(msgspec.json.encode(record), type=RangeResult)
    assert [math.copysign(1, float(s)) for s in read.sums] == [math.copysign(1, v) for v in map(float, record.sums)]
    assert [repr(float(s)) for s in read.sums] == [repr(v) for v in values]


@given(st.permutations(range(4)), st.lists(st.floats(-1e9, 1e9), min_size=4, max_size=4))
def test_the_order_in_which_ranges_are_computed_does_not_matter(order: list[int], sums: list[float]) -> None:
    done = {number: RangeResult(samples=2, sums=sums_as_text([sums[number]])) for number in order}
    assert totals(done, 4) == totals(dict(sorted(done.items())), 4)
