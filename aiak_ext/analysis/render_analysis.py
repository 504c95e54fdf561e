"""An analysis as plain text."""

from __future__ import annotations

from aiak_ext.analysis.analyze import Analysis
from aiak_ext.analysis.distribution import describe_spread
from aiak_ext.analysis.memory import USABLE_SHARE
from aiak_ext.analysis.simulate import Result
from aiak_ext.analysis.text_table import format_table, gibibytes, percent


def render(analysis: Analysis) -> str:
    """The analysis as plain text."""
    parts = [
        _head(analysis),
        _distribution(analysis),
        _compared(analysis),
        _measured(analysis),
        _predicted(analysis),
        analysis.bottleneck() if analysis.predicted or analysis.measured else "",
        _recommended(analysis),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(analysis: Analysis) -> str:
    table, present = analysis.table, analysis.present
    pool = present.pool.pool_size if present.pool is not None else 0
    active = f"on, pools of {pool}" if pool else "off"
    return "\n".join(
        [
            f"{table.source}: {len(table)} samples",
            *table.notes,
            f"length sort: {active} ({present.num_ranks} ranks, {present.num_workers} workers per rank, micro batch "
            f"{present.micro_batch_size}, {present.num_microbatches} micro batches per step)",
        ]
    )


def _distribution(analysis: Analysis) -> str:
    lengths = analysis.lengths
    shown = {
        name: value for name, value in lengths.items() if name not in ("token_budget", "short_share", "packed_share")
    }
    lines = [
        f"length distribution (tokens): {describe_spread(lengths['cv'])}",
        format_table([{k: round(v) if k == "mean" or k[0] == "p" else v for k, v in shown.items()}]),
        f"short samples f_s = {percent(lengths['short_share'])} (below a quarter of a token budget of "
        f"{lengths['token_budget']}); packed samples {percent(lengths['packed_share'])}",
    ]
    if analysis.vision is not None:
        vision = analysis.vision
        lines.append(
            f"vision: {percent(vision['image_sample_share'])} of the samples have patches, "
            f"{vision['mean_patches']:.0f} on average (CV {vision['cv']:.2f}, p95 {vision['p95']:.0f}, "
            f"most {vision['max']})"
        )
    cost = analysis.cost
    lines.append(
        f"compute: vision {percent(cost['vision_share'])}, language {percent(cost['language_share'])}; "
        f"CV {cost['cv']:.2f}, the heaviest sample costs {cost['heaviest_over_mean']:.1f} times the mean"
    )
    size = gibibytes(1024 * analysis.table.estimated_bytes_per_sample())
    encode = analysis.table.encode_s
    lines.append(
        f"memory: 1,024 encoded samples take {size}"
        + (f"; a sample takes {1e3 * encode:.2f} ms to read and encode" if encode is not None else "")
    )
    return "\n".join(lines)


def _compared(analysis: Analysis) -> str:
    if not analysis.comparisons:
        return ""
    lines = ["do all ranks see the same length distribution?"]
    for comparison in analysis.comparisons:
        lines.append(comparison.describe())
        lines += [
            f"  {comparison.kind} {one.name}: mean {one.mean_tokens:.0f} tokens of {one.num_samples} samples, D = "
            f"{one.distance:.3f}, p = {one.p_value:.3g}"
            for one in comparison.outliers[:10]
        ]
    if any(comparison.kind == "rank" and not comparison.same for comparison in analysis.comparisons):
        lines.append(
            "Sorted pools align ranks only as far as their distributions agree: shuffle the samples over the shards. "
            "The predictions below assume that they do."
        )
    return "\n".join(lines)


def _measured(analysis: Analysis) -> str:
    return "" if analysis.measured is None else "measured in the run\n" + format_table([analysis.measured])


def _predicted(analysis: Analysis) -> str:
    if not analysis.predicted:
        return ""
    now = analysis.predicted[0].figures.useful
    rows = [
        {
            "lever": "present" if index == 0 else result.setting.lever,
            "detail": result.setting.detail,
            "waiting": percent(result.figures.waiting),
            "padding": percent(result.figures.padding),
            "useful": percent(result.figures.useful),
            "gain": result.figures.useful / now,
            "samples/step": round(result.figures.samples_per_step),
            "step CV": result.figures.step_cv,
            "bytes moved": None if result.moved_share is None else percent(result.moved_share),
            "memory": _marked(result, analysis.device_bytes),
        }
        for index, result in enumerate(analysis.predicted)
    ]
    return (
        "predicted (waiting, padding and useful are shares of compute time, of tokens, and of both together)\n"
        + format_table(rows)
    )


def _marked(result: Result, device_bytes: float) -> str:
    over = " over" if result.figures.peak_bytes > USABLE_SHARE * device_bytes else ""
    return gibibytes(result.figures.peak_bytes) + over


def _recommended(analysis: Analysis) -> str:
    lines = [f"{one.setting} {one.value}\n    {one.reason}" for one in analysis.recommendations]
    return "\n".join(["recommended", *lines]) if lines else ""
