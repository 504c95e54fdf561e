"""The `aiak-ext` command: know before you run."""

from __future__ import annotations

import importlib
import importlib.util

import click

from aiak_ext.analysis.commands.analyze import analyze_command
from aiak_ext.analysis.commands.calibrate import calibrate_command
from aiak_ext.analysis.commands.doctor import doctor_command
from aiak_ext.analysis.commands.simulate import simulate_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Analyze a dataset, simulate settings, calibrate costs and check a run's arguments, before the run."""


for _command in (analyze_command, simulate_command, calibrate_command, doctor_command):
    main.add_command(_command)
if importlib.util.find_spec("aiak_ext.report") is not None:
    main.add_command(importlib.import_module("aiak_ext.report").report)


if __name__ == "__main__":
    main()
