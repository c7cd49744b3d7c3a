"""What a job decides by its validations: which model is the best, when learning rates go down, when it ends.

    graphft.Validation(
        data=held_out,
        best="auc",
        stop=graphft.EarlyStopping("loss", patience=3),
        plateau=graphft.ReduceLROnPlateau("loss", factor=0.5, patience=1),
    )

How: `runtime/protocol/decisions.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from graphft.errors import UsageError
from graphft.option_names import checked_options

Mode = Literal["max", "min"]
_DOWN = (
    "loss|err|error|perplexity|ppl|mse|mae|rmse|mape|smape|nmse|nll|bce|logloss|entropy|wer|cer|brier|hinge|deviance"
)
_DOWN += "|divergence|kl|ece|fpr|fnr|pinball|distance|hamming|xent|ce|crossentropy|cost|regret|misclassification|miss"
_UP = (
    "accuracy|acc|auc|auroc|auprc|roc|ap|map|f1|f2|fbeta|macro|micro|weighted|precision|recall|sensitivity|specificity|"
    "score|iou|dice|jaccard|bleu|rouge|meteor|r2|mrr|ndcg|hit|hits|top|topk|top1|top5|reward|return|returns|kappa|mcc|"
    "correlation|pearson|spearman|likelihood|psnr|ssim|gain|lift|correct|balanced|exact|em"
)


def _any_of(words: str) -> re.Pattern[str]:
    return re.compile(rf"(^|[_./ -])({words})($|[_./ -])")


_LOWER, _HIGHER, _TURNED = _any_of(_DOWN), _any_of(_UP), _any_of("neg|negative|minus|inverse|false|free|non|not")
_METRIC = "that is `metric`, its first argument: "
_KEPT = "the best model is kept with Validation(best=...): result.best.model, result.predict(data, best=True)"
C = TypeVar("C", bound="Criterion")


def mode_of(metric: str) -> Mode:
    """Which of its values is the best: of a loss or an error the lowest, of anything else the highest."""
    return "min" if _LOWER.search(metric.lower()) else "max"


def _is_clear(metric: str) -> bool:
    """Whether its name leaves no doubt about that."""
    lower, higher, turned = (bool(words.search(metric.lower())) for words in (_LOWER, _HIGHER, _TURNED))
    return lower != higher and not turned


@checked_options()
@dataclass(frozen=True)
class Criterion:
    """A metric of the validation, "loss" among them. `mode`: whether its lowest or its highest value is the best;
    "": the lowest of a loss or an error, the highest of anything else."""

    metric: str = "loss"
    mode: Literal["max", "min", ""] = ""
    guess: ClassVar[str] = ""
    """Says which way was taken for the better one, where `mode` is not given and the metric's name leaves a doubt."""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise self._bad("metric", "the name of a metric")
        if self.mode not in ("max", "min", ""):
            raise self._bad("mode", "'max' or 'min'")
        object.__setattr__(self, "guess", "" if self.mode or _is_clear(self.metric) else self._guess())
        object.__setattr__(self, "mode", self.mode or mode_of(self.metric))

    def _guess(self) -> str:
        best, other = ("lowest", "max") if mode_of(self.metric) == "min" else ("highest", "min")
        give = f"{type(self).__name__}({self.metric!r}, mode={other!r})"
        return f"the {best} {self.metric} is taken for the best one; for the other way, give {give}"

    def at_least(self, name: str, least: float, most: float = float("inf")) -> None:
        """Raises UsageError for an option that is no number in these bounds."""
        value = getattr(self, name)
        whole = type(getattr(type(self), name)) is int
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            bounds = f"at least {least}" if most == float("inf") else f"between {least} and {most}"
            raise self._bad(name, f"a {'whole ' * whole}number, {bounds}")

    def _bad(self, name: str, wanted: str) -> UsageError:
        what = f"{type(self).__name__}: {name} is {getattr(self, name)!r}, expected {wanted}"
        return UsageError(what, rule="option", help=f"correct {name}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@checked_options({"monitor": f"{_METRIC}EarlyStopping('loss')", "restore_best_weights": _KEPT})
@dataclass(frozen=True)
class EarlyStopping(Criterion):
    """The job ends when the metric was not better, by more than `min_delta`, in `patience` validations in a row."""

    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("patience", 1)
        self.at_least("min_delta", 0)


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

    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_scale: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patience", "cooldown", "threshold"):
            self.at_least(name, 0)
        for name in ("factor", "min_scale"):
            self.at_least(name, 0.0, 1.0)
        if self.factor == 1:
            raise self._bad("factor", "less than 1: it would change nothing")
        if self.threshold_mode not in ("rel", "abs"):
            raise self._bad("threshold_mode", "'rel' or 'abs'")


def criterion(kind: type[C], value: C | str | None, name: str) -> C | None:
    """`value`, or one of that metric. Raises UsageError for anything else."""
    if isinstance(value, str):
        return kind(value)
    if not isinstance(value, (kind, type(None))):
        raise UsageError(
            f"{name} is {value!r}, expected {kind.__name__} or a metric's name",
            rule="option",
            help=f'{name}="loss", or {name}=graphft.{kind.__name__}(...)',
        )
    return value


def from_json(kind: type[C], data: Mapping[str, Any] | None) -> C | None:
    """The inverse of `to_json`. Raises TypeError or UsageError when `data` is none."""
    return kind(**data) if data is not None else None
