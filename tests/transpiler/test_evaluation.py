"""The program that a job validates with: captured in eval mode, refused where it would depend on who computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError
from graphft.ir import Kind, Program
from graphft.runtime.validation.results import named
from graphft.transpiler.evaluation import evaluation_of, results_of

INPUTS = {"x": (None, 4), "y": ((None,), torch.int64)}


class Net(nn.Module):
    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("seen", torch.zeros(()))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen += 1  # type: ignore[operator]
            x = x + self.seen
        return self.layers(x)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return nn.functional.cross_entropy(model(x), y)


def with_scores(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    more = {"accuracy": (out.argmax(1) == y).float().mean(), "scores": out[:, 1], "labels": y}
    return nn.functional.cross_entropy(out, y), more


def share_of_good(scores: Tensor, labels: Tensor) -> Tensor:
    return ((scores > 0) == (labels > 0)).double().mean()


def make(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = model or Net()
    program = graphft.build(model, options.pop("loss", loss_fn), INPUTS)
    graphft.minimize(program, graphft.SGD(lr=0.1))
    return model, program


def data(records: int = 30, **columns: Tensor) -> Any:
    torch.manual_seed(1)
    given = columns or {"x": torch.randn(records, 4), "y": torch.randint(0, 2, (records,))}
    return graphft.arrays(chunk_size=10, **given)


def transpile(program: Program, validate: graphft.Validation | None, **options: Any) -> Any:
    return graphft.transpile(
        program, data=data(), batch_size=5, trainers=2, pservers=2, validate=validate, **{"ft": True, **options}
    )


def test_it_computes_what_eager_does() -> None:
    model, program = make()
    found = evaluation_of(program, graphft.Validation(data=data(), loss_fn=with_scores, reduce={"good": share_of_good}))
    assert results_of(found) == ("loss", "accuracy", "good")
    batch = {"x": torch.randn(7, 4), "y": torch.randint(0, 2, (7,))}
    done = graphft.Executor().run(found, batch, ["loss", "scores"])
    loss, scores = done["loss"], done["scores"]
    with torch.no_grad():
        expected, more = with_scores(model.eval(), **batch)
    assert torch.equal(loss, expected)
    assert torch.equal(scores, more["scores"])
    everything = {"scores": scores, "labels": batch["y"]}
    assert named(found, [0.5, 0.25], everything) == {
        "loss": 0.5,
        "accuracy": 0.25,
        "good": float(share_of_good(**everything)),
    }


@pytest.mark.parametrize("levels", [3, 1000])
def test_the_area_under_the_curve_is_scikit_learns(levels: int) -> None:
    torch.manual_seed(2)
    scores, labels = torch.randint(0, levels, (500,)).float(), torch.randint(0, 2, (500,))
    expected = roc_auc_score(labels.numpy(), scores.numpy())
    assert float(graphft.reducers.auc(scores, labels)) == pytest.approx(expected, rel=1e-12)
    for bad in (torch.ones(500), 2 * labels - 1):
        assert graphft.reducers.auc(scores, bad).isnan()
    assert graphft.reducers.auc(torch.full((500,), torch.nan), labels).isnan()


def test_it_is_saved_and_makes_the_job_another_one(tmp_path: Any) -> None:
    _, program = make()
    job, plain = transpile(program, graphft.Validation(data=data(), every=2)), transpile(program, None)
    block = job.programs.evaluation.blocks["validate"]
    assert [op.type for op in block.ops[:3]] == ["etcd_get_range", "read_chunk", "read_check_point"]
    assert block.ops[-1].type == "etcd_complete_range"
    assert "seen" not in str(block), "what it does not read is not read from the checkpoint"
    assert "0.weight" not in job.programs.evaluation.values
    job.save(tmp_path / "job")
    again = graphft.Job.load(tmp_path / "job")
    assert (again.hash, again.fingerprint) == (job.hash, job.fingerprint)
    assert again.config.validated == {2, 4}
    other = transpile(program, graphft.Validation(data=data(20), every=2))
    assert len({job.hash, plain.hash, other.hash}) == 3
    assert job.fingerprint.data.keys() - plain.fingerprint.data.keys() == {"validation: x", "validation: y"}


def rejects(message: str, program: Program, **options: Any) -> None:
    with pytest.raises(GraphftError, match=message) as caught:
        transpile(program, graphft.Validation(**{"data": data(), **options}))
    assert caught.value.help


def test_what_would_depend_on_who_computes_it_is_refused() -> None:
    _, program = make()
    counted = lambda m, x, y: (loss_fn(m, x, y), {"right": (m(x).argmax(1) == y).sum()})  # noqa: E731
    weights = lambda m, x, y: (loss_fn(m, x, y), {"weights": m.layers[0].weight})  # noqa: E731
    rejects("draws random numbers", program, loss_fn=lambda m, x, y: loss_fn(m, x + torch.rand_like(x), y))
    rejects("changes %seen", make(Net(counts=True))[1])
    rejects("returns 'weights' beside the loss as float32", program, loss_fn=weights)
    rejects("returns 'right' beside the loss as int64", program, loss_fn=counted)
    rejects("expected a name of letters, digits", program, loss_fn=with_scores, reduce={"labels@ALL": share_of_good})
    rejects("no reducer reads it", program, loss_fn=with_scores)
    rejects("returns float32", program, loss_fn=with_scores, reduce={"many": lambda scores: scores})
    rejects("has parameter nobody", program, loss_fn=with_scores, reduce={"auc": lambda nobody: nobody})
    rejects("'loss', a name that the program has", program, loss_fn=with_scores, reduce={"loss": share_of_good})
    rejects("names something else in what callbacks", program, loss_fn=with_scores, reduce={"steps": share_of_good})
    rejects("validate: input x is float32.batch, 4., but the data's column is float64", program,
            data=data(x=torch.randn(9, 4).double(), y=torch.zeros(9, dtype=torch.int64)))  # fmt: skip
    rejects("input x .* is not in the data", program, data=data(y=torch.zeros(9, dtype=torch.int64)))


def weighted(weights: list[float]) -> Any:
    given = torch.tensor(weights)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        return nn.functional.cross_entropy(model(x), y, given)

    return loss


def test_a_transformer_takes_no_way_that_depends_on_its_padding() -> None:
    """torch's fast path looks whether the mask is one of padding on the right, before it computes."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.embedding, self.encoder = nn.Embedding(20, 8), nn.TransformerEncoder(layer, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            padding = tokens == 0
            found = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
            return found.masked_fill(padding[..., None], 0).sum(1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, tokens = Encoder(), torch.randint(1, 20, (8, 6))
    tokens[2:5, 4:] = 0
    loss = lambda model, tokens: model(tokens).square().mean()  # noqa: E731
    program = graphft.build(model, loss, {"tokens": ((None, 6), torch.int64)})
    evaluation = evaluation_of(program, graphft.Validation(data=graphft.arrays(tokens=tokens, chunk_size=4)))
    (found,) = graphft.Executor().run(evaluation, {"tokens": tokens}, [evaluation.attrs["loss"]]).values()
    assert torch.equal(found, loss(model.eval(), tokens))
    assert torch.backends.mha.get_fastpath_enabled(), "as it was"


def test_a_constant_of_the_evaluation_is_its_own() -> None:
    _, program = make(loss=weighted([1.0, 1.0]))
    job = transpile(program, graphft.Validation(data=data(), loss_fn=weighted([1.0, 5.0])))
    evaluation = job.programs.evaluation
    (name,) = [v.name for v in evaluation.of_kind(Kind.CONST)]
    assert evaluation.values[name].tolist() == [1.0, 5.0]
    assert name in job.trainer_program().variables, "the trained program has another one of that name"
    assert name not in evaluation.find_op("read_check_point").attrs["names"]


def test_a_reducer_is_captured_for_the_number_of_records_that_there_are() -> None:
    _, program = make()
    by_length = lambda scores: scores.sum() / len(scores)  # noqa: E731
    by_size = lambda scores: scores.mean() if scores.shape[0] > 100 else scores.sum()  # noqa: E731
    drawn = lambda scores: scores[torch.randint(0, 3, (2,))].mean()  # noqa: E731
    rejects("dimension records must vary, but .*makes a number of it", program, loss_fn=alone, reduce={"n": by_length})
    rejects("draws random numbers", program, loss_fn=alone, reduce={"n": drawn})
    found = evaluation_of(program, graphft.Validation(data=data(30), loss_fn=alone, reduce={"n": by_size}))
    scores = torch.arange(30.0)
    assert named(found, [0.5], {"scores": scores})["n"] == float(scores.sum())
    rejects("was captured for records .* only", program, loss_fn=alone, reduce={"n": by_size}, data=data(300))


def alone(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return nn.functional.cross_entropy(out, y), {"scores": out[:, 1]}


def in_groups(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Any:
    loss = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (loss * weight).mean(), {"group": weight}


def test_a_loss_may_take_columns_that_the_held_out_data_alone_have() -> None:
    _, program = make()
    held_out = data(x=torch.randn(9, 4), y=torch.zeros(9, dtype=torch.int64), weight=torch.rand(9))
    mean = lambda group: group.double().mean()  # noqa: E731
    job = transpile(program, graphft.Validation(data=held_out, loss_fn=in_groups, reduce={"mean": mean}))
    read = job.programs.evaluation.find_op("read_chunk")
    assert read.attrs["columns"] == ("x", "y", "weight")


def test_a_reducer_is_torch_alone() -> None:
    _, program = make()
    uses_numpy = lambda scores: torch.tensor(scores.numpy().mean())  # noqa: E731
    rejects("reducer 'f1' cannot be captured", program, loss_fn=with_scores, reduce={"f1": uses_numpy})
    rejects("'n' returns int64", program, loss_fn=with_scores, reduce={"n": lambda scores: (scores > 0).sum()})
    rejects("'n' takes any parameters", program, loss_fn=with_scores, reduce={"n": lambda *all: all[0].mean()})


def test_options_that_make_no_sense() -> None:
    _, program = make()
    for options, message in (({"every": 0}, "every is 0, expected"), ({"reduce": {"auc": 3}}, "reduce is")):
        with pytest.raises(GraphftError, match=message):
            graphft.Validation(**{"data": data(), **options})
    with pytest.raises(GraphftError, match="validate is a DataSpec"):
        transpile(program, data())
    with pytest.raises(GraphftError, match="validate has no effect"):
        transpile(program, graphft.Validation(data=data()), ft=False)
    parsed = graphft.parse(str(program))
    parsed.values = dict(program.values)
    with pytest.raises(GraphftError, match=r"was not captured by graphft\.build in this process"):
        transpile(parsed, graphft.Validation(data=data()))
    other = graphft.build(nn.Linear(4, 2), loss_fn, INPUTS, training=False)
    with pytest.raises(GraphftError, match="build both of the same model"):
        transpile(program, graphft.Validation(other, data()))
