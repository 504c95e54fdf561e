"""Model configurations: frozen dataclasses, a registry, the sizes of LLaVA-OneVision-1.5 and a `tiny` one.

Sizes are those of seed document 002, sections 3.5.1 and 3.5.2; what its table leaves out (key-value heads, tied
embeddings, rotary base) is from the configurations published with Qwen2.5-3B and Qwen3-4B/8B/14B/32B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MODEL_FAMILY = "llava-ov-1.5"
# Attributes of the model that can be trained or frozen by themselves.
PARTS = ("vision_model", "adapter", "language_model")
# Vocabularies are padded to a multiple of this, whatever the parallel layout, so that every layout trains the
# same model. Qwen's 151,936 is one already.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """A Qwen-style decoder: GQA, RMSNorm, SwiGLU, rotary positions."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key-value heads."""
    kv_channels: int = 128
    """Size of one attention head."""
    vocab_size: int = 151_936
    qk_layernorm: bool = True
    """RMSNorm on queries and keys (Qwen3)."""
    add_qkv_bias: bool = False
    """Bias on the QKV projection only (Qwen2.5)."""
    tie_word_embeddings: bool = False
    rotary_base: int = 1_000_000
    layernorm_epsilon: float = 1e-6
    max_sequence_length: int = 32_768

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A RICE-style ViT on native-resolution patches."""

    num_layers: int = 24
    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_attention_heads: int = 16
    patch_size: int = 14
    in_channels: int = 3
    spatial_merge_size: int = 2
    """The adapter merges squares of this many patches a side into one visual token."""
    layernorm_epsilon: float = 1e-5
    pre_layernorm_epsilon: float = 1e-4
    rotary_base: int = 10_000

    @property
    def kv_channels(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def patch_dim(self) -> int:
        """Length of one flattened patch, e.g. 3*14*14 = 588."""
        return self.in_channels * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What may change from run to run without changing the model: parallel layout, precision, recomputation."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    params_dtype: torch.dtype = torch.float32
    recompute_granularity: str | None = None
    """None, "selective" (attention only) or "full" (whole layers, with `recompute_method`)."""
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    seed: int = 1234
    """Weights depend on this and on nothing else of the runtime."""

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel is on with tensor_model_parallel_size 1: it splits the sequence over the tensor-"
                "parallel ranks and has nothing to split; switch it off or raise the tensor-parallel size"
            )


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionConfig:
    """Everything `examples.llava_ov.model.build_model` needs."""

    language: LanguageConfig
    vision: VisionConfig = field(default_factory=VisionConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    image_token_id: int = 151_655
    """The token whose positions take the visual embeddings; Qwen's ``<|image_pad|>`` by default."""

    def __post_init__(self) -> None:
        if not 0 <= self.image_token_id < self.language.vocab_size:
            raise ValueError(
                f"image_token_id {self.image_token_id} lies outside the vocabulary of {self.language.vocab_size} "
                "tokens, so no position could take an image; use with_vocab() with both numbers of one tokenizer"
            )

    def with_vocab(self, vocab_size: int, image_token_id: int) -> LlavaOnevisionConfig:
        """The same model for another tokenizer."""
        language = dataclasses.replace(self.language, vocab_size=vocab_size)
        return dataclasses.replace(self, language=language, image_token_id=image_token_id)

    def with_runtime(self, **changes: object) -> LlavaOnevisionConfig:
        """The same model with other `RuntimeConfig` fields."""
        return dataclasses.replace(self, runtime=dataclasses.replace(self.runtime, **changes))  # type: ignore[arg-type]


ConfigFactory = Callable[[], LlavaOnevisionConfig]
_MODEL_CONFIGS: dict[tuple[str, str], ConfigFactory] = {}


def register_model_config(model_family: str, model_arch: str) -> Callable[[ConfigFactory], ConfigFactory]:
    """Decorator: register a function that makes the configuration of `model_arch` of `model_family`.

    Raises:
        ValueError: the pair is taken.
    """

    def decorator(factory: ConfigFactory) -> ConfigFactory:
        if (model_family, model_arch) in _MODEL_CONFIGS:
            raise ValueError(
                f"model {model_arch!r} of family {model_family!r} is already registered; choose another name"
            )
        _MODEL_CONFIGS[model_family, model_arch] = factory
        return factory

    return decorator


def list_model_configs(model_family: str | None = None) -> list[str]:
    """Full names (``family-arch``) of the registered models, of one family or of all, in order of registration."""
    return [f"{family}-{arch}" for family, arch in _MODEL_CONFIGS if model_family in (None, family)]


def get_model_config(name: str, model_family: str = MODEL_FAMILY) -> LlavaOnevisionConfig:
    """The configuration called `name`, as ``family-arch`` or, within `model_family`, as ``arch`` alone.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    return _MODEL_CONFIGS[_registered(name, model_family)]()


def model_family_of(name: str) -> str:
    """The family of the model called `name`, see `get_model_config`."""
    return _registered(name, MODEL_FAMILY)[0]


def _registered(name: str, model_family: str) -> tuple[str, str]:
    for family, arch in _MODEL_CONFIGS:
        if name == f"{family}-{arch}" or (family, arch) == (model_family, name):
            return family, arch
    raise ValueError(f"unknown model {name!r}; registered are: {', '.join(list_model_configs())}")


@register_model_config(MODEL_FAMILY, "tiny")
def _tiny() -> LlavaOnevisionConfig:
    """For two CPU processes: 1,000 patches and 300 tokens take about a quarter of a second, forward and backward,
    on one thread, ViT and decoder about half each. Heads and layers divide by 2 and 4 (TP2, PP2, PP4, VPP2)."""
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=4,
            hidden_size=192,
            ffn_hidden_size=512,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=48,
            vocab_size=2048,
            rotary_base=10_000,
            max_sequence_length=4096,
        ),
        vision=VisionConfig(num_layers=3, hidden_size=128, ffn_hidden_size=384, num_attention_heads=4),
        image_token_id=0,
    )


@register_model_config(MODEL_FAMILY, "3b")
def _3b() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=36,
            hidden_size=2048,
            ffn_hidden_size=11_008,
            num_attention_heads=16,
            num_query_groups=2,
            qk_layernorm=False,
            add_qkv_bias=True,
            tie_word_embeddings=True,
        )
    )


@register_model_config(MODEL_FAMILY, "4b")
def _4b() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=36,
            hidden_size=2560,
            ffn_hidden_size=9728,
            num_attention_heads=32,
            num_query_groups=8,
            tie_word_embeddings=True,
        )
    )


@register_model_config(MODEL_FAMILY, "8b")
def _8b() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=36, hidden_size=4096, ffn_hidden_size=12_288, num_attention_heads=32, num_query_groups=8
        )
    )


@register_model_config(MODEL_FAMILY, "14b")
def _14b() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=40, hidden_size=5120, ffn_hidden_size=17_408, num_attention_heads=40, num_query_groups=8
        )
    )


@register_model_config(MODEL_FAMILY, "32b")
def _32b() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        language=LanguageConfig(
            num_layers=64, hidden_size=5120, ffn_hidden_size=25_600, num_attention_heads=64, num_query_groups=8
        )
    )
