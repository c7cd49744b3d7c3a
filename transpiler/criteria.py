"""A job decides by its validations which model is the best, when learning rates go down, when it ends.

How: `runtime/protocol/decisions.py`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from graphft.errors import UsageError
from graphft.options import check_values, checked_options

Mode = Literal["max", "min"]
_KNOWN: dict[Mode, str] = {
    "min": "loss|err|error|perplexity|ppl|mse|mae|rmse|mape|nll|bce|logloss|entropy|wer|cer|brier|divergence|kl|fpr|fnr"
    "|ce|crossentropy|cost|misclassification|miss",
    "max": "accuracy|acc|auc|auroc|auprc|ap|map|f1|macro|micro|weighted|precision|recall|score|iou|specificity|dice"
    "|bleu|rouge|r2|mrr|ndcg|top1|top5|reward|kappa|mcc|correlation|likelihood|psnr|ssim|correct",
}
_TURNED = "neg|negative|minus|inverse|false|free|non|not"
_METRIC = "that is `metric`, its first argument: "
_KEPT = "the best model is kept with Validation(best=...): result.best.model, result.predict(data, best=True)"
C = TypeVar("C", bound="Criterion")


def mode_of(metric: str) -> Mode | Literal[""]:
    """Returns which of its values is the best: of a loss or an error the lowest, of an accuracy the highest; "" where
    the name leaves a doubt."""

    def has(words: str) -> bool:
        return re.search(rf"(^|[_./ -])({words})($|[_./ -])", metric.lower()) is not None

    found = [mode for mode, words in _KNOWN.items() if has(words)]
    return found[0] if len(found) == 1 and not has(_TURNED) else ""


@checked_options()
@dataclass(frozen=True)
class Criterion:
    """A metric of the validation, "loss" among them. `mode`: whether its lowest or its highest value is the best;
    "": the lowest of a loss or an error, the highest of an accuracy; a name that tells neither needs it."""

    metric: Annotated[str, Meta(min_length=1)] = "loss"
    mode: Literal["max", "min", ""] = ""

    def __post_init__(self) -> None:
        check_values(self)
        if not (mode := self.mode or mode_of(self.metric)):
            what = f"{type(self).__name__}: is the lowest or the highest {self.metric} the best one?"
            help = f"give {type(self).__name__}({self.metric!r}, mode='min'), or 'max'"
            raise UsageError(what, rule="option", help=help)
        object.__setattr__(self, "mode", mode)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@checked_options({"monitor": f"{_METRIC}EarlyStopping('loss')", "restore_best_weights": _KEPT})
@dataclass(frozen=True)
class EarlyStopping(Criterion):
    """The job ends when the metric was not better, by more than `min_delta`, in `patience` validations in a row."""

    patience: Annotated[int, Meta(ge=1)] = 3
    min_delta: Annotated[float, Meta(ge=0)] = 0.0


@checked_options(
    {
        "monitor": f"{_METRIC}ReduceLROnPlateau('loss')",
        "min_lr": "rates go down by the same factors: min_scale=0.01 is a hundredth of each one's schedule",
    }
)
@dataclass(frozen=True)
class ReduceLROnPlateau(Criterion):
    """Learning rates are multiplied by `factor` when the metric was not better in more than `patience` validations in a
    row; then `cooldown` validations do not count. Better: by more than `threshold`, of the best value ("rel") or as it
    is ("abs"). They are not multiplied by less than `min_scale` in all. As torch's, whose `min_lr` is of the rates
    themselves: here it is of their schedule.
    """

    factor: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    patience: Annotated[int, Meta(ge=0)] = 10
    threshold: Annotated[float, Meta(ge=0)] = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: Annotated[int, Meta(ge=0)] = 0
    min_scale: Annotated[float, Meta(ge=0, le=1)] = 0.0


def criterion(kind: type[C], value: C | str | None, name: str) -> C | None:
    """Returns `value`, or a criterion of that metric. Raises UsageError for anything else."""
    if isinstance(value, str):
        return kind(value)
    if not isinstance(value, (kind, type(None))):
        help = f'{name}="loss", or {name}=graphft.{kind.__name__}(...)'
        raise UsageError(f"{name} is {value!r}, expected {kind.__name__} or a metric's name", rule="option", help=help)
    return value
