"""`aiak-ext doctor`: checks a run's arguments before the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from aiak_ext.analysis.commands.options import POSITIVE, user_errors
from aiak_ext.analysis.doctor import RunFacts, diagnose
from aiak_ext.analysis.findings import has_errors, render_findings
from aiak_ext.analysis.load_object import load_instance
from aiak_ext.analysis.read_energon import ReadPlan, read_dataset
from aiak_ext.analysis.run_settings import settings_from_file, settings_from_flags

#: Samples that are encoded to learn their size.
NUM_MEASURED = 16


@click.command("doctor", context_settings={"ignore_unknown_options": True})
@click.argument("config", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("--ranks", type=POSITIVE, help="Data-parallel ranks.  [default: from world-size in the arguments]")
@click.option("--ranks-per-node", type=POSITIVE, default=8, show_default=True)
@click.option("--task-encoder", help="module:Class of the training's task encoder, or a function that makes one.")
@click.option(
    "--dataset",
    type=click.Path(exists=True, path_type=Path),
    help="Energon dataset, to measure samples with the task encoder.",
)
@click.option("--num-samples", type=POSITIVE, help="Samples in the dataset.")
@click.option("--sample-mib", type=float, help="Size of an encoded sample, instead of measuring it.")
@click.option("--host-memory-gib", type=float, help="Memory of a node.  [default: this machine's]")
@click.option("--store", help="HOST[:PORT] of DP rank 0's node, to see whether it can be reached from here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
@user_errors
def doctor_command(
    context: click.Context,
    config: tuple[str, ...],
    ranks: int | None,
    ranks_per_node: int,
    task_encoder: str | None,
    dataset: Path | None,
    num_samples: int | None,
    sample_mib: float | None,
    host_memory_gib: float | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Check a run's arguments, each finding with its remedy; exit status 1 when one is an error.

    CONFIG is a JSON or YAML file of arguments, or, behind "--", the run's own flags:
    aiak-ext doctor -- --micro-batch-size 4 --length-sort-pool-size 1000
    """
    if len(config) == 1 and not config[0].startswith("-"):
        if not Path(config[0]).is_file():
            raise ValueError(f"{config[0]} is no file; give a JSON or YAML file, or the run's flags behind --")
        args = settings_from_file(config[0])
    else:
        args = settings_from_flags(config)
    encoder = None if task_encoder is None else load_instance(task_encoder)
    bytes_per_sample = None if sample_mib is None else sample_mib * 1024**2
    if bytes_per_sample is None and dataset is not None and encoder is not None:
        bytes_per_sample = read_dataset(dataset, encoder, ReadPlan(num_samples=NUM_MEASURED)).bytes_per_sample
    facts = RunFacts(
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        task_encoder=encoder,
        bytes_per_sample=bytes_per_sample,
        num_samples=num_samples,
        host_bytes=None if host_memory_gib is None else host_memory_gib * 1024**3,
        store=store,
    )
    findings = diagnose(args, facts)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(render_findings(findings))
    if has_errors(findings):
        context.exit(1)
