"""Checks a run's arguments before the run: each check gives findings with a remedy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.energon.task_encoder.base import DefaultTaskEncoder, get_stateless

from aiak_ext.analysis.check_settings import check_settings, split_remedy
from aiak_ext.analysis.findings import Finding, error, ok, warning
from aiak_ext.analysis.store_check import check_store
from aiak_ext.analysis.text_table import gibibytes
from aiak_ext.config import ExtensionConfig
from data_balance import ModelConfig
from length_sort.odb_dataset import DEFAULT_MAX_BUFFER_BYTES

#: Pool in micro batches below which the ranks' quantiles are too coarse (seed 000: ten to a hundred times).
SMALL_POOL = 10
#: Share of the host's memory that pools may take.
POOL_MEMORY_SHARE = 0.5
#: Hooks between reading and the wrapper: a sample can be restored only when all of them are marked.
_HOOKS = ("encode_sample", "preencode_sample", "pack_selected_samples", "postencode_sample")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the checks know beside the run's arguments; None where it is not known."""

    num_ranks: int | None = None
    """Data-parallel ranks."""
    ranks_per_node: int = 8
    task_encoder: Any = None
    bytes_per_sample: float | None = None
    """Of an encoded sample."""
    num_samples: int | None = None
    """Samples in the data set."""
    host_bytes: float | None = None
    """Memory of a node; this machine's where it is None."""
    store: str | None = None
    """HOST[:PORT] of DP rank 0, to test whether it can be reached from here."""


def diagnose(args: argparse.Namespace, facts: RunFacts) -> list[Finding]:
    """All findings for a run with these arguments.

    Args:
        args: As `run_settings` reads them: the levers' flags, and Megatron's where the run sets them.
        facts: What is known of machine and data.
    """
    findings, config = check_settings(args)
    if config is None:
        return findings
    checks: list[Callable[[argparse.Namespace, ExtensionConfig, RunFacts], list[Finding]]] = [
        check_levers,
        check_pool_and_batch,
        check_workers,
        check_variable_lengths,
        check_encoder_ranks,
        check_stateless,
        check_pool_memory,
    ]
    for check in checks:
        findings += check(args, config, facts)
    if config.odb.active and config.odb.sync == "store":
        findings += check_store(facts.store)
    return findings


def check_levers(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Which levers are on."""
    active = {
        f"length sort (pools of {config.length_sort.pool_size})": config.length_sort.active,
        f"ODB (budget {config.odb.token_budget})": config.odb.active,
        f"data balance ({config.data_balance.scope})": config.data_balance.active,
    }
    names = [name for name, is_on in active.items() if is_on]
    if names:
        return [ok("levers", "on: " + ", ".join(names))]
    return [
        warning(
            "levers",
            "all are off, so the run is plain Energon",
            "set --length-sort-pool-size, --odb-token-budget or --use-data-balance; `aiak-ext analyze` says which",
        )
    ]


def check_pool_and_batch(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether a pool is much larger than what it is cut into."""
    sort, size = config.length_sort, config.micro_batch_size
    if not sort.active:
        return []
    ratio = sort.pool_size / size
    if sort.pool_size != args.length_sort_pool_size:
        return [
            warning(
                "pool and batch",
                f"a pool of {args.length_sort_pool_size} is no multiple of the shuffle block {sort.shuffle_block} and "
                f"is rounded up to {sort.pool_size}",
                f"set --length-sort-pool-size {sort.pool_size}",
            )
        ]
    if ratio < SMALL_POOL:
        return [
            warning(
                "pool and batch",
                f"a pool of {sort.pool_size} is {ratio:.1f} micro batches of {size}: the ranks' quantiles are coarse, "
                "and lengths agree badly across ranks",
                f"raise --length-sort-pool-size to {100 * size} or more (100 micro batches)",
            )
        ]
    if sort.shuffle_block != size:
        return [
            warning(
                "pool and batch",
                f"the shuffle block is {sort.shuffle_block} and the micro batch {size}: micro batches mix lengths",
                "leave --length-sort-shuffle-block out, or set it to the micro batch size",
            )
        ]
    return [ok("pool and batch", f"a pool is {ratio:.0f} micro batches")]


def check_workers(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether there are workers, and data for each of them."""
    if not (config.length_sort.active or config.odb.active):
        return []
    workers = getattr(args, "num_workers", None)
    if workers is None:
        workers = 2  # Megatron's default
    if workers == 0:
        return [
            warning(
                "workers",
                "--num-workers 0 encodes in the training process: every step waits for its samples",
                "give at least 1",
            )
        ]
    size = config.length_sort.pool_size or config.odb.buffer_size
    if facts.num_ranks is not None and facts.num_samples is not None:
        share = facts.num_samples / (facts.num_ranks * workers)
        what = f"{facts.num_samples} samples over {facts.num_ranks} ranks x {workers} workers are {share:.0f} each"
        if share < 1:
            return [error("workers", f"{what}: some have no data at all", "use fewer workers, or more data")]
        if share < size:
            return [
                warning(
                    "workers",
                    f"{what}, less than the {size} that a worker collects: it holds samples of several passes at once",
                    f"use fewer workers, or collect at most {int(share)}",
                )
            ]
        return [ok("workers", what)]
    return [ok("workers", f"{workers} per rank")]


def check_variable_lengths(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether pipeline stages tell each other the shapes of micro batches."""
    stages = getattr(args, "pipeline_model_parallel_size", None) or 1
    by_length = (
        config.length_sort.active
        or config.odb.active
        or (config.data_balance.active and config.data_balance.scope == "step")
    )
    if stages == 1 or not by_length:
        return []
    given = getattr(args, "variable_seq_lengths", None)
    if given:
        return [ok("variable_seq_lengths", f"on, with {stages} pipeline stages")]
    call = "call aiak_ext.apply_to_megatron_args after Megatron's validate_args, which sets it"
    if given is False:
        return [
            error(
                "variable_seq_lengths",
                f"off, with {stages} pipeline stages and micro batches of different lengths: the stages wait for each "
                "other for ever",
                call,
            )
        ]
    return [
        warning(
            "variable_seq_lengths",
            f"not in these arguments, with {stages} pipeline stages: Megatron has no flag for it and switches it off",
            f"{call}, and check the model config",
        )
    ]


def check_encoder_ranks(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether data balance has ranks to balance between."""
    if not config.data_balance.active:
        return []
    model_parallel = encoder_ranks = _model_parallel_size(args)
    if config.data_balance.model_config is not None:
        try:
            encoder_ranks = ModelConfig.from_json(config.data_balance.model_config).encoder_ranks
        except ValueError as problem:
            return [error("encoder ranks", *split_remedy(str(problem)))]
    ranks = _data_parallel_ranks(args, facts)
    if ranks is None:
        return [
            warning(
                "encoder ranks",
                "the number of data-parallel ranks is unknown, so it is open whether there is anything to balance",
                "give --ranks, or world-size in the arguments",
            )
        ]
    encoder_dp = ranks * model_parallel / encoder_ranks
    if encoder_dp == 1:
        return [
            error(
                "encoder ranks",
                f"the image encoder's data-parallel size is 1 ({ranks * model_parallel} ranks, {encoder_ranks} per "
                "encoder): there is nothing to balance",
                "leave --use-data-balance out, or give the encoder smaller parallel sizes",
            )
        ]
    if encoder_ranks != model_parallel:
        return [
            error(
                "encoder ranks",
                f"an image encoder takes {encoder_ranks} ranks by the model config and a replica {model_parallel}: "
                "samples would go to ranks that do not read them",
                "make tp, pp and cp of image_encoder those of the run",
            )
        ]
    return [ok("encoder ranks", f"the image encoder's data-parallel size is {encoder_dp:.0f}")]


def check_stateless(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether pooled samples can be restored one by one."""
    encoder = facts.task_encoder
    if encoder is None or not (config.length_sort.active or config.odb.active):
        return []
    unmarked = [name for name in _HOOKS if _is_own(encoder, name) and not get_stateless(getattr(encoder, name))]
    if not unmarked:
        return [ok("@stateless", f"{type(encoder).__name__} marks its hooks, so a run resumes exactly")]
    hooks = ", ".join(unmarked)
    message = f"{hooks} of {type(encoder).__name__} is not marked, so samples in a pool cannot be restored"
    remedy = f"put @stateless from megatron.energon before {hooks}"
    if config.length_sort.active and config.length_sort.allow_inexact_resume:
        return [warning("@stateless", f"{message}; --length-sort-allow-inexact-resume loses them on a resume", remedy)]
    return [error("@stateless", f"{message}: building the dataset fails", remedy)]


def check_pool_memory(args: argparse.Namespace, config: ExtensionConfig, facts: RunFacts) -> list[Finding]:
    """Whether the pools of a node's workers fit its memory."""
    sort = config.length_sort
    size = sort.pool_size if sort.active else config.odb.buffer_size if config.odb.active else 0
    if not size:
        return []
    workers = max(getattr(args, "num_workers", None) or 2, 1)
    # Beyond the limit a worker keeps a sample's length only, and encodes it again at its turn.
    limit = sort.max_pool_bytes if sort.active else DEFAULT_MAX_BUFFER_BYTES
    per_worker = float(limit)
    if facts.bytes_per_sample is not None:
        per_worker = min(size * facts.bytes_per_sample, limit)
    total = per_worker * workers * facts.ranks_per_node
    host = facts.host_bytes if facts.host_bytes is not None else physical_memory_bytes()
    bound = "at most " if facts.bytes_per_sample is None else ""
    what = (
        f"{bound}{gibibytes(total)} on a node of {gibibytes(host)}: {facts.ranks_per_node} ranks x {workers} workers x "
        f"{bound}{gibibytes(per_worker)}"
    )
    if total <= POOL_MEMORY_SHARE * host:
        return [ok("pool memory", what)]
    fitting = int(POOL_MEMORY_SHARE * host / (workers * facts.ranks_per_node))
    remedy = (
        f"set --length-sort-max-pool-bytes {fitting} (the rest is encoded again), or use fewer workers"
        if sort.active
        else "lower --odb-buffer-size, or use fewer workers"
    )
    finding = error if total > host and facts.bytes_per_sample is not None else warning
    return [finding("pool memory", what, remedy)]


def physical_memory_bytes() -> float:
    """Memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _model_parallel_size(args: argparse.Namespace) -> int:
    size = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size *= getattr(args, name, None) or 1
    return size


def _data_parallel_ranks(args: argparse.Namespace, facts: RunFacts) -> int | None:
    if facts.num_ranks is not None:
        return facts.num_ranks
    world_size = getattr(args, "world_size", None)
    return None if world_size is None else world_size // _model_parallel_size(args)


def _is_own(encoder: Any, name: str) -> bool:
    """Whether the task encoder overrides a hook of Energon's default."""
    own = getattr(type(encoder), name, None)
    return own is not None and own is not getattr(DefaultTaskEncoder, name, None)
