"""The tiny LLaVA-OneVision in real processes: every parallel layout gives the losses and gradients of one rank.

One launch of two processes runs all layouts of two, another (slow) those of four. The reference is a plain loop over
the same micro batches in a model that each process holds alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from .launch import run_ranks

# Same arithmetic in another place: float64 rounding only. TP sums in another order around a float32 cross-entropy.
EXACT, TENSOR_PARALLEL = 1e-9, 1e-6
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """World size, parallel sizes and further `RuntimeConfig` fields of one case."""

    world: int = 2
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    tied: bool = False
    trained: bool = False
    """Train some steps as well."""
    distributed_optimizer: bool = False
    runtime: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return EXACT if self.tp == 1 else TENSOR_PARALLEL


LAYOUTS = {
    "dp2": Layout(trained=True),
    "dp2_distributed_optimizer": Layout(trained=True, distributed_optimizer=True),
    "pp2": Layout(pp=2, trained=True),
    "pp2_tied": Layout(pp=2, tied=True),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "pp2_recompute": Layout(pp=2, runtime=RECOMPUTE),
    "tp2": Layout(tp=2),
    "tp2_sequence_parallel": Layout(tp=2, trained=True, runtime={"sequence_parallel": True}),
    "tp2_sequence_parallel_recompute": Layout(tp=2, runtime={"sequence_parallel": True, **RECOMPUTE}),
    "dp2_pp2": Layout(world=4, pp=2),
    "dp2_tp2": Layout(world=4, tp=2),
    "pp4": Layout(world=4, pp=4),
    "tp2_pp2_tied_sequence_parallel": Layout(world=4, tp=2, pp=2, tied=True, runtime={"sequence_parallel": True}),
}
TRAINABLE = ("all", "adapter", "vision_model")
VOCAB_SIZE, IMAGE_TOKEN = 300, 7


def micro_batch(
    seed: int, grids: list[list[list[int]]], lengths: list[int], cu_lengths: list[int] | None = None
) -> dict:
    """A padded batch of samples with the given image grids; text tokens, labels and pixels are random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, tokens.shape, generator=generator)
    for row, (sample_grids, length) in enumerate(zip(grids, lengths)):
        num_image_tokens = sum(t * h * w // 4 for t, h, w in sample_grids)
        tokens[row, 1 : 1 + num_image_tokens] = IMAGE_TOKEN
        labels[row, : 1 + num_image_tokens] = -100
        labels[row, length:] = -100
    all_grids = [grid for sample_grids in grids for grid in sample_grids]
    num_patches = sum(t * h * w for t, h, w in all_grids)
    return {
        "images": torch.randn(num_patches, 588, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor(all_grids, dtype=torch.int64).reshape(-1, 3),
        "input_ids": tokens,
        "labels": labels,
        "cu_lengths": None if cu_lengths is None else torch.tensor(cu_lengths, dtype=torch.int32),
    }


def micro_batches() -> list[dict[str, Any]]:
    """Four micro batches of different shapes: one image; text only; padded with two images and none; packed video."""
    return [
        micro_batch(0, [[[1, 4, 6]]], [24]),
        micro_batch(1, [[]], [16]),
        micro_batch(2, [[[1, 2, 2], [1, 4, 2]], []], [20, 12]),
        micro_batch(3, [[[2, 4, 4]]], [30], cu_lengths=[0, 18, 30]),
    ]


def losses_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    from examples.llava_ov.model import packed_segments

    batch = dict(batch)
    packed = packed_segments(batch.pop("cu_lengths"), batch["input_ids"].shape[1])
    return model(**batch, position_ids=None, attention_mask=None, packed_seq_params=packed)


def reference(config: Any, batches: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss sums per micro batch, and gradients of the mean loss per token, of a model on one rank."""
    from examples.llava_ov.model import build_model

    model = build_model(config)
    losses = [losses_of(model, batch).sum() for batch in batches]
    num_tokens = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    torch.stack(losses).sum().backward()
    scale = 1.0 / torch.tensor(num_tokens)  # float32, as in Megatron's gradient finalisation
    gradients = {name: parameter.grad * scale for name, parameter in model.named_parameters()}
    return [float(loss) for loss in losses], gradients


def wrapped_chunks(
    config: Any, trainable: Sequence[str] = ("all",), distributed_optimizer: bool = False
) -> list[torch.nn.Module]:
    """This rank's model chunks in Megatron's DDP."""
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from examples.llava_ov.model import build_model, set_trainable_modules

    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    chunks = []
    for chunk in range(config.runtime.virtual_pipeline_model_parallel_size or 1):
        vp_stage = chunk if config.runtime.virtual_pipeline_model_parallel_size else None
        first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = build_model(config, pre_process=first, post_process=last, vp_stage=vp_stage)
        set_trainable_modules(model, trainable)
        model.config.finalize_model_grads_func = finalize_model_grads
        chunks.append(DistributedDataParallel(model.config, ddp_config, model))
    return chunks


def forward_backward(chunks: list[torch.nn.Module], batches: list[dict[str, Any]]) -> list[float]:
    """One step's forward and backward by Megatron's schedule; this rank's loss sums (last stage)."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()

    def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)

        def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            num_tokens = (batch["labels"] >= 0).sum().to(torch.int)
            return losses.sum(), num_tokens, {"loss": float(losses.sum())}

        return losses_of(model, batch), loss_func

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks,
        num_microbatches=len(batches),
        seq_length=max(batch["input_ids"].shape[1] for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    return [report["loss"] for report in reports]


def grad_norms(config: Any, batches: list[dict[str, Any]], trainable: str, distributed_optimizer: bool) -> list[float]:
    """Gradient norms of two steps of Megatron's optimizer with clipping, float32."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = wrapped_chunks(config, [trainable], distributed_optimizer)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=distributed_optimizer),
        chunks,
    )
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        forward_backward(chunks, batches)
        successful, norm, _ = optimizer.step()
        assert successful
        norms.append(float(norm))
    return norms


def largest_gradient_error(chunks: list[torch.nn.Module], gradients: dict[str, torch.Tensor]) -> tuple[float, set[str]]:
    """Largest |difference| / largest |gradient| of any parameter of this rank, and the parameters compared."""
    from examples.llava_ov.initialize import canonical_names, shard_of

    worst, names = 0.0, set()
    for chunk in chunks:
        model = chunk.module
        renamed = canonical_names(model)
        for local_name, parameter in model.named_parameters():
            name = renamed[local_name]
            if name not in gradients:  # the last stage's copy of a tied embedding
                assert name == "language_model.output_layer.weight"
                name = "language_model.embedding.word_embeddings.weight"
            expected = shard_of(gradients[name], parameter)
            error = (parameter.main_grad - expected).abs().max() / expected.abs().max().clamp(min=1e-12)
            worst = max(worst, float(error))
            names.add(name)
    return worst, names


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One layout against one rank: largest relative errors on this process, and the parameters compared."""

    loss_error: float
    gradient_error: float
    names: set[str]


@dataclasses.dataclass(frozen=True)
class RankResult:
    comparisons: dict[str, Comparison]
    parameters: set[str]
    """All parameters of the one-rank model."""
    norms: dict[tuple[str, str], list[float]]
    """(layout, trainable module) -> gradient norms of the steps trained."""


def run_layouts(rank: int, world_size: int) -> RankResult:
    """Run all layouts of this world size."""
    from examples.llava_ov import cpu_shim

    cpu_shim.install()
    from megatron.core import parallel_state as ps

    from examples.llava_ov.config import get_model_config

    cpu_shim.install_after_import()
    base = get_model_config("tiny").with_vocab(VOCAB_SIZE, IMAGE_TOKEN).with_runtime(params_dtype=torch.float64)
    tied = dataclasses.replace(base, language=dataclasses.replace(base.language, tie_word_embeddings=True))
    batches = micro_batches()
    ps.initialize_model_parallel(1, 1)
    references = {False: reference(base, batches), True: reference(tied, batches)}
    ps.destroy_model_parallel()

    results, norms = {}, {}
    for name, layout in LAYOUTS.items():
        if layout.world != world_size:
            continue
        config = (tied if layout.tied else base).with_runtime(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            **layout.runtime,
        )
        expected_losses, gradients = references[layout.tied]
        ps.initialize_model_parallel(layout.tp, layout.pp, layout.vpp)
        mine = slice(ps.get_data_parallel_rank(), None, ps.get_data_parallel_world_size())
        chunks = wrapped_chunks(config)
        losses = forward_backward(chunks, batches[mine])
        loss_error = max(
            (abs(loss - expected) / expected for loss, expected in zip(losses, expected_losses[mine])), default=0.0
        )
        gradient_error, names = largest_gradient_error(chunks, gradients)
        results[name] = Comparison(loss_error, gradient_error, names)
        assert bool(losses) == ps.is_pipeline_last_stage(ignore_virtual=True)
        if layout.tp > 1 and config.runtime.sequence_parallel and layout.pp == 1:
            with pytest.raises(ValueError, match="sequence length 15 does not divide by the tensor-parallel size 2"):
                losses_of(chunks[0].module, micro_batch(9, [[]], [15]))
        if layout.trained:
            config = config.with_runtime(params_dtype=torch.float32)
            for trainable in TRAINABLE:
                norms[name, trainable] = grad_norms(config, batches[mine], trainable, layout.distributed_optimizer)
        ps.destroy_model_parallel()
    return RankResult(results, set(references[False][1]), norms)


@pytest.fixture(scope="module")
def results_of() -> Callable[[int], list[RankResult]]:
    """World size -> every rank's results; each world size is launched once."""
    return functools.cache(lambda world_size: run_ranks(run_layouts, world_size, timeout_s=180))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if layout.world > 2 else ()) for name, layout in LAYOUTS.items()],
)
def test_layout_equals_one_rank(results_of: Callable[[int], list[RankResult]], name: str) -> None:
    layout = LAYOUTS[name]
    results = results_of(layout.world)
    for rank, result in enumerate(results):
        comparison = result.comparisons[name]
        assert comparison.loss_error <= layout.tolerance, f"losses differ on rank {rank}"
        assert comparison.gradient_error <= layout.tolerance, f"gradients differ on rank {rank}"
    compared = set.union(*(result.comparisons[name].names for result in results))
    missing = results[0].parameters - compared
    assert missing == ({"language_model.output_layer.weight"} if layout.tied else set())


@pytest.mark.parametrize("trainable", TRAINABLE)
def test_training_agrees_across_layouts(results_of: Callable[[int], list[RankResult]], trainable: str) -> None:
    """Clipping, both optimizers and frozen parts, also where a stage or rank has nothing to train; float32."""
    for result in results_of(2):
        norms = {layout: norms for (layout, name), norms in result.norms.items() if name == trainable}
        assert len(norms) == 4
        for layout, values in norms.items():
            assert values == pytest.approx(norms["dp2"], rel=1e-4), layout
