"""`aiak-ext calibrate`: measures what a sequence costs on this device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from aiak_ext.analysis.calibrate import DEFAULT_LENGTHS, calibrate, device_name
from aiak_ext.analysis.commands.options import POSITIVE, progress_bar, user_errors
from aiak_ext.analysis.cost_file import PARTS, write_cost_part
from aiak_ext.analysis.load_object import load_instance
from aiak_ext.analysis.text_table import format_table


@click.command("calibrate")
@click.argument("module")
@click.option(
    "--part",
    type=click.Choice(PARTS),
    default="language",
    show_default=True,
    help="What the module is: lengths are tokens of the language model, or patches of the vision encoder.",
)
@click.option("--length", "lengths", type=POSITIVE, multiple=True, default=DEFAULT_LENGTHS, show_default=True)
@click.option("--repeats", type=POSITIVE, default=5, show_default=True, help="Timed runs per length.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("costs.json"),
    show_default=True,
    help="Cost file; the other part's figures in it are kept.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@user_errors
def calibrate_command(
    module: str, part: str, lengths: tuple[int, ...], repeats: int, output: Path, as_json: bool
) -> None:
    """Fit the cost model to forward and backward times of MODULE on this device, for `--cost-file`.

    MODULE is module:function; the function is called without arguments and returns a callable that runs the forward
    of one sequence of a given length and returns its output.
    """
    result = calibrate(load_instance(module), lengths, repeats=repeats, progress=progress_bar(len(lengths), "lengths"))
    details = {"module": module, "device": device_name(), "unit": "seconds", "measurements": result.rows()}
    write_cost_part(output, part, result.model, details)
    if as_json:
        click.echo(json.dumps({"coefficients": asdict(result.model), **details}, indent=2))
        return
    model = result.model
    worst = max(map(abs, result.relative_errors))
    click.echo(f"{part} on {details['device']}")
    click.echo(format_table(result.rows()))
    click.echo(
        f"seconds = {model.linear:.4g} * n + {model.quadratic:.4g} * n^2 + {model.constant:.4g}; "
        f"largest error {worst:.1%}"
    )
    click.echo(f"written: {output}")
