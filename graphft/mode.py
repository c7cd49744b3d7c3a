"""What a model's own settings mean for its training, told when it is captured: eval mode, frozen parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

log = logging.getLogger(__name__)

SHOWN = 5
"""Names of modules or parameters that a line lists."""


def tell_mode(model: nn.Module) -> None:
    """A warning if `model` is in eval mode and has parts that are otherwise in training; a line on what is frozen.

    Only the mode of the whole model counts: a part that is in eval mode alone is meant to be.
    """
    other = {name or "the model": effect for name, m in model.named_modules() if (effect := _effect(m))}
    if not model.training and other:
        log.warning(
            "the model is captured in eval mode: %s (%s); it is meant so for graphft.Validation; if it is to train as "
            "usual, call model.train() before build()",
            " and ".join(dict.fromkeys(other.values())),
            listed(list(other)),
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        log.info("frozen, by requires_grad=False: %s", listed(frozen))


def listed(names: Sequence[str]) -> str:
    """`a, b, c`, of many the first ones."""
    more = f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return ", ".join(names[:SHOWN]) + more


def _effect(module: nn.Module) -> str:
    """What eval mode changes in `module` itself, not in its parts; "" if nothing."""
    if isinstance(module, _DropoutNd):
        return "dropout is off" * (module.p > 0)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return "dropout is off" * (module.dropout > 0)
    if isinstance(module, _NormBase):
        return "normalization uses its running statistics, and keeps them" * module.track_running_stats
    if type(module).__module__.startswith("torch."):
        return ""
    code = getattr(type(module).forward, "__code__", None)
    return "code that asks self.training sees False" * ("training" in getattr(code, "co_names", ()))
