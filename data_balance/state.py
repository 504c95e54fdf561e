"""Save and restore: the loader's state, with what the balance adds only when there is something to add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_balance.cost import SampleCostModel
from data_balance.fit import from_coefficients, to_coefficients

_MARK = "data_balance"


@dataclass(frozen=True)
class BalanceState:
    """A position in the balanced stream.

    Attributes:
        loader: the loader's state from before the step was pulled; None is the loader as it was built.
        consumed: micro batches of that step that were handed out already.
        cost_model: the fitted cost model, if any.
    """

    loader: Any
    consumed: int = 0
    cost_model: SampleCostModel | None = None

    def to_builtins(self) -> Any:
        """The loader's own state where that says everything, so that it restores without the balance too."""
        if self.consumed == 0 and self.cost_model is None:
            return self.loader
        coefficients = None if self.cost_model is None else to_coefficients(self.cost_model).tolist()
        return {_MARK: {"consumed": self.consumed, "coefficients": coefficients}, "loader": self.loader}

    @classmethod
    def from_builtins(cls, state: Any) -> BalanceState:
        """Read either form."""
        if not (isinstance(state, dict) and _MARK in state):
            return cls(state)
        own = state[_MARK]
        fitted = own["coefficients"]
        return cls(state["loader"], own["consumed"], None if fitted is None else from_coefficients(np.array(fitted)))


def loader_state(state: Any) -> Any:
    """The loader's part of a saved state, for restoring into a loader without the balance."""
    return BalanceState.from_builtins(state).loader


def save_loader(loader: Any) -> Any:
    """State of a loader that has `save_state` (ours, Megatron's wrapper) or `save_state_rank` (Energon's).

    Raises:
        ValueError: it has neither.
    """
    save = getattr(loader, "save_state", None) or getattr(loader, "save_state_rank", None)
    if save is None:
        raise ValueError(
            f"the data iterator is a {type(loader).__name__} without save_state, so its position cannot be "
            "saved; give the savable loader itself instead of an iterator over it"
        )
    return save()


def restore_loader(loader: Any, state: Any) -> None:
    """Restore a loader with `restore_state` or `restore_state_rank`; None leaves it as it was built."""
    if state is None:
        return
    restore = getattr(loader, "restore_state", None) or getattr(loader, "restore_state_rank", None)
    if restore is None:
        raise ValueError(
            f"the data iterator is a {type(loader).__name__} without restore_state, so a saved position "
            "cannot be restored; give the savable loader itself"
        )
    restore(state)


def can_save(loader: Any) -> bool:
    """Whether `save_loader` would find a method."""
    return hasattr(loader, "save_state") or hasattr(loader, "save_state_rank")
