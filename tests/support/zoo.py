"""Models that tests capture: each a function that gives model, loss, inputs and a maker of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model with what `graphft.build` takes, and batches for it."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    inputs: Mapping[str, Any]
    batch: Callable[[int], dict[str, Tensor]]
    """A batch of this many samples, random."""


def _classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def _images(model: nn.Module, size: int = 8, channels: int = 1, classes: int = 10) -> Case:
    def batch(n: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, channels, size, size), "y": torch.randint(classes, (n,))}

    inputs = {"x": (None, channels, size, size), "y": ((None,), torch.int64)}
    return Case(model, _classify, inputs, batch)


def mlp() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def batch(n: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, 8), "y": torch.randn(n, 4)}

    return Case(model, lambda model, x, y: F.mse_loss(model(x), y), {"x": (None, 8), "y": (None, 4)}, batch)


def convnet() -> Case:
    """Convolution, batch norm and dropout."""
    return _images(
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(36, 10),
        )
    )


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(self.rnn.hidden_size * (2 if self.rnn.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _sequences(model: nn.Module) -> Case:
    def batch(n: int) -> dict[str, Tensor]:
        return {"x": torch.randn(n, 5, 6), "y": torch.randint(3, (n,))}

    return Case(model, _classify, {"x": (None, 5, 6), "y": ((None,), torch.int64)}, batch)


def lstm() -> Case:
    return _sequences(Recurrent(nn.LSTM, num_layers=2))


def gru() -> Case:
    return _sequences(Recurrent(nn.GRU, bidirectional=True))


class Embedded(nn.Module):
    """Embeddings of categories beside numbers: several inputs of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.carrier, self.tail = nn.Embedding(5, 4), nn.Embedding(30, 6, padding_idx=0)
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 1)

    def forward(self, carrier: Tensor, tail: Tensor, numbers: Tensor) -> Tensor:
        together = torch.cat([self.carrier(carrier), self.tail(tail), numbers], dim=1)
        return self.head(self.norm(together)).squeeze(1)


def embedding() -> Case:
    def loss_fn(model: nn.Module, late: Tensor, **features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(**features)
        accuracy = ((logits > 0) == late.bool()).float().mean()
        return F.binary_cross_entropy_with_logits(logits, late.float()), {"accuracy": accuracy}

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "carrier": torch.randint(5, (n,), dtype=torch.int32),
            "tail": torch.randint(30, (n,)),
            "numbers": torch.randn(n, 3),
            "late": torch.rand(n) < 0.3,
        }

    inputs = {
        "carrier": ((None,), torch.int32),
        "tail": ((None,), torch.int64),
        "numbers": (None, 3),
        "late": ((None,), torch.bool),
    }
    return Case(Embedded(), loss_fn, inputs, batch)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.register_buffer("position", torch.randn(1, 6, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


def transformer() -> Case:
    def batch(n: int) -> dict[str, Tensor]:
        return {"x": torch.randint(20, (n, 6)), "y": torch.randint(3, (n,))}

    return Case(Encoder(), _classify, {"x": ((None, 6), torch.int64), "y": ((None,), torch.int64)}, batch)


class Tied(nn.Module):
    """A language model whose output layer is its embedding, with a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))) * self.scale)


def tied() -> Case:
    def loss_fn(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Case(
        Tied(), loss_fn, {"ids": ((None, "length"), torch.int64)}, lambda n: {"ids": torch.randint(20, (n, 5 + n % 3))}
    )


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = (
            nn.Sequential()
            if inside == outside and stride == 1
            else nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


def resnet() -> Case:
    return _images(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            Residual(8, 8, 1),
            Residual(8, 16, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        ),
        channels=3,
    )


# -- Hugging Face: a class with a small random configuration, nothing is downloaded -------------------------------


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2)).train()
    loss_fn = lambda model, ids: model(input_ids=ids, labels=ids).loss  # noqa: E731
    return Case(model, loss_fn, {"ids": ((None, 12), torch.int64)}, lambda n: {"ids": torch.randint(60, (n, 12))})


CASES: dict[str, Callable[[], Case]] = {
    f.__name__: f for f in (mlp, convnet, lstm, gru, embedding, transformer, tied, resnet)
}
HUGGING_FACE: dict[str, Callable[[], Case]] = {f.__name__: f for f in (gpt2,)}
