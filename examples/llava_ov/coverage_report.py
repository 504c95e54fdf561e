"""What a run bounded by samples has covered of its data, told once at its end (`length_sort.odb_counters.Coverage`)."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from tqdm import tqdm

from aiak_ext.worker_counters import read_counters
from examples.llava_ov.samples import LlavaBatch
from length_sort.odb_counters import Coverage, coverage

COVERAGE_FILE = "coverage.json"


class CoverageReport:
    """Notes the keys of this rank's samples as they are read, and brings the ranks' notes together at the end.

    A resumed run reports on its own part: keys are not part of a checkpoint.
    """

    def __init__(self, num_workers: int) -> None:
        self._keys: set[str] = set()
        # The workers take turns, so the last batches tell of each of them once.
        self._last_counters: deque[dict[str, int]] = deque(maxlen=max(num_workers, 1))

    def watch(self, batches: Iterable[LlavaBatch]) -> Iterator[LlavaBatch]:
        """The same batches, noted. An idle batch repeats keys that were noted before, so it counts for nothing."""
        for batch in batches:
            for key in batch.__key__:
                self._keys.update(key.split(","))  # a packed sample carries the keys of its parts
            self._last_counters.append(read_counters(batch))
            yield batch

    def write(self, directory: str | Path, *, quota: int, num_emitted: int) -> Coverage:
        """Write `coverage.json` and a line in the log, on rank 0; a collective call over all ranks.

        Args:
            directory: Of the metrics.
            quota: Samples that the run was to emit, over all ranks.
            num_emitted: Samples that it emitted.
        """
        gathered: list[tuple[set[str], int]] = [(set(), 0)] * dist.get_world_size()
        dist.all_gather_object(gathered, (self._keys, self._num_left_over()))
        num_distinct = len(set().union(*(keys for keys, _ in gathered)))
        num_left_over = sum(left for _, left in gathered)
        report = coverage(quota=quota, num_emitted=num_emitted, num_distinct=num_distinct, num_left_over=num_left_over)
        if dist.get_rank() == 0:
            counts = {
                "quota": quota,
                "num_emitted": num_emitted,
                "num_distinct": num_distinct,
                "num_left_over": num_left_over,
            }
            text = json.dumps({**counts, **dataclasses.asdict(report)}, indent=2)
            (Path(directory) / COVERAGE_FILE).write_text(text + "\n", encoding="utf-8")
            tqdm.write(
                f"coverage: {num_emitted} of {quota} samples emitted, {num_distinct} of them distinct, {num_left_over} "
                f"left over (eta_quota {report.eta_quota:.4f}, eta_identity {report.eta_identity:.4f}, eta_logical "
                f"{report.eta_logical:.4f})"
            )
        return report

    def _num_left_over(self) -> int:
        """Samples that this rank's workers hold or have lost; batches they have prefetched do not count."""
        if not parallel_state.is_pipeline_first_stage():  # all stages read the same samples
            return 0
        return sum(
            counters.get(name, 0) for counters in self._last_counters for name in ("waiting_samples", "lost_samples")
        )
