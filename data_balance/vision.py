"""Balance inside the forward: every rank encodes an even share of all ranks' images and gets its own features back."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from data_balance.bounds import imbalance
from data_balance.cost import CostModel
from data_balance.exchange import DTYPES
from data_balance.fit import CostFitter
from data_balance.groups import CollectiveWatch, group_device, own_gloo_group
from data_balance.metrics import BalanceMetrics
from data_balance.options import DEFAULT_COST_MODEL
from data_balance.planners import DEFAULT_TOLERANCE, planner_for
from data_balance.rows import Route, combine, dispatch
from data_balance.step_plan import moving_pays

#: Plans kept for recomputation; more micro batches than this are never between a forward and its backward.
KEPT_PLANS = 256


class BalancedVisionEncoder(nn.Module):
    """Wraps a vision encoder that maps (pixel rows [patches, dim], grids [images, 3]) to embeddings.

    Every rank of the group calls it for each micro batch, also with zero images, and uses the result, also
    when it has no rows (`keep_in_graph` helps): the backward pass exchanges gradients on all ranks. A rank
    left without images encodes one image of the smallest size and drops it, so that all parameters take part
    everywhere. Outputs and parameter gradients are those of the wrapped encoder. Parameter names in state
    dicts stay the wrapped encoder's.

    Args:
        encoder: a module or function; returns a tensor, or any nesting of tensors, of ``patches // merge``
            rows per image.
        group: ranks that share the work, over which data moves; None is the world.
        sorting_algo_name: a key of `SORTING_ALGORITHMS`.
        cost_model: weighs an image's patches; a ViT-L's without.
        num_microbatches: micro batches of an optimizer step: within it ranks' costs so far are kept in mind,
            so that its totals end even.
        split_frames: send the frames of a video to different ranks. Exact only for encoders that attend
            within frames.
        merge_size: patches per side that the encoder merges into one row.
        threshold: share of the heaviest rank's load that a move has to save.
        tolerance: how far above the bound `min_move` leaves a rank.
        fit_steps: fit the cost model to the encoder's forward times in this many micro batches.
        timeout_s: how long to wait for a late rank.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        group: dist.ProcessGroup | None = None,
        *,
        sorting_algo_name: str = "lpt",
        cost_model: CostModel | None = None,
        num_microbatches: int = 1,
        split_frames: bool = False,
        merge_size: int = 2,
        threshold: float = 0.02,
        tolerance: float = DEFAULT_TOLERANCE,
        fit_steps: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        if num_microbatches < 1 or merge_size < 1 or not 0 <= threshold < 1:
            raise ValueError(
                f"num_microbatches {num_microbatches}, merge_size {merge_size}, threshold {threshold}: give "
                "at least one micro batch, at least one patch per side, and a share from 0 to 1"
            )
        self.encoder = encoder
        self.cost_model = cost_model if cost_model is not None else DEFAULT_COST_MODEL.vision
        self.is_enabled = True
        self.last_metrics: BalanceMetrics | None = None
        #: Cost of the images that this rank encoded in the last micro batch, after the move.
        self.encoded_cost: float | None = None
        self._group: dist.ProcessGroup = group if group is not None else _world()
        self._lengths_group = own_gloo_group(group, timeout_s)
        self._watch = CollectiveWatch(self._lengths_group, "vision")
        self._planner = planner_for(sorting_algo_name, tolerance)
        self._fitter = CostFitter(fit_steps, self._lengths_group, group) if fit_steps else None
        self._num_microbatches = num_microbatches
        self._split_frames = split_frames
        self._merge_size = merge_size
        self._threshold = threshold
        self._rank, self._num_ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._carried = np.zeros(self._num_ranks)
        self._num_planned = 0
        self._num_skipped = 0
        self._plans: OrderedDict[bytes, _ImagePlan] = OrderedDict()
        if hasattr(encoder, "sharded_state_dict"):  # Megatron's distributed checkpoints ask for it
            self.sharded_state_dict = encoder.sharded_state_dict
        self.register_state_dict_post_hook(_drop_prefix)
        self.register_load_state_dict_pre_hook(_add_prefix)

    def forward(self, pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None, **kwargs: Any) -> Any:
        """Embeddings of this rank's images, as the encoder returns them.

        Args:
            pixel_values: [patches, dim]; zero rows or None without images.
            grid_thw: [images, 3] frames, height and width in patches; None without images.
            kwargs: handed to the encoder as they are.

        Raises:
            ExchangeError: a rank did not come within the timeout.
            ValueError: shapes that do not fit together.
        """
        if not self.is_enabled or self._num_ranks == 1:
            return self.encoder(pixel_values, grid_thw, **kwargs)
        with self._watch.stage(f"the vision balance after {self._num_planned} micro batches"):
            pixel_values, grid_thw, plan, is_new = self._plan_for(pixel_values, grid_thw)
        route = plan.route
        rows = pixel_values
        if route is not None:
            with self._watch.stage(f"sending the images of micro batch {plan.index}"):
                rows = dispatch(rows, route, self._group, self._watch)
        started = self._now() if is_new else 0.0
        outputs, merges, tree = self._encode(rows, plan.grids[plan.target == self._rank], grid_thw, kwargs)
        if is_new and self._fitter is not None:
            self._fitter.add_time(plan.index, self._now() - started)
        if route is not None:
            with self._watch.stage(f"returning the features of micro batch {plan.index}"):
                outputs = combine(outputs, merges, route, self._group, self._watch)
        return tree_unflatten(outputs, tree)

    @contextmanager
    def unbalanced(self) -> Iterator[None]:
        """Encode locally inside, e.g. for generation on one rank: no other rank is waited for."""
        before, self.is_enabled = self.is_enabled, False
        try:
            yield
        finally:
            self.is_enabled = before

    def start_step(self) -> None:
        """Forget the ranks' costs so far; the `num_microbatches`-th micro batch does it by itself."""
        self._carried[:] = 0.0

    def _plan_for(
        self, pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, _ImagePlan, bool]:
        """Complete input tensors, the plan of this micro batch, and whether it is new.

        Under activation recomputation the same micro batch comes again, inside the backward pass and after
        others: all ranks' grids identify it, and it gets the same plan, so that features are recomputed
            where they were computed.
        """
        pixel_values, grid_thw, grids, home = self._gather(pixel_values, grid_thw)
        started = time.perf_counter()
        key = grids.tobytes() + home.tobytes()
        is_new = torch._C._current_graph_task_id() == -1
        plan = None if is_new else self._plans.get(key)
        if plan is None:
            plan = self._make_plan(grids, home, pixel_values)
            self._plans[key] = plan
            self._plans.move_to_end(key)
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
            if self.last_metrics is not None:
                self.last_metrics.plan_s = time.perf_counter() - started
        return pixel_values, grid_thw, plan, is_new

    def _gather(
        self, pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray]:
        """Complete input tensors, all ranks' grids [images, 3] and the rank of each."""
        head = torch.tensor([0, -1, 0, 0])
        if pixel_values is not None and grid_thw is not None:
            self._check(pixel_values, grid_thw)
            kind = [pixel_values.shape[1], DTYPES.index(pixel_values.dtype), int(pixel_values.requires_grad)]
            head = torch.tensor([len(grid_thw), *kind])
        heads = [torch.empty_like(head) for _ in range(self._num_ranks)]
        dist.all_gather(heads, head, group=self._lengths_group)
        table = torch.stack(heads).numpy()
        counts = table[:, 0]
        pixel_values, grid_thw = self._complete(pixel_values, grid_thw, table)
        mine = torch.zeros(max(int(counts.max()), 1), 3, dtype=torch.int64)
        mine[: len(grid_thw)] = grid_thw.cpu()
        parts = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        dist.all_gather(parts, mine, group=self._lengths_group)
        grids = torch.cat([part[:count] for part, count in zip(parts, counts.tolist())]).numpy()
        return pixel_values, grid_thw, grids, np.repeat(np.arange(self._num_ranks), counts)

    def _check(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> None:
        num_patches = int(grid_thw.prod(dim=1).sum()) if len(grid_thw) else 0
        if pixel_values.ndim != 2 or len(pixel_values) != num_patches:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)} and grid_thw says {num_patches} "
                "patches; features would end up beside another image: give rows [patches, dim] in the order "
                "of the grids"
            )

    def _complete(
        self, pixel_values: torch.Tensor | None, grid_thw: torch.Tensor | None, table: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero rows in place of None, of the width and dtype that the other ranks have."""
        known = table[table[:, 1] >= 0]
        if not len(known):
            raise ValueError(
                "no rank gave pixel_values, so their width is unknown; give zero rows [0, dim] for a micro "
                "batch without images"
            )
        if pixel_values is None or grid_thw is None:
            device = group_device(self._group)
            pixel_values = torch.empty(0, int(known[0, 1]), dtype=DTYPES[known[0, 2]], device=device)
            grid_thw = torch.empty(0, 3, dtype=torch.int64, device=device)
        if (known[:, 1:3] != known[0, 1:3]).any():
            raise ValueError(f"ranks give pixel rows of (width, dtype) {known[:, 1:3].tolist()}; they have to be alike")
        if known[:, 3].any() and not pixel_values.requires_grad:
            # Else this rank would be missing in the backward pass.
            pixel_values = pixel_values.detach().requires_grad_()
        return pixel_values, grid_thw

    def _make_plan(self, grids: np.ndarray, home: np.ndarray, pixel_values: torch.Tensor) -> _ImagePlan:
        """Plan a new micro batch and count its cost into the step."""
        index = self._num_planned
        if index % self._num_microbatches == 0:
            self.start_step()
        self._fit_if_due(index)
        if self._split_frames:
            grids, home = _split_by_frames(grids, home)
        frame = grids[:, 1] * grids[:, 2]
        patches = grids[:, 0] * frame
        costs = self.cost_model.cost_of_sums(patches, patches * frame)
        balanced = self._planner(costs, self._num_ranks, home=home, sizes=patches, carried=self._carried)
        before = self._carried + np.bincount(home, weights=costs, minlength=self._num_ranks)
        after = self._carried + balanced.loads(costs)
        moves = moving_pays(float(before.max()), float(after.max()), self._threshold)
        target = balanced.assignment if moves else home
        route = Route.of(self._rank, self._num_ranks, home, target, patches) if moves else None
        self._num_planned += 1
        self._num_skipped += not moves
        self._carried = after if moves else before
        self.encoded_cost = float(costs[target == self._rank].sum())
        if self._fitter is not None:
            own = target == self._rank
            sums = [0, 0, patches[own].sum(), (patches * frame)[own].sum(), own.sum()]
            self._fitter.add_work(index, np.array(sums))
        row_bytes = pixel_values.shape[1] * pixel_values.element_size()
        moved = patches[home != target].sum()
        self.last_metrics = BalanceMetrics(
            step=index,
            imbalance_before=imbalance(before),
            imbalance_after=imbalance(self._carried),
            bytes_moved=int(moved) * row_bytes,
            moved_share=float(moved / patches.sum()) if len(patches) else 0.0,
            moves_skipped=self._num_skipped,
        )
        return _ImagePlan(index, grids, target, route)

    def _encode(
        self, rows: torch.Tensor, grids: np.ndarray, like: torch.Tensor, kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[int], Any]:
        """Embeddings of `rows` as a flat list, how many rows became one in each, and their nesting."""
        is_dummy = len(rows) == 0
        if is_dummy:
            # Joined to the received zero rows, so that the way back of their gradients is in the graph here
            # too.
            rows = torch.cat([rows, rows.new_zeros(self._merge_size**2, rows.shape[1])])
            grids = np.array([[1, self._merge_size, self._merge_size]])
        grid = torch.from_numpy(grids.copy()).to(device=like.device, dtype=like.dtype)
        outputs, tree = tree_flatten(self.encoder(rows, grid, **kwargs))
        merges = []
        for output in outputs:
            if len(output) == 0 or len(rows) % len(output):
                raise ValueError(
                    f"the vision encoder made {len(output)} rows of {len(rows)} patches; they cannot be told "
                    "apart by image: it has to return the same share of every image's patches"
                )
            merges.append(len(rows) // len(output))
        return [output[:0] for output in outputs] if is_dummy else outputs, merges, tree

    def _now(self) -> float:
        """Wall time, after the device has caught up while the cost model is being fitted."""
        if self._fitter is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _fit_if_due(self, index: int) -> None:
        if self._fitter is None or not self._fitter.is_due(index):
            return
        _, _, patch, patch_square, image = self._fitter.coefficients().tolist()
        if np.isfinite([patch, patch_square, image]).all() and patch + patch_square > 0:
            self.cost_model = CostModel(patch, patch_square, image)
        self._fitter = None


@dataclass(frozen=True)
class _ImagePlan:
    """Plan of a micro batch: grids [items, 3] and target rank of all ranks' items; no route when nothing moves."""

    index: int
    grids: np.ndarray
    target: np.ndarray
    route: Route | None


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the process group is initialised before a model is built"
    return world


def keep_in_graph(hidden: torch.Tensor, *embeddings: torch.Tensor) -> torch.Tensor:
    """`hidden` unchanged, with zero times the embeddings added.

    For a rank whose micro batch has no image: without it the embeddings would drop out of its graph, and the
    other ranks' backward pass would wait for this one.
    """
    for embedding in embeddings:
        hidden = hidden + embedding.sum().to(hidden.dtype) * 0
    return hidden


def _split_by_frames(grids: np.ndarray, home: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One item of one frame for each frame of a video; images are single frames already."""
    frames = grids[:, 0]
    single = np.repeat(grids, frames, axis=0)
    single[:, 0] = 1
    return single, np.repeat(home, frames)


def _drop_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """The wrapped encoder's own names in state dicts: a checkpoint fits with the balance on or off."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}encoder.")]:
        state_dict[prefix + name.removeprefix(f"{prefix}encoder.")] = state_dict.pop(name)


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}encoder.{name.removeprefix(prefix)}"] = state_dict.pop(name)
