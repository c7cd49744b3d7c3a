"""A training loop of one's own, in plain torch, that may be killed at any moment and goes on where it was.

The loop is that of the design "Fault tolerance for sync training" (`range(status.next(), epochs)`), and saves in the
middle of epochs, too. Run it, kill it, run it again: the model is that of a run without a kill, bit by bit.

    python examples/05_own_loop.py --kill-at 120      # SIGKILLs itself after step 120
    python examples/05_own_loop.py                    # goes on, in the middle of an epoch
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn

import graphft


def sha256(model: nn.Module) -> str:
    """Returns the digest of the bits of all parameters."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", default="out/own-loop", help="a folder, or a URL such as s3://bucket/run")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="end by SIGKILL after this step")
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()
    epochs, batch_size = (3 if options.small else options.epochs), 32

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // batch_size))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    checkpoints = graphft.CheckPoints(options.checkpoints, keep=3)
    status = checkpoints.load(state)
    print(
        f"going on at epoch {status.next()}, step {status.step}" if status else "from the start: there is no checkpoint"
    )
    status = status or graphft.TrainStatus()
    for epoch in range(status.next(), epochs):
        # The order is a function of the epoch: so a loop that begins in its middle reads the batches that are left.
        batches = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(batch_size)
        for number in range(status.offset, len(batches)):
            rows = batches[number]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            schedule.step()
            status = graphft.TrainStatus(epoch - 1, status.step + 1, number + 1, {"loss": loss.item()})
            if status.step % options.every == 0:
                checkpoints.begin(state, status)  # beside the loop
            if status.step == options.kill_at:
                print(f"killing this process after step {status.step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        status = graphft.TrainStatus(epoch, status.step, 0, status.metrics)
        checkpoints.save(state, status)

    with torch.no_grad():
        accuracy = float((model.eval()(x).argmax(1) == y).float().mean())
    print(f"accuracy  {accuracy:.4f} on what it was trained with\nmodel     sha256 {sha256(model)}")


if __name__ == "__main__":
    main()
