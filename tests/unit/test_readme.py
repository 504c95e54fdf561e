"""What the README says is true: its flag table is the flags', its example runs, its files and scripts exist."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
import webdataset as wds
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_train_dataset,
    stateless,
)
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

import aiak_ext
from aiak_ext.args import flag_table

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@edataclass
class EncodedSample(Sample):
    tokens: torch.Tensor
    total_len: int


@stateless
def cook(sample: dict) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


@pytest.fixture
def text_dataset(tmp_path: Path) -> Path:
    """A crude WebDataset of 40 texts of 1 to 40 letters."""
    path = tmp_path / "texts"
    path.mkdir()
    with wds.TarWriter(str(path / "shard-0.tar")) as writer:
        for index in range(40):
            writer.write({"__key__": f"text{index:02d}", "txt": "x" * ((index * 17) % 40 + 1)})
    WebdatasetPreparator.prepare_dataset(
        path, ["shard-0.tar"], split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (path / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors:\n  kind: text\n"
    )
    return path


def test_flag_table_is_current() -> None:
    table = README.split("<!-- flag table: aiak_ext.args.flag_table() -->\n")[1].split("\n<!-- end of flag table")[0]
    assert table == flag_table(), "copy the output of aiak_ext.args.flag_table() into README.md"


def test_example_runs_and_sorts(text_dataset: Path) -> None:
    example = re.search(r"```python\n(class MyTaskEncoder.*?)```", README, re.DOTALL)
    assert example is not None
    names = dict(
        aiak_ext=aiak_ext,
        torch=torch,
        Cooker=Cooker,
        DefaultTaskEncoder=DefaultTaskEncoder,
        TextSample=TextSample,
        EncodedSample=EncodedSample,
        stateless=stateless,
        get_train_dataset=get_train_dataset,
        cook=cook,
        path=text_dataset,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    code = example.group(1).replace("pool_size=1000", "pool_size=40")
    exec(compile(code, "README.md", "exec"), names)
    batches = [next(names["loader"]) for _ in range(10)]
    lengths = [sorted(map(int, batch.total_len)) for batch in batches]
    # One pool: batches are its blocks of four neighbours in length, in shuffled order.
    in_order = sorted(lengths)
    assert all(batch[-1] <= following[0] for batch, following in itertools.pairwise(in_order))
    assert lengths != in_order


def test_scripts_and_pages_that_the_readme_names_exist() -> None:
    named = re.findall(r"python (benchmarks/\w+\.py)", README) + re.findall(r"\]\((docs/[\w-]+\.md)\)", README)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
