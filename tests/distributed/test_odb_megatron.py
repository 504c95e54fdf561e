"""ODB's groups through Megatron's own schedule: the gradient is that of one rank with the same samples.

One launch per world size builds the real pipeline (glue, store, idle groups) and a one-layer GPT in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.energon import Batch, DefaultTaskEncoder, Sample, WorkerConfig, stateless

from aiak_ext import ExtensionConfig, LengthAwareTaskEncoderMixin, ODBConfig
from length_sort.loss_scale import count_loss_tokens, loss_scale
from length_sort.odb_group import GroupInfo
from tests.streams import ListDataset, drain

from .launch import run_ranks

pytestmark = pytest.mark.megatron_in_process

VOCAB_SIZE, LONGEST = 16, 24
# Samples of each rank: the second runs dry first, and has idle groups from then on.
NUM_SAMPLES = {2: [14, 3], 3: [14, 3, 9]}


@dataclasses.dataclass
class TokenSample(Sample):
    tokens: torch.Tensor
    labels: torch.Tensor


@dataclasses.dataclass
class TokenBatch(Batch):
    tokens: torch.Tensor
    labels: torch.Tensor
    odb_info: torch.Tensor | None = None

    @property
    def info(self) -> GroupInfo:
        return GroupInfo.from_tensor(self.odb_info)


def make_sample(rank: int, index: int) -> TokenSample:
    """A sequence whose first part, the prompt, carries no loss; another one for every rank and index."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    length = int(torch.randint(3, LONGEST, (), generator=generator))
    labels = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
    labels[: int(torch.randint(0, length - 1, (), generator=generator))] = -100
    return TokenSample(
        __key__=f"{rank}-{index}",
        __restore_key__=("ListDataset", index),
        tokens=torch.randint(0, VOCAB_SIZE, (length,), generator=generator),
        labels=labels,
    )


class RankSamples(ListDataset):
    """The samples of one rank."""

    def _sample(self, index: int) -> TokenSample:
        return make_sample(self.worker_config.rank, index)


class TokenTaskEncoder(LengthAwareTaskEncoderMixin, DefaultTaskEncoder):
    @stateless
    def batch(self, samples: list[TokenSample]) -> TokenBatch:
        width = max(len(sample.tokens) for sample in samples)
        return TokenBatch(
            __key__=[sample.__key__ for sample in samples],
            __restore_key__=(),
            tokens=torch.stack([F.pad(s.tokens, (0, width - len(s.tokens))) for s in samples]),
            labels=torch.stack([F.pad(s.labels, (0, width - len(s.labels)), value=-100) for s in samples]),
        )

    @stateless
    def encode_batch(self, batch: TokenBatch) -> TokenBatch:
        return batch


def odb_batches(rank: int, world_size: int) -> list[TokenBatch]:
    """One epoch of this rank, as the flags build it."""
    config = ExtensionConfig(odb=ODBConfig(token_budget=50, buffer_size=6), calculate_per_token_loss=True)
    worker_config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    samples = RankSamples([0] * NUM_SAMPLES[world_size][rank], worker_config=worker_config)
    return drain(TokenTaskEncoder(config).build_batch(samples, batch_size=1, worker_config=worker_config))


def build_gpt(*, per_token_loss: bool) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=per_token_loss,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=LONGEST,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.double()


def loss_sum(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed token loss in float64; Megatron's own cross-entropy computes in float32."""
    length = tokens.shape[1]
    hidden_from = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    logits = model(tokens, torch.arange(length).expand_as(tokens), hidden_from)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def one_rank_gradients(keys: Sequence[str], *, in_float32: bool) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss per token over these samples, each of them alone and unpadded.

    With `in_float32` the mean is taken as Megatron takes it under calculate_per_token_loss: by a reciprocal that is
    rounded to float32.
    """
    model = build_gpt(per_token_loss=True)
    samples = [make_sample(*map(int, key.split("-"))) for key in keys]
    for sample in samples:
        loss_sum(model, sample.tokens[None], sample.labels[None]).backward()
    num_tokens = sum(count_loss_tokens(sample) for sample in samples)
    scale = 1.0 / torch.tensor(num_tokens, dtype=torch.float32 if in_float32 else torch.float64)
    return {name: parameter.grad * scale for name, parameter in model.named_parameters()}


class MegatronStep:
    """Forward and backward of one step, by Megatron's schedule, in its DDP and with its finalisation."""

    def __init__(self, *, per_token_loss: bool) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        model = build_gpt(per_token_loss=per_token_loss)
        self._per_token_loss = per_token_loss
        self._ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.no_sync_func = self._ddp.no_sync

    def gradients(self, groups: Sequence[TokenBatch]) -> dict[str, torch.Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._ddp.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(groups),
            model=[self._ddp],
            num_microbatches=len(groups),
            seq_length=LONGEST,
            micro_batch_size=1,
            forward_only=False,
        )
        return {name: parameter.main_grad.clone() for name, parameter in self._ddp.module.named_parameters()}

    def _forward_step(self, groups: Iterator[TokenBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        group = next(groups)
        num_tokens = (group.labels != -100).sum().to(torch.int)
        assert int(num_tokens) == group.info.local_loss_tokens

        def loss_func(total: torch.Tensor) -> tuple[Any, ...]:
            if self._per_token_loss:
                return total, num_tokens, {}
            return total / num_tokens.clamp(min=1) * loss_scale(group.info, dist.get_world_size()), {}

        return loss_sum(model, group.tokens, group.labels), loss_func


def largest_errors(batches: Sequence[TokenBatch], num_groups: int, *, per_token_loss: bool) -> list[float]:
    """Of every step of `num_groups` groups: the largest difference of any gradient from one rank's."""
    step = MegatronStep(per_token_loss=per_token_loss)
    errors = []
    for start in range(0, len(batches) - num_groups + 1, num_groups):
        groups = batches[start : start + num_groups]
        mine = [key for group in groups if not group.info.idle for key in group.__key__]
        keys_of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(keys_of_ranks, mine)
        expected = one_rank_gradients(list(itertools.chain(*keys_of_ranks)), in_float32=per_token_loss)
        gradients = step.gradients(groups)
        assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
        errors.append(max(float((gradients[name] - expected[name]).abs().max()) for name in expected))
    return errors


@dataclasses.dataclass(frozen=True)
class RankResult:
    infos: list[GroupInfo]
    keys: list[str]
    errors: dict[str, list[float]]


def train_rank(rank: int, world_size: int) -> RankResult:
    from examples.llava_ov import cpu_shim

    cpu_shim.install()
    from megatron.core import parallel_state

    cpu_shim.install_after_import()
    parallel_state.initialize_model_parallel()
    batches = odb_batches(rank, world_size)
    errors = {
        "one group, per-token loss": largest_errors(batches, 1, per_token_loss=True),
        "three groups, per-token loss": largest_errors(batches, 3, per_token_loss=True),
        "one group, loss_scale": largest_errors(batches, 1, per_token_loss=False),
    }
    keys = [key for batch in batches if not batch.info.idle for key in batch.__key__]
    return RankResult([batch.info for batch in batches], keys, errors)


@pytest.fixture(scope="module")
def results_of() -> Callable[[int], list[RankResult]]:
    """World size -> every rank's results; each world size is launched once."""
    return functools.cache(lambda world_size: run_ranks(train_rank, world_size, timeout_s=120))


@pytest.mark.parametrize("world_size", NUM_SAMPLES)
def test_ranks_are_unequal_and_one_runs_idle(results_of, world_size):
    results = results_of(world_size)
    assert len({len(result.infos) for result in results}) == 1
    assert [len(set(result.keys)) for result in results] == NUM_SAMPLES[world_size]
    assert any(info.idle for info in results[1].infos)
    assert all(0 < info.local_loss_tokens < info.local_tokens for info in results[0].infos), "prompts are masked"


@pytest.mark.parametrize("case", ["one group, per-token loss", "three groups, per-token loss", "one group, loss_scale"])
@pytest.mark.parametrize("world_size", NUM_SAMPLES)
def test_gradient_is_that_of_one_rank(results_of, world_size, case):
    for result in results_of(world_size):
        errors = result.errors[case]
        assert len(errors) >= 2 and max(errors) < 1e-9, errors
