"""The language model: a Qwen-style decoder as Megatron's `GPTModel` with a layer spec of our own."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from .config import LlavaOnevisionConfig
from .layers import RMSNorm, transformer_layer_spec


def language_transformer_config(config: LlavaOnevisionConfig) -> TransformerConfig:
    """Megatron's configuration of the decoder; the pipeline schedules and the optimizer read it too."""
    language, runtime = config.language, config.runtime
    virtual_pipeline = runtime.virtual_pipeline_model_parallel_size is not None
    return TransformerConfig(
        num_layers=language.num_layers,
        hidden_size=language.hidden_size,
        ffn_hidden_size=language.ffn_hidden_size,
        num_attention_heads=language.num_attention_heads,
        num_query_groups=language.num_query_groups,
        kv_channels=language.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=language.layernorm_epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=language.add_qkv_bias,
        qk_layernorm=language.qk_layernorm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=runtime.tensor_model_parallel_size,
        sequence_parallel=runtime.sequence_parallel,
        pipeline_model_parallel_size=runtime.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=runtime.virtual_pipeline_model_parallel_size,
        pipeline_dtype=runtime.params_dtype,
        params_dtype=runtime.params_dtype,
        bf16=runtime.params_dtype == torch.bfloat16,
        use_cpu_initialization=True,
        recompute_granularity=runtime.recompute_granularity,
        recompute_method=runtime.recompute_method,
        recompute_num_layers=runtime.recompute_num_layers,
        # Micro batches differ in length: stages exchange shapes before tensors. Megatron accepts that only with
        # the all-to-all dispatcher, also in a model without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The interleaved schedule needs sends that do not wait for the matching receive.
        overlap_p2p_comm=virtual_pipeline,
        batch_p2p_comm=not virtual_pipeline,
        calculate_per_token_loss=True,
    )


def build_language_model(
    config: LlavaOnevisionConfig,
    transformer_config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    """The decoder, or this pipeline stage's part of it."""
    language = config.language
    layer = transformer_layer_spec(RMSNorm, AttnMaskType.causal, language.qk_layernorm)
    num_layers = get_num_layers_to_build(transformer_config, vp_stage)
    return GPTModel(
        transformer_config,
        TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm),
        vocab_size=language.padded_vocab_size,
        max_sequence_length=language.max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=language.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=language.rotary_base,
        # The visual embeddings are put in first, then the sequence is split.
        scatter_embedding_sequence_parallel=False,
        vp_stage=vp_stage,
    )
