"""What the benchmarks share: lengths, costs, pooled order, a synthetic stream, tables and JSON output."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from megatron.energon import Sample, WorkerConfig, edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from numpy.typing import NDArray

from length_sort.pool_order import order_pool, pool_seed

PROJECT_ROOT = Path(__file__).resolve().parents[1]
MIX_CSV = PROJECT_ROOT.parent / "shared" / "data" / "lengths" / "mix_vlm_sft.csv"

# Shape of the mix, for the fallback: rows, mean tokens and coefficient of variation.
MIX_NUM_SAMPLES = 19_302
MIX_MEAN_TOKENS = 698.0
MIX_CV = 0.97

HIDDEN_SIZE = 2560


@dataclass(frozen=True, kw_only=True)
class LengthData:
    """Sample lengths in tokens, int64 [num_samples], and where they come from."""

    num_tokens: NDArray[np.int64]
    source: str

    def describe(self) -> str:
        """Return one line with the source and the shape of the lengths."""
        tokens = self.num_tokens
        cv = tokens.std() / tokens.mean()
        return (
            f"lengths: {self.source}; {len(tokens)} samples, mean {tokens.mean():.0f} tokens, CV {cv:.2f}, "
            f"p95 {np.percentile(tokens, 95):.0f}, longest {tokens.max()}"
        )


def load_lengths(path: Path = MIX_CSV) -> LengthData:
    """Read ``total_tokens`` of the mix, or draw a lognormal of the same mean and CV (seed 0) where it is absent."""
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            tokens = np.array([int(row["total_tokens"]) for row in csv.DictReader(file)], dtype=np.int64)
        return LengthData(num_tokens=tokens, source=path.name)
    sigma_squared = math.log(1 + MIX_CV**2)
    drawn = np.random.default_rng(0).lognormal(
        mean=math.log(MIX_MEAN_TOKENS) - sigma_squared / 2, sigma=math.sqrt(sigma_squared), size=MIX_NUM_SAMPLES
    )
    tokens = np.maximum(np.rint(drawn), 1).astype(np.int64)
    source = f"lognormal of mean {MIX_MEAN_TOKENS:.0f} and CV {MIX_CV} (seed 0; {path.name} is not here)"
    return LengthData(num_tokens=tokens, source=source)


def deal_streams(
    num_tokens: NDArray[np.int64], num_streams: int, stream_length: int, *, seed: int = 0
) -> NDArray[np.int64]:
    """Deal shuffled passes over the samples out to streams, as an epoch's shards go to ranks and workers.

    Returns:
        Lengths, int64 [num_streams, stream_length].
    """
    rng = np.random.default_rng(seed)
    num_passes = math.ceil(num_streams * stream_length / len(num_tokens))
    dealt = np.concatenate([rng.permutation(num_tokens) for _ in range(num_passes)])
    return np.ascontiguousarray(dealt[: num_streams * stream_length].reshape(stream_length, num_streams).T)


def token_cost(num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cost of sequences of these lengths: 6 * hidden * n + n**2, for a hidden size of 2560 (design of the levers)."""
    n = num_tokens.astype(np.float64)
    return 6 * HIDDEN_SIZE * n + n * n


def pooled_order(
    num_tokens: NDArray[np.int64],
    *,
    pool_size: int,
    shuffle_block: int = 1,
    seed: int = 42,
    worker_slot: int = 0,
) -> NDArray[np.int64]:
    """Order one worker's stream as LengthPoolSortDataset emits it; a last pool may be shorter.

    Args:
        num_tokens: Lengths in the order read, int64 [stream_length].
        pool_size: Samples per pool; 0 leaves the order as it is.
        shuffle_block: Samples that stay together in the shuffle.
        seed: The wrapper's seed.
        worker_slot: Index of the worker within its rank.

    Returns:
        Lengths in the order emitted, int64 [stream_length].
    """
    if pool_size == 0:
        return num_tokens
    pools = []
    for start in range(0, len(num_tokens), pool_size):
        pool = num_tokens[start : start + pool_size]
        order = order_pool(
            pool.tolist(),
            seed=pool_seed(seed, start + len(pool) - 1, worker_slot),
            ascending=True,
            shuffle_block=shuffle_block,
        )
        pools.append(pool[order])
    return np.concatenate(pools)


@edataclass
class SyntheticSample(Sample):
    """An encoded sample without content: a few tokens and the length it stands for."""

    tokens: torch.Tensor
    total_len: int


class SyntheticStream(SavableDataset[SyntheticSample]):
    """A finite stream of samples of given lengths, each of which costs one call of `encode`."""

    _savable_fields = ("_next_index",)

    def __init__(
        self,
        num_tokens: Sequence[int],
        *,
        encode: Callable[[], None] = lambda: None,
        worker_config: WorkerConfig,
    ) -> None:
        """Make a stream.

        Args:
            num_tokens: Length of every sample.
            encode: What encoding a sample does apart from making it.
            worker_config: Energon's worker config.
        """
        super().__init__(worker_config)
        self._num_tokens = num_tokens
        self._encode = encode
        self._tokens = torch.zeros(16, dtype=torch.int64)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._next_index = 0

    def __iter__(self) -> Iterator[SyntheticSample]:
        while self._next_index < len(self._num_tokens):
            index = self._next_index
            self._next_index += 1
            yield self._sample(index)
        self._next_index = 0

    def _sample(self, index: int) -> SyntheticSample:
        self._encode()
        return SyntheticSample(
            __key__=str(index),
            __restore_key__=(type(self).__name__, index),
            tokens=self._tokens,
            total_len=self._num_tokens[index],
        )

    def can_restore_sample(self) -> bool:
        return True

    def restore_sample(self, restore_key: tuple[Any, ...]) -> SyntheticSample:
        return self._sample(restore_key[1])

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self._num_tokens)

    def worker_has_samples(self) -> bool:
        return True

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "num_samples": len(self._num_tokens)}


def single_worker() -> WorkerConfig:
    """Return the config of one rank that loads in its own process."""
    return WorkerConfig(rank=0, world_size=1, num_workers=0)


@contextmanager
def active_worker(worker_config: WorkerConfig) -> Iterator[None]:
    """Make a worker the active one, as Energon's loader does around every sample."""
    worker_config.worker_activate(0)
    try:
        yield
    finally:
        worker_config.worker_deactivate()


def step_efficiency(rank_costs: NDArray[np.float64]) -> float:
    """Return the mean rank's share of the time that the slowest rank takes, over all steps.

    Args:
        rank_costs: Cost of every rank's step, float64 [num_ranks, num_steps].
    """
    return float(rank_costs.mean(axis=0).sum() / rank_costs.max(axis=0).sum())


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with the same keys as a right-aligned text table: floats to three places, None as a dash."""
    cells = [list(rows[0]), *([_format_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def output_option(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the ``--output`` option, by default ``runs/benchmarks/NAME.json`` in the project."""
    return click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        default=PROJECT_ROOT / "runs" / "benchmarks" / f"{name}.json",
        show_default=f"runs/benchmarks/{name}.json",
        help="JSON file for the figures.",
    )


def write_json(output: Path, results: Mapping[str, Any]) -> None:
    """Write the figures with the machine they come from."""
    machine = {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n", encoding="utf-8")
    click.echo(f"written: {output}")
