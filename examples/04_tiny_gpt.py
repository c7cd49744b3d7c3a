"""A small GPT that learns Python from the sources of Python's standard library, byte by byte.

The text is read by a torch Dataset of this script's own, which the trainers make again from a reference to it.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import graphft

BLOCK, VOCABULARY = 64, 256


class Sources:
    """Blocks of bytes of the standard library's modules, and the bytes that follow each: ([BLOCK], [BLOCK])."""

    def __init__(self, first: int, last: int) -> None:
        """Blocks `first` to `last` of the text, whose files are in alphabetical order."""
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
        self.text = text[first * BLOCK : last * BLOCK + 1].astype(np.int64)

    def __len__(self) -> int:
        return (len(self.text) - 1) // BLOCK

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        part = torch.from_numpy(self.text[i * BLOCK : (i + 1) * BLOCK + 1])
        return part[:-1], part[1:]


class Attention(nn.Module):
    """Causal self-attention: [batch, time, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Logits of the next byte: [batch, time] -> [batch, time, VOCABULARY]. Input and output embeddings are tied."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_fn(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def continue_text(model: nn.Module, start: str, length: int) -> str:
    """`start` and `length` bytes that the model finds likely."""
    text, generator = list(start.encode()), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([text[-BLOCK:]]))[0, -1]
            text.append(int(torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()
    blocks = 1024 if options.small else 16384

    torch.manual_seed(0)
    model = TinyGPT()
    program = graphft.build(
        model,
        loss_fn,
        name="tiny-gpt",
        inputs={"tokens": ((None, BLOCK), torch.int64), "following": ((None, BLOCK), torch.int64)},
    )
    data = graphft.dataset(Sources, {"first": 0, "last": blocks}, columns=("tokens", "following"), chunk_size=512)
    steps = options.passes * blocks // (2 * 32)
    rate = graphft.schedule.linear_warmup(graphft.schedule.cosine(3e-3, steps), max(1, steps // 10))
    graphft.minimize(program, graphft.AdamW(lr=rate), clip=graphft.ClipByGlobalNorm(1.0))
    job = graphft.transpile(
        program, trainers=2, pservers=2, sync=True, ft=True, data=data, batch_size=32, epochs=options.passes
    )
    result = job.run()

    graphft.load_into(model, result.model)
    model.eval()
    unseen = Sources(blocks, blocks + 256)
    tokens, following = (torch.stack(part) for part in zip(*(unseen[i] for i in range(len(unseen))), strict=True))
    with torch.no_grad():
        loss = float(loss_fn(model, tokens, following))
    print(f"unseen text  {loss / math.log(2):.3f} bits per byte (8 without a model)")
    print(f"model        {result.model}")
    print(continue_text(model, "def read(self", 240))


if __name__ == "__main__":
    main()
