"""The optimizer's part of a checkpoint, that of Megatron's distributed optimizer included.

Megatron core restores a distributed optimizer whose inner one is Transformer Engine's or Apex's. Around torch's Adam it
has no state to load into, stumbles over Adam's `step`, and fails where a pipeline stage trains nothing; the two
functions here make up for that.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

# Whole parameters, whichever ranks hold their shards. Megatron's default is a format that its checkpoints refuse.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_optimizer_state(
    optimizer: MegatronOptimizer, model_state: dict[str, Any], *, is_loading: bool
) -> dict[Any, Any]:
    """What `dist_checkpointing` saves of the optimizer, or fills when `is_loading`.

    Args:
        model_state: Sharded state of the model's weights.
    """
    if _trains_nothing(optimizer):
        return {}
    if is_loading:
        for part in _parts(optimizer):
            if isinstance(part, DistributedOptimizer):
                _allocate(part.optimizer)
    return optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_METADATA)


def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Restore what `dist_checkpointing.load` made of `sharded_optimizer_state`."""
    if _trains_nothing(optimizer):
        return
    parts = _parts(optimizer)
    states = [state] if len(parts) == 1 else [state[i] for i in range(len(parts))]
    param_states = [part_state.pop("param_state", None) for part_state in states]
    optimizer.load_state_dict(state)  # all but the tensors of a distributed optimizer
    for part, param_state in zip(parts, param_states):
        if isinstance(part, DistributedOptimizer):
            _load_tensors(part, param_state)


def _load_tensors(part: DistributedOptimizer, param_state: dict[int, Any]) -> None:
    # Megatron looks for a saved `step` beside the tensors of torch's Adam, and has just given all parameters one tensor
    # to count their steps in, which would then count each step once per parameter.
    states = [state for state in part.optimizer.state.values() if "step" in state]
    steps = [state.pop("step").clone() for state in states]
    part.load_parameter_state_from_fully_reshardable(param_state)
    for state, step in zip(states, steps):
        state["step"] = step


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _trains_nothing(optimizer: MegatronOptimizer) -> bool:
    """Whether this is a distributed optimizer of a pipeline stage without trained weights, as in adapter training."""
    return all(
        isinstance(part, DistributedOptimizer) and (part.is_stub_optimizer or not part.buffers)
        for part in _parts(optimizer)
    )


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of an optimizer that has not taken a step yet; what the step changes is loaded afterwards."""
    if isinstance(optimizer, torch.optim.Adam) and not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
