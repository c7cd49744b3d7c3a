"""Flips a bit, or cuts a file short, of a checkpoint, many times: who notices when it is loaded?

    python benchmarks/damage.py [--times 1000]

The same model and optimizer, saved by graphft, by torch.save, and by torch.distributed.checkpoint. A load that raises
has noticed, and so has one that goes back to an older checkpoint; one that gives other values than were saved has not.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import graphft


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4096))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors(state: Any) -> list[Tensor]:
    """All that a nested state has, in order."""
    if isinstance(state, Tensor):
        return [state]
    items = list(state.values()) if isinstance(state, dict) else list(state) if isinstance(state, (list, tuple)) else []
    return [tensor for item in items for tensor in tensors(item)]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load_graphft(path: Path) -> list[Tensor]:
    model, optimizer = make()
    status = graphft.load_check_point({"model": model, "optimizer": optimizer}, str(path))
    if status is None or status.epoch_no != 1:
        raise ValueError("an older checkpoint was loaded, and that was said")
    return tensors(states(model, optimizer))


def load_weights(path: Path) -> list[Tensor]:
    return tensors(graphft.read_weights(path / "model.safetensors"))


def load_torch(path: Path) -> list[Tensor]:
    return tensors(torch.load(path / "checkpoint.pt", weights_only=True))


def load_dcp(path: Path) -> list[Tensor]:
    state = states(*make())
    for tensor in tensors(state):
        tensor.data.zero_()
    dcp.load(state, checkpoint_id=str(path))
    return tensors(state)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def save_all(root: Path) -> dict[str, tuple[Path, Callable[[Path], list[Tensor]]]]:
    model, optimizer = make()
    place = graphft.CheckPoints(root / "graphft")
    for epoch in range(2):
        place.save({"model": model, "optimizer": optimizer}, graphft.TrainStatus(epoch))
        for parameter in model[0].parameters():  # the other layer stays
            parameter.data.add_(0.125)
    (root / "torch").mkdir()
    (root / "weights").mkdir()
    graphft.save_weights(graphft.build(model, loss, {"x": (None, 32)}), None, root / "weights" / "model.safetensors")
    torch.save(states(model, optimizer), root / "torch" / "checkpoint.pt")
    dcp.save(states(model, optimizer), checkpoint_id=str(root / "dcp"))
    return {
        "graphft": (root / "graphft", load_graphft),
        "graphft, a model alone": (root / "weights", load_weights),
        "torch.save": (root / "torch", load_torch),
        "torch.distributed.checkpoint": (root / "dcp", load_dcp),
    }


def damage(path: Path, pick: random.Random) -> None:
    """One bit of one byte of all files, or one file cut off at it. Of graphft's, those of the newest version, and the
    tensors of the first, to which it refers."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.parent.name[-1:] + p.name != "0manifest.json")
    file = pick.choices(files, [p.stat().st_size for p in files])[0] if pick.random() < 0.5 else pick.choice(files)
    data = bytearray(file.read_bytes())
    place = pick.randrange(len(data))
    if pick.random() < 0.8:
        data[place] ^= 1 << pick.randrange(8)
    else:
        del data[place:]
    file.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    times = parser.parse_args().times
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        places, scratch = save_all(Path(folder)), Path(folder, "scratch")
        whole = {name: load(path) for name, (path, load) in places.items()}
        print(f"{'':30} {'noticed':>8} {'the same':>9} {'WRONG':>7}   of {times} flips and cuts")
        for name, (path, load) in places.items():
            pick, found = random.Random(1), Counter[str]()
            for _ in range(times):
                shutil.copytree(path, scratch)
                damage(scratch, pick)
                try:
                    loaded = load(scratch)
                    same = len(loaded) == len(whole[name]) and all(map(_same, loaded, whole[name]))
                    found["same" if same else "wrong"] += 1
                except KeyboardInterrupt:
                    raise
                except BaseException:  # as DCP's error is
                    found["noticed"] += 1
                shutil.rmtree(scratch)
            print(f"{name:30} {found['noticed']:>8} {found['same']:>9} {found['wrong']:>7}")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


if __name__ == "__main__":
    main()
