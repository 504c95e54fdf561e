"""The data balance of a training run: samples move between ranks before the forward, or images inside it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from megatron.core import parallel_state

import aiak_ext
from data_balance import BalanceMetrics, DefaultCodec, SampleCostModel
from examples.llava_ov.arguments import sequence_multiple

# Metrics of a balanced step that are worth a curve.
_LOGGED = (
    "imbalance_before",
    "imbalance_after",
    "bytes_moved",
    "plan_s",
    "exchange_s",
    "hidden_share",
    "moves_skipped",
)


def balance_loader(
    loader: Any,
    args: argparse.Namespace,
    extension: aiak_ext.ExtensionConfig,
    cost_model: SampleCostModel,
    num_microbatches: int,
) -> Any:
    """The loader, whose samples move to the rank that has room where scope `step` is on.

    Pipeline stages meet at every micro batch, so there every one of them is balanced, and all stages check that
    they planned alike.
    """
    pipelined = args.pipeline_model_parallel_size > 1
    return aiak_ext.balance_train_loader(
        loader,
        extension,
        num_microbatches=num_microbatches,
        group=parallel_state.get_data_parallel_group(),
        cost_model=cost_model,
        codec=DefaultCodec(pad_to_multiple=sequence_multiple(args)),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
        agree_across_stages=pipelined,
        balance_every_slot=pipelined,
        timeout_s=60 * args.distributed_timeout_minutes,
    )


class EncoderBalance:
    """Scope `encoder` of the data balance around the vision encoders of this rank's model chunks.

    Args:
        chunks: The model, out of its data-parallel wrapper.
        args: Of the run.
        extension: Whether the scope is on.
        cost_model: Weighs images.
        num_microbatches: Per step.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        args: argparse.Namespace,
        extension: aiak_ext.ExtensionConfig,
        cost_model: SampleCostModel,
        num_microbatches: int,
    ) -> None:
        self._encoders: list[aiak_ext.BalancedVisionEncoder] = []
        for chunk in chunks:
            if not chunk.add_encoder:
                continue
            encoder = aiak_ext.balance_vision_encoder(
                chunk.encode_images,
                extension,
                num_microbatches=num_microbatches,
                group=parallel_state.get_data_parallel_group(),
                cost_model=cost_model,
                timeout_s=60 * args.distributed_timeout_minutes,
            )
            chunk.set_encoder(encoder)
            if isinstance(encoder, aiak_ext.BalancedVisionEncoder):
                self._encoders.append(encoder)

    @property
    def last_metrics(self) -> BalanceMetrics | None:
        """Of the last micro batch; None where the scope is off or no image came yet."""
        return self._encoders[0].last_metrics if self._encoders else None

    def encoded_cost(self) -> float | None:
        """Cost of the images that this rank encoded in the last micro batch; None where the scope is off."""
        return self._encoders[0].encoded_cost if self._encoders else None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Every rank encodes its own images: in validation ranks hold different numbers of batches."""
        with ExitStack() as stack:
            for encoder in self._encoders:
                stack.enter_context(encoder.unbalanced())
            yield


def balance_scalars(metrics: BalanceMetrics | None) -> dict[str, float]:
    """What the balance adds to a step's log."""
    if metrics is None:
        return {}
    figures = asdict(metrics)
    return {f"balance/{name}": float(figures[name]) for name in _LOGGED}
