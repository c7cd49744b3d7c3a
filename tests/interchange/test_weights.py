"""Weights from files, folders and URLs of others, and back."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem

import graphft
from graphft.errors import GraphftError, UsageError
from graphft.runtime.interchange.distributed import read_distributed, write_distributed
from graphft.runtime.interchange.weights import INDEX, write_weights


def make_model(seed: int = 0, hidden: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 2))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return make_model(1).state_dict()


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def test_a_folder_in_several_files(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    files = write_weights(tmp_path / "hf", weights, shard_bytes=300)
    assert len(files) > 2
    index = json.loads((tmp_path / "hf" / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert set(index["weight_map"]) == set(weights)
    together: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        together |= load_file(tmp_path / "hf" / file)
    assert same(together, weights)
    assert same(graphft.read_weights(tmp_path / "hf"), weights)


def test_a_folder_in_one_file_and_a_file(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    assert write_weights(tmp_path / "hf", weights) == ["model.safetensors"]
    assert same(graphft.read_weights(tmp_path / "hf"), weights)
    assert same(graphft.read_weights(tmp_path / "hf" / "model.safetensors"), weights)


@pytest.mark.slow
def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)  # its head is tied to its embeddings
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    found = graphft.read_weights(tmp_path / "theirs")
    own = model.state_dict()
    assert all(torch.equal(found[n], own[n]) for n in found)
    assert own.keys() - found.keys() == {"lm_head.weight"}
    config.save_pretrained(tmp_path / "ours")
    write_weights(tmp_path / "kept", found, shard_bytes=10_000)
    for file in (tmp_path / "kept").iterdir():
        file.rename(tmp_path / "ours" / file.name)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert same(again.state_dict(), own)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda i: i["weight_map"].update(more=i["weight_map"]["0.weight"]), "does not have it"),
        (lambda i: i["weight_map"].update({"0.bias": "../../x.safetensors"}), "names files elsewhere"),
        (lambda i: i["weight_map"].update({"0.bias": "gone.safetensors"}), "cannot be read"),
        (lambda i: i.pop("weight_map"), "is no index of weights"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, weights: dict[str, Tensor], change: Any, says: str) -> None:
    write_weights(tmp_path, weights, shard_bytes=400)
    index = json.loads((tmp_path / INDEX).read_bytes())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(GraphftError, match=says):
        graphft.read_weights(tmp_path)


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def test_a_directory_of_torchs(tmp_path: Path) -> None:
    model = make_model(2)
    optimizer = torch.optim.Adam(model.parameters())
    dcp.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, checkpoint_id=tmp_path / "d"
    )
    assert same(graphft.read_weights(tmp_path / "d"), model.state_dict())
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "flat")
    assert same(graphft.read_weights(tmp_path / "flat"), model.state_dict())


def test_torch_reads_what_is_exported(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_distributed(tmp_path / "d", weights)
    state = {"model": make_model(3).state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "d")
    assert same(state["model"], weights)


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code_does_not(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_distributed(tmp_path / "d", weights)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(GraphftError, match="is not what"):
        graphft.read_weights(tmp_path / "d")
    assert not (tmp_path / "made").exists()
    for name in ("model.bin", "w.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / "made")))
        with pytest.raises(UsageError, match="is a pickle"):
            graphft.read_weights(tmp_path / name)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("way", ["fewer", "elsewhere", "attribute", "dtype"])
def test_metadata_that_lie(tmp_path: Path, weights: dict[str, Tensor], way: str) -> None:
    """What no part covers would be memory that nobody has written; and a class of the process must not be changed."""
    write_distributed(tmp_path / "d", weights)
    path = tmp_path / "d" / ".metadata"
    found = pickle.loads(path.read_bytes())
    name = next(iter(found.state_dict_metadata))
    if way == "fewer":
        found.state_dict_metadata[name].chunks.clear()
    elif way == "elsewhere":
        found.storage_data = {
            index: filesystem._StorageInfo("../secret", place.offset, place.length)
            for index, place in found.storage_data.items()
        }
    elif way == "dtype":
        found.state_dict_metadata[name].properties.dtype = Evil(tmp_path / "made")
    path.write_bytes(pickle.dumps(found))
    if way == "attribute":
        path.write_bytes(b"\x80\x02cpathlib\nPosixPath\nN}X\x06\x00\x00\x00parentX\x04\x00\x00\x00/etcs\x86b.")
    with pytest.raises(GraphftError) as caught:
        graphft.read_weights(tmp_path / "d")
    assert caught.value.rule == "weights"
    assert Path("/a/b/c").parent == Path("/a/b")
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_not_there(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_distributed(tmp_path / "d", weights)
    with pytest.raises(UsageError, match="has no 'modle'") as caught:
        graphft.read_weights(tmp_path / "d", "modle")
    assert "it has model" in caught.value.help


def test_a_truncated_directory(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_distributed(tmp_path / "d", weights)
    (data,) = (tmp_path / "d").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-400])
    with pytest.raises(GraphftError, match="cannot be read"):
        read_distributed(tmp_path / "d")


# -- what else there is -----------------------------------------------------------------------------------------------


def test_what_a_loop_saved(tmp_path: Path) -> None:
    model = make_model(4)
    state = {"net": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    for epoch in range(2):
        graphft.save_check_point(state, graphft.TrainStatus(epoch), str(tmp_path / "run"))
        if not epoch:
            first = {n: t.clone() for n, t in model.state_dict().items()}
            with torch.no_grad():
                model[0].weight.add_(1)
    assert same(graphft.read_weights(tmp_path / "run", "net"), model.state_dict())
    assert same(graphft.read_weights(tmp_path / "run", "net", version=0), first)
    with pytest.raises(UsageError, match="has no 'model'"):
        graphft.read_weights(tmp_path / "run")


# -- into a program ---------------------------------------------------------------------------------------------------


def make_program(model: nn.Module) -> graphft.Program:
    program = graphft.build(
        model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), {"x": (None, 8), "y": ((None,), torch.int64)}
    )
    graphft.minimize(program, graphft.Adam(lr=0.01))
    return program


def transpile(program: graphft.Program, **options: Any) -> graphft.Job:
    data = graphft.arrays(x=torch.randn(32, 8), y=torch.zeros(32, dtype=torch.int64), chunk_size=16)
    return graphft.transpile(program, data=data, batch_size=8, name="j", **options)


def test_a_job_begins_with_them(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / "w.safetensors")
    program = make_program(make_model())
    before = graphft.state_dict(program)
    job = transpile(program, init_from=tmp_path / "w.safetensors")
    assert same(graphft.state_dict(job.source), weights)
    assert same(graphft.state_dict(program), before), "the program itself is not changed"
    assert job.fingerprint.values != transpile(program).fingerprint.values
    assert transpile(program, init_from=weights).fingerprint.values == job.fingerprint.values


def test_what_does_not_fit_is_an_error_and_partly_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    program = make_program(make_model())
    other = make_model(1, hidden=12).state_dict()
    with pytest.raises(GraphftError, match=r"0\.weight is float32\[12, 8\], expected float32\[16, 8\]"):
        transpile(program, init_from=other)
    del other["3.bias"]
    other |= {"head.weight": torch.zeros(3)}
    with caplog.at_level(logging.WARNING, "graphft"), pytest.raises(GraphftError, match="is missing"):
        transpile(program, init_from={n: t for n, t in other.items() if n == "head.weight"}, init_partial=True)
    fits = {"3.bias": torch.ones(2), "1.weight": torch.zeros(16)} | {"head.weight": torch.zeros(3)}
    job = transpile(program, init_from=fits, init_partial=True)
    assert torch.equal(job.source.values["3.bias"], torch.ones(2))
    assert torch.equal(job.source.values["3.weight"], program.values["3.weight"])
    (text,) = [r.getMessage() for r in caplog.records if "not loaded" in r.getMessage()]
    assert text.startswith("2 variables")
    for name in ("0.weight is missing", "head.weight is not known"):
        assert name in text
    with pytest.raises(UsageError, match="init_from is not"):
        transpile(program, init_partial=True)


def test_tied_weights_go_by_one_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    program = make_program(Tied())
    value = torch.randn(8, 8)
    for names in (("one.weight",), ("two.weight",), ("one.weight", "two.weight")):
        job = transpile(program, init_from={n: value.clone() for n in names})
        assert torch.equal(job.source.values["one.weight"], value)
    with pytest.raises(GraphftError, match="are one tensor, and differ"):
        transpile(program, init_from={"one.weight": value, "two.weight": value + 1})
