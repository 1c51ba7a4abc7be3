"""The models of other libraries that LoRA is added to: tiny ones with random weights, offline.

Each row of `CASES` has a model that its library builds from a config, a batch, and targets that
mean the same to this project and to PEFT. The weights have such sizes that outputs are about 1 and
all weights have a visible effect. Dropout is off, so that training mode can be compared as well.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import timm
import torch
import torchvision
from torch import Tensor, nn

import transformers

VARIANTS = ("lora", "rslora", "dora", "rslora+dora")
VOCABULARY = 61
HIDDEN = 32

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and what is adapted.

    Args:
        name: the row's name in test ids.
        make: builds the model; its weights are overwritten.
        batch: the model's keyword arguments.
        targets: ends of module names, or "all-linear".
        adapted: the number of modules that the targets match.
        task: PEFT's `task_type`, which decides what "all-linear" leaves out and what is saved.
        in_peft: the variants that PEFT has for these layers, and computes as it merges them.
        gain: a factor for weight matrices, in models whose outputs would not be about 1.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    targets: tuple[str, ...] | str
    adapted: int
    task: str | None = None
    in_peft: tuple[str, ...] = VARIANTS
    gain: float = 1.0

    def build(self) -> nn.Module:
        """The model in training mode, with the same weights each time."""
        model = self.make()
        draw(model.named_parameters(), self.name, self.gain)
        return train(model)

    def __str__(self) -> str:
        return self.name


def draw(named: Iterable[tuple[str, nn.Parameter]], seed: str, gain: float = 1.0) -> None:
    """Sets parameters to random values, of such a size that outputs are about 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    for name, parameter in named:
        values = torch.randn(parameter.shape, generator=generator)
        if "lora_magnitude_vector" in name:
            values = parameter.detach() * (1 + 0.1 * values)
        elif "lora_" in name:
            values *= 0.1
        elif parameter.dim() > 1:
            values *= gain * parameter[0].numel() ** -0.5
        else:  # biases, and the gains of norms
            values = 0.3 * values + name.endswith("weight")
        parameter.data.copy_(values)


def train(model: nn.Module) -> nn.Module:
    """Sets training mode, except for BatchNorm, whose statistics belong to the frozen base."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def output_of(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What the model computes: its logits, sample, last hidden state or plain tensor."""
    result = model(**batch)
    for name in ("logits", "sample", "last_hidden_state"):
        if hasattr(result, name):
            return getattr(result, name)
    return result


# ------------------------------------------------------------------------------------------------
# Batches
# ------------------------------------------------------------------------------------------------


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(rows: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=_generator())


def tokens() -> Batch:
    """Two rows of token ids, the second of them padded."""
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _translation() -> Batch:
    return {**tokens(), "decoder_input_ids": _ids(2, 4)}


def _speech() -> Batch:
    features = torch.randn(2, 8, 20, generator=_generator())
    return {"input_features": features, "decoder_input_ids": _ids(2, 4)}


def _pixels(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size, generator=_generator())


def _vectors(length: int = 7) -> Tensor:
    return torch.randn(3, length, HIDDEN, generator=_generator())


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------


def _llama_like(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **settings,
        )
    )


def _bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def _t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=HIDDEN,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )


def _whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=HIDDEN,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=10,
            max_target_positions=16,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=HIDDEN,
            n_inner=48,
            n_layer=2,
            n_head=4,
            n_positions=32,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _falcon() -> nn.Module:
    """Its linear layers are a subclass with a forward of its own."""
    return transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            ffn_hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _resnet() -> nn.Module:
    blocks = torchvision.models.resnet
    return blocks.ResNet(blocks.BasicBlock, [1, 1, 1, 1], num_classes=5)


def _timm_resnet(block: str, **settings: Any) -> Callable[[], nn.Module]:
    blocks = timm.models.resnet
    sizes = {"channels": (8, 8, 16, 16), "stem_width": 8, "num_classes": 5}
    return lambda: blocks.ResNet(getattr(blocks, block), [1, 1, 1, 1], **sizes, **settings)


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
    )


class Attending(nn.Module):
    """`nn.MultiheadAttention` between two linear layers; forward takes its masks."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 4, **settings)
        self.last = nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        """(rows, length, HIDDEN), or (length, rows, HIDDEN) -> (…, 5)."""
        x = self.first(x)
        keys, values = x.roll(1, -1), x.flip(-1)
        keys, values = keys[..., : self.attention.kdim], values[..., : self.attention.vdim]
        x, _ = self.attention(x, keys, values, **masks)
        return self.last(x)


class Convolutions(nn.Module):
    """A convolution in each of three, two and one dimensions.

    Args:
        deep, flat, line: settings of these three.
    """

    def __init__(self, deep: Batch, flat: Batch, line: Batch):
        super().__init__()
        self.deep = nn.Conv3d(3, 8, (1, 3, 3), **deep)
        self.flat = nn.Conv2d(8, 12, 3, **flat)
        self.line = nn.Conv1d(12, 8, 3, **line)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3, height, width) -> (rows, 8, …)."""
        x = self.deep(x[:, :, None].expand(-1, -1, 2, -1, -1)).mean(2).tanh()
        return self.line(self.flat(x).flatten(2))


def _plain_convolutions() -> nn.Module:
    return Convolutions(
        {"padding": (0, 1, 1), "bias": False}, {"stride": 2, "padding": (1, 0)}, {"padding": 1}
    )


def _other_convolutions() -> nn.Module:
    return Convolutions(
        {"padding": "same", "padding_mode": "circular"},
        {"groups": 2, "dilation": (2, 1), "padding": 1, "bias": False},
        {"groups": 4, "padding": 2, "dilation": 2, "padding_mode": "replicate"},
    )


class Encoding(nn.Module):
    """`nn.TransformerEncoder` with zeros at padding, where its fast path has other values."""

    def __init__(self, batch_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 48, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)

    def forward(self, x: Tensor, padding: Tensor | None = None, **masks: Any) -> Tensor:
        """(rows, length, HIDDEN), or the length first -> the same, zeros at the padding."""
        x = self.encoder(x, src_key_padding_mask=padding, **masks)
        return x if padding is None else x.masked_fill(padding[..., None], 0.0)


def _padding(length: int = 7) -> Tensor:
    return torch.arange(length) >= torch.tensor([7, 5, 3])[:, None]


def _future(length: int = 7) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------

_LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION_IN_PEFT = ("lora", "rslora")  # not DoRA
_CONVOLUTIONS = ("deep", "flat", "line")

CASES = [
    Case(
        "llama",
        _llama_like("Llama"),
        tokens,
        (*_LLAMA_TARGETS, "embed_tokens"),
        15,
        "CAUSAL_LM",
    ),
    # Its embedding multiplies its output by a factor.
    Case(
        "gemma",
        _llama_like("Gemma", head_dim=8, tie_word_embeddings=False),
        tokens,
        ("q_proj", "v_proj", "embed_tokens"),
        5,
        "CAUSAL_LM",
    ),
    Case("qwen2", _llama_like("Qwen2"), tokens, ("q_proj", "v_proj"), 4, "CAUSAL_LM"),
    Case("mistral", _llama_like("Mistral"), tokens, "all-linear", 14, "CAUSAL_LM"),
    Case("gpt2", _gpt2, tokens, ("c_attn", "c_proj", "c_fc"), 8, "CAUSAL_LM"),
    Case("falcon", _falcon, tokens, "all-linear", 8, "CAUSAL_LM"),
    Case("bert", _bert, tokens, ("query", "value", "dense", "word_embeddings"), 12, "SEQ_CLS"),
    # Its attention is not scaled: with larger weights, it would pick a single position.
    Case(
        "t5",
        _t5,
        _translation,
        ("q", "k", "v", "o", "wi_0", "wi_1", "wo"),
        36,
        "SEQ_2_SEQ_LM",
        gain=0.5,
    ),
    Case("whisper", _whisper, _speech, ("q_proj", "v_proj", "fc1", "fc2"), 10),
    # Transformers reads the stride of these, which PEFT's layers do not have.
    Case("whisper_convolutions", _whisper, _speech, ("conv1", "conv2"), 2, in_peft=()),
    Case(
        "vit",
        _vit,
        lambda: {"pixel_values": _pixels()},
        ("q_proj", "v_proj", "fc1", "fc2", "projection"),
        9,
    ),
    Case("resnet", _resnet, lambda: {"x": _pixels(32)}, ("conv1", "conv2", "fc"), 10),
    Case(
        "timm_resnet",
        _timm_resnet("BasicBlock"),
        lambda: {"x": _pixels(32)},
        ("conv1", "conv2", "fc"),
        10,
    ),
    # PEFT's update of a grouped convolution is not an update of its kernel.
    Case(
        "timm_resnext",
        _timm_resnet("Bottleneck", cardinality=4, base_width=16),
        lambda: {"x": _pixels(32)},
        ("conv1", "conv2", "conv3"),
        13,
        in_peft=(),
    ),
    Case(
        "unet",
        _unet,
        lambda: {"sample": _pixels(), "timestep": torch.tensor([3, 50])},
        ("to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2", "conv_shortcut", "linear_1"),
        38,
    ),
    Case("convolutions", _plain_convolutions, lambda: {"x": _pixels()}, _CONVOLUTIONS, 3),
    # PEFT's convolutions ignore dilation and padding mode.
    Case(
        "other_convolutions",
        _other_convolutions,
        lambda: {"x": _pixels()},
        _CONVOLUTIONS,
        3,
        in_peft=(),
    ),
    Case(
        "attention",
        lambda: Attending(batch_first=True),
        lambda: {"x": _vectors(), "key_padding_mask": _padding(), "attn_mask": _future()},
        ("attention", "last"),
        3,
        in_peft=_ATTENTION_IN_PEFT,
    ),
    Case(
        "attention_length_first",
        lambda: Attending(bias=False),
        lambda: {
            "x": _vectors().transpose(0, 1),
            "key_padding_mask": _padding(),
            "need_weights": False,
        },
        ("attention", "first"),
        3,
        in_peft=_ATTENTION_IN_PEFT,
    ),
    Case(
        "attention_of_other_sizes",
        lambda: Attending(batch_first=True, kdim=16, vdim=12, add_bias_kv=True),
        lambda: {"x": _vectors(), "key_padding_mask": _padding()},
        ("attention",),
        4,
        in_peft=(),
    ),
    Case(
        "encoder",
        lambda: Encoding(batch_first=True),
        lambda: {"x": _vectors(), "padding": _padding()},
        ("self_attn", "linear1", "linear2"),
        8,
        in_peft=_ATTENTION_IN_PEFT,
    ),
    Case(
        "encoder_length_first",
        lambda: Encoding(batch_first=False),
        lambda: {"x": _vectors().transpose(0, 1), "mask": _future(), "is_causal": True},
        ("self_attn", "linear1", "linear2"),
        8,
        in_peft=_ATTENTION_IN_PEFT,
    ),
]
BY_NAME = {case.name: case for case in CASES}
