"""Weights from files, folders and URLs of others, and back; into models and programs whole, or not at all."""

from __future__ import annotations

import json
import logging
import pickle
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
from graphft.runtime.interchange.distributed import write_distributed
from graphft.runtime.interchange.weights import write_weights
from tests.interchange.test_job_state import make_model
from tests.support.eager import same
from tests.support.zoo import convnet, tied

INDEX = "model.safetensors.index.json"


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return make_model(1).state_dict()


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def in_two_files(folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Writes them as Hugging Face cuts large models; returns the index."""
    folder.mkdir(exist_ok=True)
    places = {name: f"model-{1 + (i > 2)}-of-2.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({n: t for n, t in weights.items() if places[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def test_a_folder_of_hugging_face(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    in_two_files(tmp_path / "two", weights)
    assert same(graphft.read_weights(tmp_path / "two"), weights)
    write_weights(tmp_path / "hf", weights | {"tied": weights["0.weight"]})
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), weights), "a tied one is there once"
    for source in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        assert same(graphft.read_weights(source), weights)


@pytest.mark.slow
def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)  # its head is tied to its embeddings
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    found, own = graphft.read_weights(tmp_path / "theirs"), model.state_dict()
    assert all(torch.equal(found[n], own[n]) for n in found)
    assert own.keys() - found.keys() == {"lm_head.weight"}
    write_weights(tmp_path / "ours", found)
    config.save_pretrained(tmp_path / "ours")
    assert same(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").state_dict(), own)


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
    index = in_two_files(tmp_path, weights)
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(GraphftError, match=says):
        graphft.read_weights(tmp_path)


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def test_directories_of_torch(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    model = make_model(2)
    optimizer = torch.optim.Adam(model.parameters())
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    for name, state in (("d", saved), ("flat", model.state_dict())):
        dcp.save(state, checkpoint_id=tmp_path / name)
        assert same(graphft.read_weights(tmp_path / name), model.state_dict())
    write_distributed(tmp_path / "ours", weights)
    found = {"model": make_model(3).state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "ours")
    assert same(found["model"], weights)


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
    """Elements that no part covers would be memory that nobody wrote; a class of the process must not be changed."""
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
    with pytest.raises(GraphftError, match=r"^error\[weights\]"):
        graphft.read_weights(tmp_path / "d")
    assert Path("/a/b/c").parent == Path("/a/b")
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_not_there_and_a_truncated_directory(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_distributed(tmp_path / "d", weights)
    with pytest.raises(UsageError, match="has no 'modle'") as caught:
        graphft.read_weights(tmp_path / "d", "modle")
    assert "it has model" in caught.value.help
    (data,) = (tmp_path / "d").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-400])
    with pytest.raises(GraphftError, match="cannot be read"):
        graphft.read_weights(tmp_path / "d")


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
    with pytest.raises(GraphftError, match=r"0\.weight is float32\[12, 8\], expected float32\[32, 8\]"):
        transpile(program, init_from=make_model(1, hidden=12).state_dict())
    head = {"head.weight": torch.zeros(3)}
    with pytest.raises(GraphftError, match="is missing"):
        transpile(program, init_from=head, init_partial=True)
    with caplog.at_level(logging.WARNING, "graphft"):
        job = transpile(program, init_from={"3.bias": torch.ones(2), **head}, init_partial=True)
    assert torch.equal(job.source.values["3.bias"], torch.ones(2))
    assert torch.equal(job.source.values["3.weight"], program.values["3.weight"])
    (text,) = [r.getMessage() for r in caplog.records if "not loaded" in r.getMessage()]
    assert text.startswith("1 variables")
    for name in ("0.weight is missing", "head.weight is not known"):
        assert name in text
    with pytest.raises(UsageError, match="init_from is not"):
        transpile(program, init_partial=True)


@pytest.mark.parametrize("make", [tied, convnet])
def test_file_holds_the_models_state_dict(tmp_path: Path, make: type) -> None:
    case = make()
    program = graphft.build(case.model, case.loss_fn, case.inputs)
    executor = graphft.Executor()
    executor.run(program, case.batch(4))
    executor.scope(program)[program.of_kind(graphft.Kind.PARAM)[0].name].add_(1)
    path = graphft.save_weights(program, executor.scope(program), tmp_path / "sub" / "model.safetensors")
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    with_torch, with_graphft = make().model, make().model
    with_torch.load_state_dict(load_file(path))
    assert graphft.load_into(with_graphft, path) is with_graphft
    for n, value in graphft.state_dict(program, executor.scope(program)).items():
        assert torch.equal(with_torch.state_dict()[n], value)
        assert torch.equal(with_graphft.state_dict()[n], value)
    with pytest.raises(GraphftError, match=r"error\[weights\]"):
        graphft.state_dict(program, {})


def test_one_name_of_tied_weights_is_enough() -> None:
    state = tied().model.state_dict()
    del state["head.weight"]
    model = graphft.load_into(tied().model, state)
    assert torch.equal(model.state_dict()["head.weight"], state["embed.weight"])


def test_nothing_is_half_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = {n: v.clone() for n, v in model.state_dict().items()}
    good = {n: v + 1 for n, v in before.items()}
    cases = [
        {n: v for n, v in good.items() if n != "1.bias"},
        {**good, "2.bias": torch.ones(1)},
        {**good, "1.weight": torch.ones(3)},
        {**good, "1.bias": torch.ones(1).double()},
    ]
    for state in cases:
        save_file(state, tmp_path / "model.safetensors")
        for source in (state, tmp_path / "model.safetensors", tmp_path / "none.safetensors"):
            with pytest.raises(GraphftError, match=r"^error\[weights\]"):
                graphft.load_into(model, source)
        assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
