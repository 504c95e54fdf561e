"""`aiak-ext analyze`: what a dataset's lengths do to a run, and which setting to choose."""

from __future__ import annotations

import json
from typing import Any

import click
from tqdm import tqdm

from aiak_ext.analysis.analyze import analyze
from aiak_ext.analysis.commands.options import POSITIVE, Model, model_options, user_errors
from aiak_ext.analysis.commands.samples_input import SamplesInput, input_options
from aiak_ext.analysis.render_analysis import render
from aiak_ext.analysis.simulate import Setting, pool_rule


@click.command("analyze")
@input_options
@click.option("--ranks", type=click.IntRange(min=2), default=8, show_default=True, help="Data-parallel ranks.")
@click.option("--workers", type=POSITIVE, default=2, show_default=True, help="Data workers per rank.")
@click.option("--micro-batch", type=POSITIVE, default=1, show_default=True, help="Samples per micro batch.")
@click.option("--accumulation", type=POSITIVE, default=1, show_default=True, help="Micro batches per step and rank.")
@click.option("--micro-batch-sync", is_flag=True, help="Ranks meet at every micro batch (expert parallelism, FSDP).")
@click.option("--pool-size", type=click.IntRange(min=0), default=0, show_default=True, help="Present length sort pool.")
@click.option("--step-time", type=float, help="Seconds of a step, to tell how many workers keep up.")
@click.option("--steps", type=POSITIVE, help="Steps to simulate per setting.  [default: by ranks and lever]")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@user_errors
def analyze_command(
    ranks: int,
    workers: int,
    micro_batch: int,
    accumulation: int,
    micro_batch_sync: bool,
    pool_size: int,
    step_time: float | None,
    steps: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Length distribution of DATASET, predicted waiting and padding with and without levers, recommended settings.

    DATASET is an Energon dataset, a CSV or JSONL file with a length per line, or the metrics folder of a run.
    Ctrl-C while reading gives the report of what was read so far.
    """
    source = SamplesInput(**{name: options.pop(name) for name in SamplesInput.__dataclass_fields__})
    model = Model.of(**options)
    table, measured = source.read(ranks, workers)
    if measured is not None:
        ranks = max(measured["num_ranks"], 2)
        step_time = step_time if step_time is not None else measured["step_time_s"]
    present = Setting(
        num_ranks=ranks,
        num_workers=workers,
        micro_batch_size=micro_batch,
        num_microbatches=accumulation,
        micro_batch_sync=micro_batch_sync,
        pool=pool_rule(pool_size, micro_batch) if pool_size else None,
    )
    with tqdm(desc="settings", unit=" simulated", disable=None, leave=False) as bar:
        analysis = analyze(
            table,
            present,
            model.costs,
            model.memory(ranks),
            device_bytes=model.device_bytes,
            step_time_s=step_time,
            num_steps=steps,
            as_read=source.as_read,
            measured=measured,
            on_simulated=lambda setting: bar.update(),
        )
    click.echo(json.dumps(analysis.as_dict(), indent=2) if as_json else render(analysis))
