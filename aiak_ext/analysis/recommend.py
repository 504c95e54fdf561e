"""Recommended settings, each with the reason in a sentence; the numbers come from simulated steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aiak_ext.analysis.memory import USABLE_SHARE, MemoryModel
from aiak_ext.analysis.samples import SampleTable
from aiak_ext.analysis.simulate import Result, Setting, pool_rule
from aiak_ext.analysis.streams import ReadStreams
from aiak_ext.analysis.text_table import gibibytes, percent
from aiak_ext.lever_configs import LengthSortConfig, round_up
from length_sort.odb_dataset import DEFAULT_MAX_BUFFER_BYTES
from length_sort.rounds import RoundRules

Simulate = Callable[[Setting], Result]

POOL_SIZES = (128, 256, 512, 1024, 2048, 4096)
#: Share of the gain of the largest pool that a smaller one must reach to be preferred.
ENOUGH_GAIN = 0.95
BUFFER_SIZES = (256, 512, 1024, 2048)
#: Loss of useful time that a smaller buffer may cost.
BUFFER_LOSS = 0.01
#: The buffer is chosen with at most so many ranks: its effect is the same with more, and rounds take long then.
BUFFER_RANKS = 64
#: Gain in useful time below which a lever is not worth its risk.
WORTHWHILE = 0.02
_BUDGET_STEP = 256


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A setting and why."""

    setting: str
    """The flag."""
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules know beside the simulation."""

    table: SampleTable
    present: Setting
    """The run's geometry without levers."""
    memory: MemoryModel
    device_bytes: float
    step_time_s: float | None = None
    """Seconds of a step, where known."""
    as_read: bool = False
    """Whether the streams are simulated as they were read; pools are then no longer than they are."""


def recommend_pool(facts: Facts, simulate: Simulate) -> tuple[Recommendation, Result]:
    """The smallest pool that reaches nearly all of the largest one's gain, and what it achieves."""
    present = facts.present
    block = present.micro_batch_size
    sizes = [size for size in POOL_SIZES if size <= _longest_pool(facts)] or [_longest_pool(facts)]
    sizes = sorted({round_up(max(size, 2 * block), block) for size in sizes})
    results = [simulate(replace(present, pool=pool_rule(size, block))) for size in sizes]
    without = simulate(present).figures.useful
    most = max(result.figures.useful for result in results)
    enough = without + ENOUGH_GAIN * (most - without)
    chosen = next(result for result in results if result.figures.useful >= enough)
    assert chosen.setting.pool is not None
    size = chosen.setting.pool.pool_size
    price = _pool_price(facts, size, LengthSortConfig.max_pool_bytes, " (--length-sort-max-pool-bytes)")
    reason = (
        f"raises useful time from {percent(without)} to {percent(chosen.figures.useful)}, of {percent(most)} with the "
        f"largest pool tried ({sizes[-1]}); it is {size // block} micro batches. {price}"
    )
    return Recommendation(setting="--length-sort-pool-size", value=size, reason=reason), chosen


def recommend_block(facts: Facts, pooled: Result, simulate: Simulate) -> Recommendation:
    """The micro batch size, with the padding that a per-sample shuffle would leave."""
    block = facts.present.micro_batch_size
    if block == 1:
        reason = "a micro batch holds one sample, so there is nothing to pad"
    else:
        assert pooled.setting.pool is not None
        single = simulate(replace(facts.present, pool=pool_rule(pooled.setting.pool.pool_size, 1)))
        reason = (
            f"neighbours in length share a micro batch: padding is {percent(pooled.figures.padding)} instead of "
            f"{percent(single.figures.padding)} with a shuffle of single samples"
        )
    return Recommendation(setting="--length-sort-shuffle-block", value=block, reason=reason)


def recommend_order(results: list[Result]) -> Recommendation | None:
    """Length or compute cost as what pools sort and groups are matched by; None where they are the same."""
    shares, worth = [], []
    for costly in results:
        if costly.setting.order_by != "cost":
            continue
        plain = next(one for one in results if one.setting == replace(costly.setting, order_by="length"))
        name, before, after = costly.setting.lever, plain.figures.useful, costly.figures.useful
        shares.append(f"{name} has {percent(before)} useful time by length and {percent(after)} by cost")
        if after - before >= WORTHWHILE:
            worth.append(name)
    if not shares:
        return None
    reason = "; ".join(shares)
    if worth:
        reason += "; samples of one length cost differently: give the mixin a length_fn (length sort) or cost_fn (ODB)"
    value = f"compute cost for {', '.join(worth)}" if worth else "length, the default"
    return Recommendation(setting="order by", value=value, reason=reason)


def recommend_budget(facts: Facts) -> Recommendation:
    """A budget that holds what a micro batch holds now and the longest sample, as far as memory allows."""
    table, size = facts.table, facts.present.micro_batch_size
    longest, mean = int(table.num_tokens.max()), float(table.num_tokens.mean())
    wanted = round_up(max(math.ceil(size * mean), longest), _BUDGET_STEP)
    patches_per_token = float(table.num_patches.sum() / table.num_tokens.sum())
    fitting = facts.memory.largest_token_budget(facts.device_bytes, patches_per_token)
    why = f"holds the longest sample ({longest} tokens) and an average micro batch of {size} ({size * mean:.0f})"
    if fitting == 0:
        value, why = (
            wanted,
            why + ("; the model's state alone does not fit the device by the memory model, so give its parallel sizes"),
        )
    elif fitting < wanted:
        value = max(fitting // _BUDGET_STEP * _BUDGET_STEP, _BUDGET_STEP)
        why = f"is the most that fits {gibibytes(facts.device_bytes)} by the memory model; {wanted} tokens would not"
        if value < longest:
            why += f", and neither does the longest sample ({longest} tokens): cut it or recompute activations"
    else:
        value = wanted
        why += f"; up to {fitting} tokens fit {gibibytes(facts.device_bytes)} by the memory model"
    why += f". A group then holds about {value / mean:.1f} samples: scale accumulation by {size * mean / value:.2f}"
    return Recommendation(setting="--odb-token-budget", value=value, reason=why)


def recommend_patches(facts: Facts, token_budget: int) -> Recommendation | None:
    """A limit of vision patches per group, where a group within the budget could hold more than memory allows."""
    table, memory = facts.table, facts.memory
    room = USABLE_SHARE * facts.device_bytes - memory.step_bytes(token_budget, 0)
    per_patch = float(memory.activation_bytes(0, 1))
    possible = int(token_budget * (table.num_patches / table.num_tokens).max())
    if per_patch == 0 or possible * per_patch <= room:
        return None
    # Below the largest sample the limit would only make it a group of its own, which it fits no better.
    value = max(int(room / per_patch), int(table.num_patches.max()))
    reason = (
        f"a group of {token_budget} tokens could hold {possible} patches; beside its tokens "
        f"{int(max(room, 0) / per_patch)} fit {gibibytes(facts.device_bytes)} by the memory model; the largest sample "
        f"has {table.num_patches.max()}"
    )
    return Recommendation(setting="--odb-max-patches", value=value, reason=reason)


def recommend_buffer(facts: Facts, rules: RoundRules, simulate: Simulate) -> Recommendation:
    """The smallest buffer that loses nearly nothing against the largest."""
    ranks = min(facts.present.num_ranks, BUFFER_RANKS)
    sizes = [size for size in BUFFER_SIZES if size <= _longest_pool(facts)] or [_longest_pool(facts)]
    useful = {}
    for size in sizes:
        odb = replace(rules, buffer_size=size)
        useful[size] = simulate(replace(facts.present, num_ranks=ranks, odb=odb)).figures.useful
    best = max(useful.values())
    value = next(size for size, share in useful.items() if share >= best - BUFFER_LOSS)
    price = _pool_price(facts, value, DEFAULT_MAX_BUFFER_BYTES, "")
    reason = (
        f"useful time is {percent(useful[value])} with {ranks} ranks, of {percent(best)} with the best buffer tried "
        f"({', '.join(map(str, sizes))}). {price}"
    )
    return Recommendation(setting="--odb-buffer-size", value=value, reason=reason)


def recommend_workers(facts: Facts) -> Recommendation:
    """As many workers as keep up with the step, where encode and step times are known."""
    present, encode_s = facts.present, facts.table.encode_s
    per_step = present.micro_batch_size * present.num_microbatches
    keep = "every worker keeps a pool of its own, so more of them do not dilute the ranks' alignment"
    if encode_s is None:
        reason = f"encode time is unknown: analyze the dataset with --task-encoder to have it measured; {keep}"
        return Recommendation(setting="--num-workers", value=present.num_workers, reason=reason)
    if facts.step_time_s is None:
        reason = (
            f"a worker encodes a step's {per_step} samples in {encode_s * per_step:.3g} s, so {present.num_workers} "
            f"keep up with steps of {encode_s * per_step / present.num_workers:.3g} s or more (--step-time); {keep}"
        )
        return Recommendation(setting="--num-workers", value=present.num_workers, reason=reason)
    # A quarter more than needed: a shard that is slow to open must not stop the step.
    needed = max(math.ceil(1.25 * encode_s * per_step / facts.step_time_s), 1)
    reason = (
        f"a step takes {facts.step_time_s:.3g} s and a worker {encode_s * per_step:.3g} s to encode its {per_step} "
        f"samples, with a quarter to spare; {keep}"
    )
    return Recommendation(setting="--num-workers", value=needed, reason=reason)


def recommend_lever(facts: Facts, present: Result, results: list[Result]) -> Recommendation:
    """The lever with the most useful time among those whose steps fit the device, and what it asks for."""
    fitting = [one for one in results if facts.memory.fits(one.figures.peak_bytes, facts.device_bytes)]
    best = max(fitting or results, key=lambda result: result.figures.useful)
    before, after = present.figures.useful, best.figures.useful
    if after - before < WORTHWHILE:
        reason = (
            f"useful time is {percent(before)} now and no lever simulated brings it above {percent(after)}: the "
            "lengths leave little to gain"
        )
        return Recommendation(setting="lever", value="none", reason=reason)
    conditions = {
        "odb": "groups differ in samples, which needs --calculate-per-token-loss and schedules by iterations",
        "balance_step": "samples change ranks, which needs --calculate-per-token-loss",
        "balance_encoder": "images travel inside the forward, exact with every loss",
        "length_sort": "no communication and no condition on the loss",
    }
    needs = "; ".join(text for name, text in conditions.items() if name in best.setting.lever.split("+"))
    if best.setting.odb is not None and best.setting.odb.policy == "packed":
        needs += "; the model must take packed sequences (cu_seqlens)"
    reason = (
        f"useful time rises from {percent(before)} to {percent(after)}, {after / before:.2f} times the throughput in "
        f"tokens; {needs}"
    )
    if not fitting:
        reason += "; no setting fits the device by the memory model"
    return Recommendation(setting="lever", value=f"{best.setting.lever} ({best.setting.detail})", reason=reason)


def recommend_scope(present: Result, results: list[Result], vision_share: float) -> Recommendation | None:
    """Step or encoder scope of data balance, or neither; None where neither was simulated."""
    scopes = {
        result.setting.balance.scope: result.figures.useful
        for result in results
        if result.setting.balance is not None and result.setting.lever in ("balance_step", "balance_encoder")
    }
    if not scopes:
        return None
    best = max(scopes, key=scopes.__getitem__)
    shares = ", ".join(f"{scope} scope {percent(useful)}" for scope, useful in scopes.items())
    reason = f"useful time is {percent(present.figures.useful)} now; {shares}"
    if scopes[best] - present.figures.useful < WORTHWHILE:
        reason += ": with few samples per rank and step there is little to move"
        return Recommendation(setting="--data-balance-scope", value="none", reason=reason)
    reason += (
        f"; the vision encoder has {percent(vision_share)} of the compute, which is all that the encoder scope can "
        "even out, and the step scope needs --calculate-per-token-loss"
    )
    return Recommendation(setting="--data-balance-scope", value=best, reason=reason)


def _longest_pool(facts: Facts) -> int:
    """Samples that a pool can usefully hold: what its worker reads in an epoch, or in the streams simulated."""
    present, population = facts.present, facts.table.population
    if facts.as_read:
        return ReadStreams(facts.table, present.num_ranks, present.num_workers).shortest()
    if population is None:
        return POOL_SIZES[-1]
    return max(population // (present.num_ranks * present.num_workers), 1)


def _pool_price(facts: Facts, size: int, limit: int, flag: str) -> str:
    """Memory per worker, of which `limit` bytes are kept as samples, and delay of the first batch, as sentences."""
    num_bytes = size * facts.table.estimated_bytes_per_sample()
    memory = f"It holds {gibibytes(num_bytes)} per worker"
    if num_bytes > limit:
        memory += f", of which {gibibytes(limit)} are kept{flag} and the rest is encoded again"
    encode_s = facts.table.encode_s
    delay = f"{size} encodes" if encode_s is None else f"{size} encodes, {size * encode_s:.3g} s"
    return f"{memory}; the first batch waits for {delay}."
