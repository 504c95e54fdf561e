"""One worker's rounds carried out over a channel, with the memory that makes them exact across a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from length_sort.coordinator import Coordinator
from length_sort.rounds import RankRounds, decide_round, decide_totals
from length_sort.store_channel import Channel


class RoundAgreement:
    """Agrees on the rounds of one worker slot and remembers the outcomes of the last ones.

    Energon snapshots each worker on its own clock, so after a restore the ranks can stand in different rounds. An
    outcome is small and the same on all ranks: every state holds the last ones, a restored worker makes them known
    before anything else, and ranks that stand behind find their answers there. How far back is needed travels with
    the reports: the oldest round in which a rank has saved a state that a checkpoint may still hold.
    """

    def __init__(self, coordinator: Coordinator, *, num_snapshots: int) -> None:
        """
        Args:
            coordinator: Opens the channel to the other ranks.
            num_snapshots: Last saved states of a worker that a checkpoint may hold, at least Energon's
                ``n_checkpoints``.
        """
        self._coordinator = coordinator
        self.num_snapshots = num_snapshots
        self._session = 0
        self._channel: Channel | None = None
        self.reset(0)

    def reset(self, round_index: int) -> None:
        """Start over, or from a restored state, in this round; a new channel is opened when needed."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._outcomes: dict[int, tuple[list[int], list[int]]] = {}
        self._snapshot_rounds: deque[int] = deque([round_index], maxlen=self.num_snapshots + 1)

    def note_snapshot(self, round_index: int) -> None:
        """A state was saved in this round."""
        self._snapshot_rounds.append(round_index)

    def connect(self, slot: int, settings: Mapping[str, Any]) -> None:
        """Open the channel unless it is open: publish restored outcomes, compare settings with the other ranks."""
        if self._channel is not None:
            return
        self._session += 1
        self._channel = self._coordinator.open(slot, self._session)
        for round_index, (decision, totals) in self._outcomes.items():
            self._channel.publish(f"{round_index}", decision)
            self._channel.publish(f"{round_index} totals", totals)
        self._channel.start(settings)

    def progress(self) -> None:
        """The worker has got on with producing a batch."""
        if self._channel is not None:
            self._channel.progress()

    def rest(self) -> None:
        """The worker waits for its training process."""
        if self._channel is not None:
            self._channel.rest()

    def agree(self, rounds: RankRounds) -> bool:
        """One round, up to the point where its groups can be emitted. False when it ends the stream."""
        assert self._channel is not None
        index = rounds.round
        report = rounds.propose(oldest_round=min(self._snapshot_rounds))
        decision = self._channel.agree(f"{index}", report, lambda reports: decide_round(reports, rounds.rules))
        num_groups, oldest_needed = decision
        totals: list[int] = []
        if num_groups > 0:
            figures = rounds.settle(num_groups)
            if self._coordinator.synchronized:
                totals = self._channel.agree(f"{index} totals", figures, decide_totals)
            rounds.begin_emission(totals)
        if self._coordinator.synchronized and self._coordinator.world_size > 1:
            self._outcomes[index] = (decision, totals)
            self._outcomes = {i: outcome for i, outcome in self._outcomes.items() if i >= oldest_needed}
        return num_groups > 0

    @property
    def num_outcomes(self) -> int:
        return len(self._outcomes)

    def save_outcomes(self) -> list[tuple[int, list[int], list[int]]]:
        return [(index, list(decision), list(totals)) for index, (decision, totals) in self._outcomes.items()]

    def restore_outcomes(self, state: Iterable[tuple[int, list[int], list[int]]]) -> None:
        self._outcomes = {index: (list(decision), list(totals)) for index, decision, totals in state}
