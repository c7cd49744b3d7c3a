"""Epoch by epoch: which tumours are malignant? A Trainer keeps the best epoch, and stops when no better one comes.

Two workers and two parameter servers train; a worker is killed with SIGKILL on the way, and the result is that of the
undisturbed run. After each epoch the script looks at held-out data. Stopped and started again, it goes on where it was.
GRAPHFT_ENGINE says where the workers run; nothing in here does.
"""

from __future__ import annotations

import argparse
import math
import signal

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import graphft

INPUTS = {"x": (None, 30), "y": ((None,), torch.int64)}


def load_data() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(to learn from, held out): 569 tumours, 30 measures of each."""
    found = load_breast_cancer()
    x, y = torch.tensor(found.data).float(), torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:169], order[169:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    return {"x": x[train], "y": y[train]}, {"x": x[held_out], "y": y[held_out]}


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same initial values, and so the same bits, each time
    return nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    scores = model(x)
    return nn.functional.cross_entropy(scores, y), {"accuracy": (scores.argmax(1) == y).float().mean()}


def make_trainer() -> graphft.Trainer:
    train, held_out = load_data()
    model = make_model()
    program = graphft.build(model, loss_fn, name="tumours", inputs=INPUTS)
    graphft.minimize(program, torch.optim.AdamW(model.parameters(), lr=3e-3), model=model)
    return graphft.Trainer(
        program,
        num_workers=2,
        pservers=2,
        data=graphft.arrays(**train, chunk_size=50),
        batch_size=10,
        validation=graphft.Validation(data=graphft.arrays(**held_out, chunk_size=169)),
        quiet=True,
    )


def best_so_far(place: str) -> tuple[int, float]:
    """(epoch, held-out loss) of what was saved; (0, infinity) before."""
    found = graphft.read_check_point(place)
    return (found.status.epoch_no + 1, found.status.metrics["loss"]) if found is not None else (0, math.inf)


def judge(trainer: graphft.Trainer, best: str) -> dict[str, float]:
    """Held-out metrics of the newest epoch, which is saved if it is the best one. Called twice, it saves it once."""
    found = trainer.validate()
    if found["loss"] < best_so_far(best)[1]:
        trainer.save(best, keep=1, metrics=found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60, help="the most there are to be (default: 60)")
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better one (default: 5)")
    parser.add_argument("--kill-at", type=int, default=3, metavar="EPOCH", help="kill a worker before it; 0: never")
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()
    most = 5 if options.small else options.epochs

    with make_trainer() as trainer:
        best = f"{trainer.storage}/best"
        if trainer.at_epoch_end:  # this script may have died before it had looked at its last epoch
            judge(trainer, best)
        while trainer.epoch < most and trainer.epoch - best_so_far(best)[0] < options.patience:
            if trainer.epoch + 1 == options.kill_at and trainer.signal("trainer", 1, signal.SIGKILL):
                print("worker 1 is killed; the other one does its work until it is back")
            trained, found = trainer.train(max_retries=3), judge(trainer, best)
            print(f"epoch {trained['epoch']:2d}  loss {trained['loss']:.4f}  held out: loss {found['loss']:.4f}, "
                  f"accuracy {found['accuracy']:.4f}  {trained['preemptions']} preemptions")  # fmt: skip

    epoch, loss = best_so_far(best)
    model = make_model().eval()
    graphft.load_into(model, graphft.read_weights(best))
    held_out = load_data()[1]
    with torch.no_grad():
        right = (model(held_out["x"]).argmax(1) == held_out["y"]).sum()
    print(f"best epoch         {epoch}, held-out loss {loss:.4f}")
    print(f"held-out accuracy  {right / len(held_out['y']):.4f} of {len(held_out['y'])} tumours")
    print(f"saved in           {best}")


if __name__ == "__main__":
    main()
