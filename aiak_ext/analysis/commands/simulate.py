"""`aiak-ext simulate`: the same data under a grid of settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from aiak_ext.analysis.balanced import BalanceSettings
from aiak_ext.analysis.commands.options import POSITIVE, Model, model_options, user_errors
from aiak_ext.analysis.commands.samples_input import SamplesInput, input_options
from aiak_ext.analysis.plots import plot_results
from aiak_ext.analysis.simulate import ORDERS, Result, Setting, pool_rule, simulate
from aiak_ext.analysis.text_table import format_table, gibibytes, percent
from data_balance import SORTING_ALGORITHMS
from length_sort.grouping import POLICIES, TARGETS
from length_sort.odb_order import GROUP_ORDERS
from length_sort.rounds import RoundRules

LEVERS = ("none", "length_sort", "odb", "balance_step", "balance_encoder", "length_sort+balance_step")
MOST_RANKS = 8192


@click.command("simulate")
@input_options
@click.option(
    "--ranks", type=click.IntRange(2, MOST_RANKS), multiple=True, default=(8, 64), show_default=True, help="Repeatable."
)
@click.option("--lever", type=click.Choice(LEVERS), multiple=True, default=LEVERS[:3], show_default=True)
@click.option("--micro-batch", type=POSITIVE, multiple=True, default=(1,), show_default=True, help="Repeatable.")
@click.option("--pool", type=POSITIVE, multiple=True, default=(1000,), show_default=True, help="Repeatable.")
@click.option("--block", type=POSITIVE, help="Shuffle block.  [default: the micro batch size]")
@click.option("--budget", type=POSITIVE, multiple=True, default=(8192,), show_default=True, help="Repeatable.")
@click.option("--buffer", "buffer_size", type=POSITIVE, default=1024, show_default=True)
@click.option("--max-patches", type=POSITIVE, help="Most vision patches of an ODB group.")
@click.option("--policy", type=click.Choice(POLICIES), multiple=True, default=("packed",), show_default=True)
@click.option("--target", type=click.Choice(TARGETS), default="min", show_default=True)
@click.option("--group-order", type=click.Choice(GROUP_ORDERS), default="aligned", show_default=True)
@click.option(
    "--order-by",
    type=click.Choice(ORDERS),
    multiple=True,
    default=ORDERS[:1],
    show_default=True,
    help="What pools are sorted and groups matched by; cost is a length_fn or cost_fn of one's own. Repeatable.",
)
@click.option("--algorithm", type=click.Choice(list(SORTING_ALGORITHMS)), default="lpt", show_default=True)
@click.option("--workers", type=POSITIVE, default=1, show_default=True, help="Data workers per rank.")
@click.option("--accumulation", type=POSITIVE, default=1, show_default=True, help="Micro batches per step and rank.")
@click.option("--micro-batch-sync", is_flag=True, help="Ranks meet at every micro batch (expert parallelism, FSDP).")
@click.option("--steps", type=POSITIVE, help="Steps to simulate per setting.  [default: by ranks and lever]")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Image file for the curves.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@user_errors
def simulate_command(
    ranks: tuple[int, ...],
    micro_batch: tuple[int, ...],
    workers: int,
    accumulation: int,
    micro_batch_sync: bool,
    steps: int | None,
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Waiting, padding and memory of DATASET under every combination of the settings given, at 2 to 8192 ranks.

    Runs the ordering, grouping and planning code of the levers themselves. A step that does not fit the device is
    marked "over".
    """
    source = SamplesInput(**{name: options.pop(name) for name in SamplesInput.__dataclass_fields__})
    grid = {name: options.pop(name) for name in _GRID}
    model = Model.of(**options)
    table, measured = source.read(max(ranks), workers)
    if measured is not None and table.is_estimate:
        raise ValueError(f"{source.dataset} is a run whose metrics hold no single lengths; give the dataset instead")
    settings = [
        setting
        for num_ranks in ranks
        for size in micro_batch
        for setting in _settings(
            Setting(
                num_ranks=num_ranks,
                num_workers=workers,
                micro_batch_size=size,
                num_microbatches=accumulation,
                micro_batch_sync=micro_batch_sync,
            ),
            **grid,
        )
    ]
    results = [
        simulate(table, setting, model.costs, model.memory(setting.num_ranks), num_steps=steps, as_read=source.as_read)
        for setting in tqdm(dict.fromkeys(settings), desc="settings", disable=None, leave=False)
    ]
    if plot is not None:
        plot_results(results, plot)
    if as_json:
        rows = [result.row() | {"fits": _fits(result, model)} for result in results]
        click.echo(json.dumps({"source": table.source, "notes": list(table.notes), "rows": rows}, indent=2))
        return
    click.echo("\n".join([f"{table.source}: {len(table)} samples", *table.notes, ""]))
    click.echo(format_table([_row(result, model) for result in results]))
    if plot is not None:
        click.echo(f"curves: {plot}")


_GRID = (
    "lever",
    "pool",
    "block",
    "budget",
    "buffer_size",
    "max_patches",
    "policy",
    "target",
    "group_order",
    "order_by",
    "algorithm",
)


def _settings(
    plain: Setting,
    *,
    lever: tuple[str, ...],
    pool: tuple[int, ...],
    block: int | None,
    budget: tuple[int, ...],
    buffer_size: int,
    max_patches: int | None,
    policy: tuple[str, ...],
    target: str,
    group_order: str,
    order_by: tuple[str, ...],
    algorithm: str,
) -> list[Setting]:
    """The levers' settings for one geometry."""
    pools = [pool_rule(size, block or plain.micro_batch_size) for size in pool]
    rules = [
        RoundRules(
            token_budget=tokens,
            buffer_size=buffer_size,
            max_patches=max_patches,
            policy=name,
            target=target,
            group_order=group_order,
        )
        for name in policy
        for tokens in budget
    ]
    step, encoder = (BalanceSettings(scope=scope, algorithm=algorithm) for scope in ("step", "encoder"))
    variants = {
        "none": [plain],
        "length_sort": [replace(plain, pool=rule) for rule in pools],
        # A group takes the micro batch's place, whatever that one's size.
        "odb": [replace(plain, micro_batch_size=1, odb=rule) for rule in rules],
        "balance_step": [replace(plain, balance=step)],
        "balance_encoder": [replace(plain, balance=encoder)],
        "length_sort+balance_step": [replace(plain, pool=rule, balance=step) for rule in pools],
    }
    return [
        replace(setting, order_by=order) if setting.pool or setting.odb else setting
        for name in lever
        for setting in variants[name]
        for order in order_by
    ]


def _fits(result: Result, model: Model) -> bool:
    return model.memory(result.setting.num_ranks).fits(result.figures.peak_bytes, model.device_bytes)


def _row(result: Result, model: Model) -> dict[str, Any]:
    setting, figures = result.setting, result.figures
    return {
        "lever": setting.lever,
        "detail": setting.detail,
        "ranks": setting.num_ranks,
        "micro batch": setting.micro_batch_size if setting.odb is None else None,
        "efficiency": figures.efficiency,
        "padding": percent(figures.padding),
        "useful": percent(figures.useful),
        "samples/step": round(figures.samples_per_step),
        "step CV": figures.step_cv,
        "bytes moved": None if result.moved_share is None else percent(result.moved_share),
        "steps": figures.num_steps,
        "memory": gibibytes(figures.peak_bytes) + ("" if _fits(result, model) else " over"),
    }
