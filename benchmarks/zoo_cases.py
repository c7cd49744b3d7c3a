"""Lists what benchmarks/zoo.py trains: modules and optimizers of torch's own tests, architectures of three libraries.

Architectures have random weights and tiny sizes; nothing is downloaded. A case is made anew for each of its runs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
for _op in ("nms", "qnms"):  # PyPI's torchvision loads its own ops with CUDA's torch only; no model here calls them
    torch.library.define(f"torchvision::{_op}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
pytree.register_pytree_node(
    PackedSequence, lambda p: ([p.data], p[1:]), lambda data, rest: PackedSequence(data[0], *rest)
)

Batch = dict[str, Tensor]
SIZES = (4, 4, 3)
"""Batches have so many samples; those of modules have their own."""
Spec = Mapping[str, tuple[tuple[int | None, ...], torch.dtype]]


class Subject(NamedTuple):
    """Holds what `graphft.build` takes, three batches, and torch's optimizer."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    inputs: Spec
    batches: list[Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, fused=True)


class Case(NamedTuple):
    family: str
    name: str
    make: Callable[[], Subject]


def spec(batch: Batch, batched: bool = True) -> Spec:
    return {n: ((None, *t.shape[1:]) if batched else tuple(t.shape), t.dtype) for n, t in batch.items()}


# -- modules: torch.testing._internal.common_modules ---------------------------------------------------------------

SAMPLES = 16
"""At most so many of a module, drawn at random: some have hundreds."""
_WEIGHTS = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1))


def _loss_of(outputs: Any, batched: bool) -> Tensor:
    """Squares, and a fixed random weighting, of all floating outputs."""
    found = [o for o in pytree.tree_leaves(outputs) if isinstance(o, Tensor) and o.is_floating_point()]
    rows = [o.reshape(o.shape[0] if batched and o.dim() > 1 else 1, -1) for o in found]
    return torch.stack([(r.square() + r * _WEIGHTS[: r.shape[1]]).mean() for r in rows]).sum()


def _samples(info: Any, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)


def _construct(info: Any, sample: Any) -> nn.Module:
    model = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train()
    if info.is_lazy:
        model(*sample.forward_input.args, **sample.forward_input.kwargs)
    return model


def _module(info: Any, index: int) -> Subject:
    samples = [_samples(info, seed)[index] for seed in range(3)]
    calls = [pytree.tree_flatten((s.forward_input.args, s.forward_input.kwargs)) for s in samples]
    places = [i for i, leaf in enumerate(calls[0][0]) if isinstance(leaf, Tensor)]
    batches = [{f"x{i}": leaves[i] for i in places} for leaves, _ in calls]
    sizes = {t.shape[:1] for t in batches[0].values()}
    batched = len(sizes) == 1 and sizes != {()} and "no_batch_dim" not in samples[0].desc

    def loss_fn(model: nn.Module, **inputs: Tensor) -> Tensor:
        leaves = [inputs.get(f"x{i}", leaf) for i, leaf in enumerate(calls[0][0])]
        args, kwargs = pytree.tree_unflatten(leaves, calls[0][1])
        return _loss_of(model(*args, **kwargs), batched)

    return Subject(_construct(info, samples[0]), loss_fn, spec(batches[0], batched), batches)


def modules() -> Iterator[Case]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        samples = _samples(info, 0)
        for index in sorted(random.Random(0).sample(range(len(samples)), min(SAMPLES, len(samples)))):
            if list(_construct(info, samples[index]).parameters()) and "empty" not in samples[index].desc:
                words = f"{info.name} {index} {samples[index].desc}"
                yield Case("modules", words.strip(), partial(_module, info, index))


# -- optimizers: torch.testing._internal.common_optimizers ---------------------------------------------------------


def _small(layout: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Subject:
    """No gradient is zero but for rounding, as that of a bias before a batch norm is: Adam would make steps of it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    for p in model.parameters() if layout == "transposed" else ():
        p.data = p.data.mT.contiguous().mT if p.dim() > 1 else p.data
    batches = [{"x": torch.randn(n, 3, 6, 6), "y": torch.randint(5, (n,))} for n in SIZES]
    return Subject(model, _classify, spec(batches[0]), batches, optimizer)


def optimizers() -> Iterator[Case]:
    from torch.testing._internal.common_optimizers import optim_db

    from graphft.optim.optimizers import OPTIMIZERS

    ours = {c.torch_class for c in OPTIMIZERS.values()}
    for info in optim_db:
        for sample in info.optim_inputs_func(device="cpu") if info.optim_cls in ours else ():
            for fused in ({}, {"fused": True}) if "cpu" in info.supports_fused_on else ({},):
                optimizer = partial(info.optim_cls, **{"lr": 1e-3, **sample.kwargs, **fused})
                for layout in ("contiguous", "transposed", "channels_last"):
                    words = (info.name, sample.desc, *fused, layout)
                    yield Case("optimizers", ", ".join(words), partial(_small, layout, optimizer))


# -- architectures -------------------------------------------------------------------------------------------------


def _classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y)


def _tokens_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _classifier(model: nn.Module, *shape: int) -> Subject:
    batches = [{"x": torch.randn(n, *shape), "y": torch.randint(10, (n,))} for n in SIZES]
    return Subject(model.train(), _classify, spec(batches[0]), batches)


TINY = (
    dict.fromkeys(["hidden_size", "embedding_size"], 32)
    | dict.fromkeys(["intermediate_size", "d_ff", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"], 64)
    | dict.fromkeys(["num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"], 4)
    | dict.fromkeys(["num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"], 2)
    | dict(vocab_size=60, max_position_embeddings=32, num_labels=10, num_key_value_heads=2, head_dim=8, d_kv=8)
    | dict(
        attention_window=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=0,
        attention_dropout=0.1,
    )
)
_AUDIO: dict[str, Any] = dict(
    conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, squeeze_factor=1
)
_AUDIO |= dict(num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_length=4)
OF_TASK: dict[str, dict[str, Any]] = {
    "ImageClassification": dict(image_size=32, patch_size=8, num_key_value_heads=4),
    "AudioClassification": _AUDIO,
}
TRANSFORMERS: dict[str, str] = {
    "CausalLM": "gpt2 gpt_neo gpt_neox gptj openai-gpt ctrl opt bloom mpt gpt_bigcode llama mistral "
    "mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe olmo olmo2 olmoe stablelm "
    "starcoder2 cohere granite granitemoe persimmon xglm biogpt glm nemotron smollm3 gpt_oss helium ernie4_5 bitnet "
    "mamba mamba2 falcon_mamba rwkv jamba trocr",
    "MaskedLM": "bert roberta distilbert albert electra deberta deberta-v2 mpnet camembert megatron-bert "
    "mobilebert modernbert nystromformer roformer squeezebert longformer big_bird xlm fnet ibert rembert esm yoso",
    "Seq2SeqLM": "t5 mt5 umt5 longt5 switch_transformers bart mbart pegasus marian blenderbot m2m_100 led",
    "ImageClassification": "vit vit_msn ijepa beit data2vec-vision dinov2 dinov2_with_registers swiftformer "
    "mobilenet_v1 mobilenet_v2",
    "AudioClassification": "wav2vec2 hubert wavlm sew unispeech",
}
OF_KIND: dict[str, dict[str, Any]] = {
    "big_bird": dict(attention_type="original_full"),  # it becomes this, and another module, in its first forward
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "gptj": dict(rotary_dim=8),
    "hubert": dict(layerdrop=0.0),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, num_experts=2),
    "longformer": dict(attention_window=4),
    "led": dict(attention_window=4, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "mamba2": dict(num_heads=8),
    "mobilebert": dict(embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16),
}


def _transformer(task: str, kind: str, **checkpoint: Any) -> Subject:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **TINY | OF_TASK.get(task, {}) | OF_KIND.get(kind, {}))
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint)
    if "Classification" in task:
        return _classifier(model, *((3, 32, 32) if task.startswith("Image") else (800,)))
    batches = [{"ids": torch.randint(3, 60, (n, 12))} for n in SIZES]
    return Subject(model.train(), _tokens_loss, spec(batches[0]), batches)


TIMM = (
    "test_vit test_vit2 test_vit3 test_vit4 test_vit_relpos test_resnet test_byobnet test_efficientnet "
    "test_efficientnet_gn test_efficientnet_ln test_efficientnet_evos test_convnext test_convnext2 test_convnext3 "
    "test_nfnet test_mambaout mobilenetv3_small_050 mobilenetv4_conv_small_035 lcnet_035 ghostnet_050 ghostnetv2_100 "
    "ghostnetv3_050 repghostnet_050 regnetx_002 regnety_002 mnasnet_small semnasnet_075 mobilevit_xxs mobilevitv2_050 "
    "edgenext_xx_small levit_128s pit_ti_224 xcit_nano_12_p16_224 fastvit_t8 tinynet_e dla46x_c rexnet_100 "
    "mobileone_s0 repvit_m0_9 convnextv2_atto efficientvit_b0 efficientvit_m0 efficientformerv2_s0 hgnetv2_b0 "
    "fasternet_t0 starnet_s1 shvit_s1 inception_next_atto coat_lite_tiny maxvit_rmlp_pico_rw_256 tiny_vit_5m_224 "
    "gmlp_ti16_224 gcvit_xxtiny pvt_v2_b0 eva02_tiny_patch14_224 ese_vovnet19b_slim visformer_tiny convit_tiny"
)


def _timm(name: str, checkpoint: bool = False) -> Subject:
    import timm

    options = {"num_classes": 10, "drop_rate": 0.1}
    try:
        model = timm.create_model(name, img_size=64, **options)
    except TypeError:  # a convolutional network has no size
        model = timm.create_model(name, **options)
    if checkpoint:
        model.set_grad_checkpointing()
    return _classifier(model, 3, 64, 64)


TORCHVISION = "squeezenet1_1 mobilenet_v2 shufflenet_v2_x0_5 mnasnet0_5 efficientnet_b0 regnet_x_400mf resnet18"
_DENSE = (8, (2, 2, 2), 16, 4, 0.1, 10)
OF_CLASSES: dict[str, Callable[[Any], nn.Module]] = {
    "densenet": lambda m: m.DenseNet(*_DENSE),
    "densenet, checkpoint": lambda m: m.DenseNet(*_DENSE, memory_efficient=True),
    "vit": lambda m: m.VisionTransformer(64, 16, 2, 4, 32, 64, dropout=0.1, num_classes=10),
    "swin": lambda m: m.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], 4.0, 0.1, num_classes=10),
    "maxvit": lambda m: m.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.1, num_classes=10),
}


def _torchvision(name: str) -> Subject:
    from torchvision import models

    make = OF_CLASSES.get(name, lambda m: getattr(m, name)(num_classes=10))
    return _classifier(make(models), 3, 64, 64)


def architectures() -> Iterator[Case]:
    (_transformer("CausalLM", "gpt2"), _timm("test_vit"), _torchvision("vit"))  # imports, once for all
    for task, kinds in TRANSFORMERS.items():
        for kind in kinds.split():
            yield Case("transformers", kind, partial(_transformer, task, kind))
    for kind in ("gpt2", "llama", "bert", "t5"):
        for reentrant in (True, False):
            task = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}.get(kind, "CausalLM")
            words = f"{kind}, checkpoint, use_reentrant={reentrant}"
            yield Case("transformers", words, partial(_transformer, task, kind, use_reentrant=reentrant))
    for name in TIMM.split():
        yield Case("timm", name, partial(_timm, name))
    for name in ("test_vit", "test_resnet", "test_convnext", "mobilenetv3_small_050"):
        yield Case("timm", f"{name}, checkpoint", partial(_timm, name, checkpoint=True))
    for name in (*TORCHVISION.split(), *OF_CLASSES):
        yield Case("torchvision", name, partial(_torchvision, name))


FAMILIES = {"modules": modules, "optimizers": optimizers, "architectures": architectures}
