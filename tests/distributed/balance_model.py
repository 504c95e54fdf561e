"""A small vision-language model and mixed batches for the balance tests: float64, plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, VIDEO, VOCAB, PATCH_DIM, HIDDEN, MERGE = 98, 97, 100, 12, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal))


class Vit(nn.Module):
    """Attends within frames; returns merged rows and a second, deeper feature of the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH_DIM, HIDDEN)
        self.attention = Attention()
        self.merge = nn.Linear(MERGE * HIDDEN, HIDDEN)
        self.deep = nn.Linear(MERGE * HIDDEN, HIDDEN)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.patch(pixel_values)
        frames = [h * w for t, h, w in grid_thw.tolist() for _ in range(t)]
        x = torch.cat([self.attention(part[None], causal=False)[0] for part in x.split(frames)])
        x = x.reshape(-1, MERGE * HIDDEN)
        return self.merge(x), [torch.tanh(self.deep(x))]


class Vlm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit = Vit()
        self.set_encoder(self.vit)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.attention = Attention()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def set_encoder(self, encoder: Any) -> None:
        """Encode by `encoder`, past torch's hook that would register the ViT's parameters twice."""
        object.__setattr__(self, "encode", encoder)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, int]:
        """Summed token loss and number of tokens with loss."""
        tokens, labels = batch["tokens"], batch["labels"]
        x = self.embedding(tokens)
        for prefix, token in (("image", IMAGE), ("video", VIDEO)):
            rows, grid = batch[f"pixels_{prefix}"], batch[f"grid_{prefix}"]
            if grid is None:
                continue
            features, (deep,) = self.encode(rows, grid)
            places = (tokens == token).nonzero(as_tuple=True)
            x = x.index_put(places, features + deep)
        logits = self.head(self.attention(x, causal=True))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())


def model_input(batch: dict[str, Any], always_images: bool = False) -> dict[str, Any]:
    """What the model takes of a batch; with `always_images` a missing image input is zero rows, as balance needs."""
    inputs = {"tokens": batch["tokens"], "labels": batch["labels"]}
    for prefix, rows, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        has_any = batch.get(grid) is not None and len(batch[grid]) > 0
        inputs[f"pixels_{prefix}"] = batch[rows] if has_any else None
        inputs[f"grid_{prefix}"] = batch[grid] if has_any else None
    if always_images and inputs["grid_image"] is None:
        inputs["pixels_image"] = torch.zeros(0, PATCH_DIM, dtype=torch.float64)
        inputs["grid_image"] = torch.zeros(0, 3, dtype=torch.int64)
    return inputs


def build_model() -> Vlm:
    torch.manual_seed(0)
    return Vlm().double()


def grids(generator: torch.Generator, number: int, max_side: int = 3, max_frames: int = 1) -> Tensor:
    sides = 2 * torch.randint(1, max_side + 1, (number, 2), generator=generator)
    frames = torch.randint(1, max_frames + 1, (number, 1), generator=generator)
    return torch.cat([frames, sides], dim=1)


def make_batch(
    generator: torch.Generator, name: str, num_samples: int, num_images: list[int], num_videos: list[int]
) -> dict[str, Any]:
    """A padded dict batch; sample i has ``num_images[i]`` images and ``num_videos[i]`` videos."""
    rows, labels = [], []
    image_grid = grids(generator, sum(num_images))
    video_grid = grids(generator, sum(num_videos), max_side=2, max_frames=3)
    image_parts, video_parts = image_grid.split(num_images), video_grid.split(num_videos)
    for image_part, video_part in zip(image_parts, video_parts):
        text = torch.randint(1, 90, (int(torch.randint(2, 12, (1,), generator=generator)),), generator=generator)
        visual = [torch.full((int(g.prod()) // MERGE,), IMAGE) for g in image_part]
        visual += [torch.full((int(g.prod()) // MERGE,), VIDEO) for g in video_part]
        tokens = torch.cat([text[:1], *visual, text])
        rows.append(tokens)
        label = torch.roll(tokens, -1)
        label[(label == IMAGE) | (label == VIDEO)] = -100
        label[-1] = -100
        labels.append(label)
    width = max(len(row) for row in rows)
    batch: dict[str, Any] = {
        "tokens": torch.stack([F.pad(row, (0, width - len(row))) for row in rows]),
        "labels": torch.stack([F.pad(row, (0, width - len(row)), value=-100) for row in labels]),
        "lengths": torch.tensor([len(row) for row in rows]),
        "__key__": [f"{name}/{i}" for i in range(num_samples)],
        "__restore_key__": ("BatchDataset", 0, *(("Webdataset", name, i) for i in range(num_samples))),
    }
    for prefix, grid, counts in (("image", image_grid, num_images), ("video", video_grid, num_videos)):
        if len(grid):
            pixels = torch.randn(int(grid.prod(1).sum()), PATCH_DIM, dtype=torch.float64, generator=generator)
            batch["pixel_values" if prefix == "image" else "pixel_values_videos"] = pixels
            batch[f"{prefix}_grid_thw"] = grid
            batch[f"num_{prefix}s"] = torch.tensor(counts)
    return batch


def mixed_batches(rank: int, number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Micro batches of one to three samples: text only, images and videos, more of them on higher ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for i in range(number):
        size = int(torch.randint(1, 4, (1,), generator=generator))
        images = torch.randint(0, rank + 2, (size,), generator=generator).tolist()
        videos = (torch.rand(size, generator=generator) < 0.3).long().tolist()
        if (i + rank) % 3 == 0:
            images, videos = [0] * size, [0] * size
        yield make_batch(generator, f"r{rank}b{i}", size, images, videos)


def sample_digest(batch: dict[str, Any], codec: Any) -> dict[str, tuple]:
    """Bytes of every sample's tensors, by key.

    Visual inputs of zero rows are left out: a text sample has them in a batch with images, and not in one without.
    """
    digests = {}
    for sample in codec.split(batch):
        tensors = {
            n: v
            for n, v in sample.items()
            if isinstance(v, Tensor) and v.numel() and not (n in ("num_images", "num_videos") and v == 0)
        }
        digests[sample["__key__"]] = (
            sample["__restore_key__"],
            tuple(
                (n, str(v.dtype), tuple(v.shape), v.contiguous().numpy().tobytes()) for n, v in sorted(tensors.items())
            ),
        )
    return digests
