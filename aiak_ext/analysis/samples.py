"""What the analysis knows of samples: lengths, patches, and where each one was read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTable:
    """Encoded samples as arrays; row i of each is sample i, in the order read.

    Raises:
        ValueError: there are no samples, a length is not positive, or the arrays differ in length.
    """

    source: str
    """Where the lengths are from, for the report."""
    num_tokens: IntArray
    """Tokens, visual ones included, int64 [n]."""
    token_squares: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Sum of squared lengths of the attention segments [n]; without it one segment per sample."""
    num_patches: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Vision patches [n]; without it none."""
    patch_squares: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Sum of squared vision segments (images, video frames) [n]; without it one image per sample."""
    packed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Whether the sample holds several packed sequences [n]; without it none does."""
    rank: IntArray | None = None
    """Data-parallel rank that reads the sample [n], where known."""
    worker: IntArray | None = None
    """Worker of that rank [n], where known."""
    shard: NDArray[np.str_] | None = None
    """Shard that holds the sample [n], where known."""
    bytes_per_sample: float | None = None
    """Mean size of an encoded sample, where it was measured."""
    encode_s: float | None = None
    """Mean seconds to read and encode a sample on this machine, where it was measured."""
    population: int | None = None
    """Samples of the whole data set, where it is known and this table is a part of it."""
    is_estimate: bool = False
    """Whether lengths were estimated from metadata instead of encoding the samples."""
    notes: tuple[str, ...] = ()
    """What the reader of the figures should know, one sentence each."""

    def __post_init__(self) -> None:
        n = len(self.num_tokens)
        if n == 0:
            raise ValueError(f"{self.source} holds no sample, so there is nothing to analyze; check path and split")
        if self.num_tokens.min() < 1:
            row = int(self.num_tokens.argmin())
            raise ValueError(
                f"sample {row} of {self.source} has {self.num_tokens[row]} tokens, which no batch can hold; remove it"
            )
        defaults = {
            "token_squares": self.num_tokens**2,
            "num_patches": np.zeros(n, dtype=np.int64),
            "packed": np.zeros(n, dtype=bool),
        }
        for name, default in defaults.items():
            if not len(getattr(self, name)):
                object.__setattr__(self, name, default)
        if not len(self.patch_squares):
            object.__setattr__(self, "patch_squares", self.num_patches**2)
        for name in ("token_squares", "num_patches", "patch_squares", "packed", "rank", "worker", "shard"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(f"{self.source} gives {len(values)} values of {name} for {n} samples; give one each")

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def sums(self) -> IntArray:
        """Tokens, token squares, patches, patch squares, int64 [n, 4]: what `SampleCostModel.cost` takes."""
        return np.stack([self.num_tokens, self.token_squares, self.num_patches, self.patch_squares], axis=1)

    @property
    def has_images(self) -> bool:
        """Whether any sample has vision patches."""
        return bool(self.num_patches.any())

    def estimated_bytes_per_sample(self, patch_dim: int = 3 * 14 * 14) -> float:
        """Bytes of an encoded sample: as measured, else float32 patches of `patch_dim` and int64 tokens and labels."""
        if self.bytes_per_sample is not None:
            return self.bytes_per_sample
        return float(4 * patch_dim * self.num_patches.mean() + 16 * self.num_tokens.mean())
