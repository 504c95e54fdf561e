"""The DATASET argument and its options: which reader it means, and the samples read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from aiak_ext.analysis.commands.options import POSITIVE, progress_bar, with_options
from aiak_ext.analysis.load_object import load_instance, load_object
from aiak_ext.analysis.read_energon import ReadPlan, encoded_samples, read_dataset, table_of
from aiak_ext.analysis.read_media import (
    ImageRule,
    TextRule,
    fit_text_rule,
    has_media_metadata,
    media_samples,
    read_media_metadata,
    with_measured_costs,
)
from aiak_ext.analysis.read_run import is_run, read_run
from aiak_ext.analysis.read_tables import read_lengths_file
from aiak_ext.analysis.samples import SampleTable
from length_sort import sample_length

#: Samples that are encoded to fit the text length where media metadata spares the rest.
NUM_FITTED = 64

input_options = with_options(
    click.argument("dataset", type=click.Path(exists=True, path_type=Path)),
    click.option(
        "--task-encoder",
        help="module:Class of the training's task encoder, or a function that makes one; called without arguments.",
    ),
    click.option("--length-fn", help="module:function that gives the length of an encoded sample."),
    click.option("--samples", type=POSITIVE, default=10_000, show_default=True, help="Most samples to read."),
    click.option("--split", default="train", show_default=True, help="Split of an Energon dataset."),
    click.option("--length-column", help="Column of a CSV or JSONL file that holds the tokens."),
    click.option(
        "--media-metadata/--no-media-metadata",
        default=True,
        show_default=True,
        help="Use the picture sizes in Energon's index, where it has them, instead of decoding pictures.",
    ),
    click.option("--max-pixels", type=POSITIVE, default=ImageRule.max_pixels, show_default=True),
    click.option("--patch-size", type=POSITIVE, default=ImageRule.patch_size, show_default=True),
    click.option("--merge-size", type=POSITIVE, default=ImageRule.merge_size, show_default=True),
    click.option("--shuffle-buffer-size", type=POSITIVE, help="Energon's shuffle buffer of the run, with --as-read."),
    click.option(
        "--as-read",
        is_flag=True,
        help="Simulate the ranks' and workers' streams as Energon reads them, instead of dealing samples at random.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SamplesInput:
    """What the input options say; the names are theirs."""

    dataset: Path
    task_encoder: str | None
    length_fn: str | None
    samples: int
    split: str
    length_column: str | None
    media_metadata: bool
    max_pixels: int
    patch_size: int
    merge_size: int
    shuffle_buffer_size: int | None
    as_read: bool

    def read(self, num_ranks: int, num_workers: int) -> tuple[SampleTable, dict[str, Any] | None]:
        """The samples, and the measured figures where the dataset is a finished run.

        Raises:
            ValueError: the dataset cannot be read with what was given.
        """
        if self.dataset.is_file() and self.dataset.suffix in (".csv", ".jsonl", ".json", ".ndjson"):
            table = read_lengths_file(self.dataset, length_column=self.length_column, limit=self.samples)
            return table, None
        if self.dataset.is_dir() and is_run(self.dataset):
            return read_run(self.dataset)
        return self._read_energon(num_ranks, num_workers), None

    def _read_energon(self, num_ranks: int, num_workers: int) -> SampleTable:
        uses_metadata = self.media_metadata and not self.as_read and has_media_metadata(self.dataset)
        if self.task_encoder is None and not uses_metadata:
            raise ValueError(
                f"{self.dataset} is no lengths file and no run, and without a task encoder its samples have no length: "
                "give --task-encoder module:Class, or store picture sizes with `energon prepare-media`"
            )
        if uses_metadata:
            return self._read_metadata(num_ranks, num_workers)
        assert self.task_encoder is not None
        plan = ReadPlan(
            num_ranks=num_ranks,
            num_workers=num_workers,
            num_samples=self.samples,
            streams_read=num_ranks * num_workers if self.as_read else ReadPlan.streams_read,
            split=self.split,
            shuffle_buffer_size=self.shuffle_buffer_size,
            repeat=self.as_read,
        )
        length_fn = sample_length if self.length_fn is None else load_object(self.length_fn)
        return read_dataset(
            self.dataset,
            load_instance(self.task_encoder),
            plan,
            length_fn=length_fn,
            progress=progress_bar(self.samples, "samples"),
        )

    def _read_metadata(self, num_ranks: int, num_workers: int) -> SampleTable:
        rule = ImageRule(max_pixels=self.max_pixels, patch_size=self.patch_size, merge_size=self.merge_size)
        text_rule, encoded = TextRule(), None
        if self.task_encoder is not None:
            length_fn = sample_length if self.length_fn is None else load_object(self.length_fn)
            plan = ReadPlan(num_ranks=NUM_FITTED, num_samples=NUM_FITTED, split=self.split)
            rows = list(encoded_samples(self.dataset, load_instance(self.task_encoder), plan, length_fn))
            tokens = {row.key: row.num_tokens for row in rows}
            everything = media_samples(self.dataset, rule, split=self.split, num_samples=None)
            text_rule = fit_text_rule((one for one in everything if one.key in tokens), tokens, rule)
            encoded = table_of(rows, str(self.dataset))
        table = read_media_metadata(
            self.dataset,
            rule,
            text_rule,
            split=self.split,
            num_samples=self.samples,
            num_ranks=num_ranks,
            num_workers=num_workers,
            progress=progress_bar(self.samples, "samples"),
        )
        return table if encoded is None else with_measured_costs(table, encoded)
