"""A step of the user's own module under torch's autograd: what a program must compute, what op `eager_step` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphft.capture.loss_fn import loss_and_extras
from graphft.data import seeded_by_torch
from graphft.disk.tensor_file import same_bits
from graphft.errors import GraphftError, UsageError
from graphft.ir import grad_name


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's parameters and buffers, each once, under the first of its names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keeps the model in eval mode, and puts each of its modules back into its own mode.

    Attention takes no short cut meanwhile: whether torch's `nn.TransformerEncoder` takes its own depends on the values
    of the padding mask, which nobody knows here.
    """
    modes = {module: module.training for module in model.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        model.train(modes[model])  # a method of its own may undo what its eval() did
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Puts the model's tensors, in their place, its gradients and its attributes back to what they were.

    Yields copies of the tensors, as they were. Attributes are looked at one level deep: what a container holds stays as
    the code left it.
    """
    tensors = tensors_of(model)
    values, gradients = {n: t.detach().clone() for n, t in tensors.items()}, {n: t.grad for n, t in tensors.items()}
    attributes = {
        m: {name: dict(v) if isinstance(v, dict) else v for name, v in vars(m).items()} for m in model.modules()
    }
    try:
        yield values
    finally:
        for module, before in attributes.items():
            now = vars(module)
            for name in now.keys() - before.keys():
                del now[name]
            for name, value in before.items():
                if isinstance(value, dict) and isinstance(now.get(name), dict):
                    now[name].clear()
                    now[name].update(value)
                elif now.get(name) is not value:
                    now[name] = value
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
                tensor.grad = gradients[name]


@dataclass(frozen=True)
class ModuleStep:
    """Computes `call(model, **inputs)` and, with `training`, the gradients of its loss."""

    model: nn.Module
    call: Callable[..., Any]
    training: bool
    """Without it, the model is in eval mode, and there are no gradients."""
    seeds: bool
    """True if Python's and NumPy's generators follow torch's. They belong to all threads of a process."""

    def run(
        self,
        values: Mapping[str, Tensor],
        feeds: Mapping[str, Tensor],
        look: Callable[[Tensor], None] = lambda loss: None,
        scale: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gives the model's tensors their `values`, in place, and computes.

        Returns loss, extras and gradients (zero where the loss does not depend on a parameter) by name, and the new
        values of the buffers that the step has changed. Raises GraphftError[loss], and [parameter-written]. `look` is
        called with the loss before backward. Gradients are those of the loss times `scale`.
        """
        tensors = tensors_of(self.model)
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad and self.training}
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)
        before = {n: values.get(n, t) for n, t in tensors.items()}
        versions = {n: p._version for n, p in trainable.items()}
        for parameter in trainable.values():
            parameter.grad = None
        with (
            contextlib.nullcontext() if self.training else evaluating(self.model),
            torch.set_grad_enabled(self.training),
            seeded_by_torch() if self.seeds else contextlib.nullcontext(),
        ):
            result = self.call(self.model, **feeds)
            refuse_gradients(trainable.values())
            loss, extras = loss_and_extras(result, {*feeds, *tensors}, self.training)
            look(loss)
            if self.training:
                loss.backward(scale.to(loss.dtype) if scale is not None else None)
        for name, parameter in trainable.items():  # by value as well: a write through .data is no version
            if parameter._version != versions[name] or not same_bits(parameter, before[name]):
                raise parameter_written(name)
        now = {n: t for n, t in tensors_of(self.model).items() if n not in trainable}
        if new := now.keys() - tensors.keys():
            raise GraphftError(
                f"the step makes buffer {min(new)}, which the model did not have",
                rule="buffer-type",
                help="register it with its shape and dtype before build()",
            )
        # By value: the kernels of batch norm do not count their writes as versions.
        changed = {n: t.detach().clone() for n, t in now.items() if not same_bits(t, before[n])}
        self._put_back(tensors)
        for name, buffer in changed.items():
            check_buffer(name, tensors[name], buffer)
        results = {"loss": loss.detach(), **{n: t.detach() for n, t in extras.items()}}
        for name, parameter in trainable.items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            results[grad_name(name)] = gradient if gradient.layout is torch.strided else gradient.to_dense()
            parameter.grad = None
        return results, changed

    def _put_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Makes a buffer that the code has assigned to the tensor again that it was."""
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            if leaf in owner._buffers and owner._buffers[leaf] is not tensor:
                owner._buffers[leaf] = tensor


def check_buffer(name: str, before: Tensor, after: Tensor) -> None:
    """Raises GraphftError[buffer-type] if a step gives a buffer another shape or dtype."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise GraphftError(
            f"the step changes buffer {name} from {before.dtype} {tuple(before.shape)} to {after.dtype} "
            f"{tuple(after.shape)}",
            rule="buffer-type",
            help="run the model once on a batch of this size before build(), or register the buffer as it will be",
        )


def parameter_written(name: str) -> GraphftError:
    """Makes the error of a forward pass that changes a parameter."""
    return GraphftError(
        f"the forward pass changes parameter {name} in place",
        rule="parameter-written",
        help="keep such a tensor in a buffer, and leave parameters to the optimizer (nn.Embedding: without max_norm)",
    )


def refuse_gradients(parameters: Iterable[Tensor]) -> None:
    """Raises UsageError[side-effect] if the loss has left gradients, to which those of its own would be added."""
    if any(parameter.grad is not None for parameter in parameters):
        raise UsageError(
            "loss_fn calls backward()",
            rule="side-effect",
            help="return the loss and leave backward(), clipping and the optimizer's step out: build() and minimize() "
            "append them, clipping as graphft.minimize(program, optimizer, graphft.ClipByGlobalNorm(1.0))",
        )
