"""The saved state of ODBGroupDataset: plain builtins, with a restore key and a few integers per waiting sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from length_sort.pool_buffer import PooledSample
from length_sort.rounds import Candidate, RankRounds


def _saved(candidate: Candidate) -> tuple[Any, int, int, int, float, int]:
    return (
        candidate.payload.restore_key,
        candidate.length,
        candidate.loss_tokens,
        candidate.patches,
        candidate.cost,
        candidate.deferrals,
    )


def _restored(saved: tuple[Any, int, int, int, float, int]) -> Candidate:
    key, length, loss_tokens, patches, cost, deferrals = saved
    return Candidate(length, loss_tokens, patches, cost, deferrals, payload=PooledSample(key, length))


def save_rounds(rounds: RankRounds) -> dict[str, Any]:
    """Where a rank stands, as builtins; the payloads of its candidates are pooled samples."""
    return {
        "round": rounds.round,
        "epoch": rounds.epoch,
        "position": rounds.position,
        "buffer": [_saved(candidate) for candidate in rounds.buffer],
        "groups": [[_saved(candidate) for candidate in group] for group in rounds.groups],
        "totals": list(rounds.totals),
    }


def restore_rounds(rounds: RankRounds, state: Mapping[str, Any]) -> None:
    """The inverse of `save_rounds`; no sample is encoded yet."""
    rounds.round, rounds.epoch, rounds.position = state["round"], state["epoch"], state["position"]
    rounds.buffer = [_restored(saved) for saved in state["buffer"]]
    rounds.groups = [[_restored(saved) for saved in group] for group in state["groups"]]
    rounds.totals = list(state["totals"])


def check_same(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError naming what differs between a state's settings and this run's."""
    differing = [
        f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]
    if differing:
        raise ValueError(
            f"The saved ODB state does not fit this run ({'; '.join(differing)}). Its rounds would not match those of "
            "the other ranks, and samples would be repeated or lost. Resume with the settings it was saved under "
            "(`energon checkpoint redist` does not support ODB), or start the data over with --restart-data."
        )
