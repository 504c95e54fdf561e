"""`aiak-ext report`: figures, predictions, plots and the page, from records with known values."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from aiak_ext import reporting
from aiak_ext.cli import main
from aiak_ext.metrics import StepRecord
from aiak_ext.reporting.inline_svg import GRID, SERIES, TEXT
from aiak_ext.reporting.plots import MOST_POINTS, PLOTS, render
from aiak_ext.reporting.prediction import read_simulated
from aiak_ext.reporting.run_figures import RunFigures
from tests.energon_data import (
    NumberTaskEncoder,
    SortedNumberTaskEncoder,
    lognormal_lengths,
    sorted_pools,
    train_dataset,
    write_dataset,
)

ALWAYS = {"lengths", "rank-cost", "step-time", "padding", "waiting", "order", "emitted"}


def write_run(directory: Path, records: list[StepRecord]) -> Path:
    directory.mkdir(parents=True)
    for record in records:
        with (directory / f"steps_rank{record.rank:05d}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(record)) + "\n")
    return directory


def small_records(**changes: Any) -> list[StepRecord]:
    """Three steps of two ranks: the first, 100 s long, is the warm-up."""
    rows = [(0, 0, 100, 50, 4, 10), (0, 1, 100, 0, 8, 10), (1, 0, 2, 1, 3, 5), (1, 1, 2, 0, 3, 5)]
    rows += [(2, 0, 4, 0, 6, 10), (2, 1, 4, 2, 2, 10)]
    return [
        StepRecord(
            step=step,
            rank=rank,
            step_time_s=seconds,
            data_time_s=0.5,
            grad_sync_wait_s=wait,
            num_samples=2,
            num_tokens=tokens,
            num_token_slots=10,
            cost=cost,
            **changes,
        )
        for step, rank, seconds, wait, cost, tokens in rows
    ]


def random_records(
    num_steps: int, num_ranks: int, *, balanced: bool = False, deferring: bool = False
) -> list[StepRecord]:
    lengths = np.random.default_rng(0).lognormal(5, 1, (num_steps, num_ranks)).astype(int) + 1
    scalars = {"loss": 2.0}
    if balanced:
        names = ("imbalance_before", "imbalance_after", "plan_s", "exchange_s")
        scalars |= {f"balance/{name}": value for name, value in zip(names, (1.5, 1.1, 0.001, 0.002))}
    return [
        StepRecord(
            step=step,
            rank=rank,
            step_time_s=2.0,
            grad_sync_wait_s=0.5,
            num_samples=1,
            num_tokens=int(tokens),
            num_token_slots=int(tokens),
            cost=float(tokens),
            deferred_samples=3 * deferring,
            max_deferral_age=2 * deferring,
            scalars=scalars,
        )
        for (step, rank), tokens in np.ndenumerate(lengths)
    ]


def call(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.output


def render_all(run: RunFigures) -> set[str]:
    """Draws what the run has; the plots' names."""
    return {name for plot in PLOTS if plot.is_present(run) for name in svgs(render(plot, [run]))}


def svgs(page: str) -> dict[str, ElementTree.Element]:
    """The plots of a page; each must be well-formed XML."""
    found = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    elements = [ElementTree.fromstring(svg) for svg in found]
    return {element.attrib["data-plot"]: element for element in elements}


def test_figures_of_two_ranks(tmp_path: Path) -> None:
    run = RunFigures.read(write_run(tmp_path / "run", small_records()), label="run")
    assert run.cost.tolist() == [[4, 3, 6], [8, 3, 2]]
    assert run.cost_max_over_mean.tolist() == [8 / 6, 1, 6 / 4]
    assert run.step_time_s[1:].tolist() == [2, 4]
    assert np.isnan(run.step_time_s[0])
    assert run.step_time_cv == pytest.approx(1 / 3)
    assert run.wait_share[1:].tolist() == [1 / 4, 2 / 8]
    assert run.total_data_share == 4 * 0.5 / 12
    assert run.padding.tolist() == [0, 0.5, 0]
    assert run.mean_length.tolist() == [5, 2.5, 5]
    assert run.samples_per_step.tolist() == [4, 4, 4]
    # Busy: 0.5 and 1.5 s, then 3.5 and 1.5 s.
    assert run.clock_efficiency == pytest.approx((1.0 + 2.5) / (1.5 + 3.5))
    assert run.scalar("loss") is None
    assert not run.has_single_samples


def test_a_rank_that_broke_off_leaves_gaps(tmp_path: Path) -> None:
    run = RunFigures.read(write_run(tmp_path / "run", small_records()[:-1]), label="run")
    assert np.isnan(run.cost[1, 2])
    assert run.cost_max_over_mean[2] == 1
    assert run.padding[2] == 0
    assert render_all(run) == ALWAYS


def test_json_figures_are_those_of_the_records(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "a" / "metrics", small_records())
    other = write_run(tmp_path / "b" / "metrics", small_records(max_deferral_age=3))
    report = json.loads(call(directory, other, "--json"))
    assert report["output"] == str(directory / "report.html")
    run, second = report["runs"]
    # Folders of one name are told apart by their paths.
    assert (run["label"], second["label"]) == (str(directory), str(other))
    assert (run["max_deferral_age"], second["max_deferral_age"]) == (0, 3)
    efficiency = (6 + 3 + 4) / (8 + 3 + 6)
    assert run["summary"]["step_efficiency"] == pytest.approx(efficiency)
    assert run["prediction"]["padding"]["from_costs"] == pytest.approx(1 - 50 / 60)
    assert run["prediction"]["waiting"]["from_costs"] == pytest.approx(1 - efficiency)
    assert run["prediction"]["waiting"]["measured"] == pytest.approx(3 / 12)
    assert run["prediction"]["waiting"]["simulated"] is None
    assert run["order"]["is_correlated"] is False


@pytest.mark.parametrize("pool_size", [0, 16])
def test_a_simulation_predicts_what_the_pipeline_does(tmp_path: Path, pool_size: int) -> None:
    """Two ranks read, order and batch a data set; the simulation knows the data set alone."""
    path = write_dataset(tmp_path / "data", lognormal_lengths(64))
    records = []
    for rank in range(2):
        encoder = SortedNumberTaskEncoder(sorted_pools(16, micro_batch_size=2, shuffle_block=2))
        dataset = train_dataset(
            path,
            encoder if pool_size else NumberTaskEncoder(),
            rank=rank,
            world_size=2,
            num_workers=1,
            batch_size=2,
        )
        dataset.worker_config.worker_activate(0)
        for step, (batch, _) in enumerate(zip(dataset, range(16))):
            slots = 2 * max(batch.lengths)
            records.append(
                StepRecord(
                    step=step,
                    rank=rank,
                    step_time_s=1.0,
                    num_samples=2,
                    num_tokens=sum(batch.lengths),
                    num_token_slots=slots,
                    cost=float(2 * _cost(max(batch.lengths))),
                )
            )
        dataset.worker_config.worker_deactivate()
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"text_decoder": {"hidden_size": 64, "ffn_hidden_size": 256, "num_layers": 2}}))
    lever = "length_sort" if pool_size else "none"
    arguments = ["simulate", path, "--task-encoder", "tests.energon_data:NumberTaskEncoder", "--as-read", "--json"]
    arguments += ["--ranks", 2, "--micro-batch", 2, "--pool", 16, "--samples", 64, "--steps", 16, "--lever", lever]
    simulated = CliRunner().invoke(main, [*map(str, arguments), "--model-config", str(model)])
    assert simulated.exit_code == 0, simulated.output
    (tmp_path / "predicted.json").write_text(simulated.stdout)
    run = write_run(tmp_path / "run", records)
    report = json.loads(call(run, "--predicted", tmp_path / "predicted.json", "--json"))
    prediction = report["runs"][0]["prediction"]
    for name in ("padding", "step efficiency", "waiting"):
        assert prediction[name]["simulated"] == pytest.approx(prediction[name]["from_costs"], abs=1e-9)
    assert 0 < prediction["waiting"]["simulated"] < 1
    assert "+0.00 points" in (run / "report.html").read_text()


def _cost(num_tokens: int) -> float:
    """FLOPs of the model above: four projections and two MLP matrices per layer, causal attention."""
    return 2 * (8 * 64**2 + 4 * 64 * 256) * num_tokens + 2 * 2 * 64 * num_tokens**2


def predictions(path: Path, *levers_and_ranks: tuple[str, int]) -> Path:
    rows = [
        {"lever": lever, "ranks": ranks, "padding": 0.1, "efficiency": 0.8, "waiting": 0.2}
        for lever, ranks in levers_and_ranks
    ]
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_the_prediction_is_chosen_by_ranks_and_label(tmp_path: Path) -> None:
    run = RunFigures.read(write_run(tmp_path / "run", small_records()), label="odb")
    several = predictions(tmp_path / "several.json", ("none", 2), ("odb", 2), ("odb", 8))
    assert read_simulated(several, run) == {
        "lever": "odb",
        "ranks": 2,
        "padding": 0.1,
        "efficiency": 0.8,
        "waiting": 0.2,
    }
    assert read_simulated(predictions(tmp_path / "one.json", ("none", 2), ("odb", 8)), run)["lever"] == "none"
    with pytest.raises(ValueError, match=r"0 predictions for the run 'odb' of 2 ranks .*none at 8 ranks"):
        read_simulated(predictions(tmp_path / "other.json", ("none", 8)), run)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds no simulation"):
        read_simulated(tmp_path / "list.json", run)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain run with markup in its name, and a balanced one beside it."""
    directory = tmp_path_factory.mktemp("report")
    plain = write_run(directory / "<plain> & simple", random_records(20, 2))
    balanced = write_run(directory / "balanced", random_records(20, 2, balanced=True, deferring=True))
    text = call(plain, balanced, "--output", directory / "out" / "both.html")
    assert "1.00x" in text
    return (directory / "out" / "both.html").read_text()


def test_the_page_of_two_runs(page: str) -> None:
    plots = svgs(page)
    assert list(plots) == [plot.name for plot in PLOTS]
    assert "&lt;plain&gt; &amp; simple" in page
    assert "<plain>" not in page
    assert "the oldest deferred sample waited 2 round(s)" in page
    texts = {name: " ".join(element.itertext()) for name, element in plots.items()}
    assert "not recorded" in texts["plan-exchange"]
    assert "plan (mean 1 ms)" in texts["plan-exchange"]
    assert "before the balance" in texts["rank-cost"]
    assert "measured 25.0%" in texts["waiting"]
    assert "tokens per sample" in texts["lengths"]


def test_plots_take_the_pages_colours_and_share_no_ids(page: str) -> None:
    body = page[page.index("<body>") :]
    for color in (TEXT, GRID, *SERIES):
        assert color not in body
    ids = list(_ids(svgs(page)))
    assert len(ids) == len(set(ids)) > 0
    for name, element in svgs(page).items():
        own = set(_ids({name: element}))
        markup = ElementTree.tostring(element, encoding="unicode")
        referred = re.findall(r"url\(#([^)]+)\)", markup) + re.findall(r'href="#([^"]+)"', markup)
        assert referred
        assert own.issuperset(referred)


def _ids(elements: dict[str, ElementTree.Element]) -> Iterator[str]:
    for element in elements.values():
        for each in element.iter():
            if "id" in each.attrib:
                yield each.attrib["id"]


def test_the_page_fetches_nothing(page: str) -> None:
    addresses = re.findall(r'(?:src|href|action|data)="([^"]*)"', page)
    assert set(filter(lambda one: not one.startswith("#"), addresses)) == {"data:,"}
    assert "<script" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_pages_stay_small_however_long_the_run(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", random_records(4 * MOST_POINTS, 9))
    call(directory)
    page = (directory / "report.html").read_text()
    assert len(page) < 500_000
    texts = " ".join(svgs(page)["rank-cost"].itertext())
    assert "lightest to heaviest" in texts
    assert "step (means of 4)" in texts


def test_sorted_steps_are_warned_of(tmp_path: Path) -> None:
    records = random_records(60, 2)
    tokens = iter(sorted(record.num_tokens for record in records))
    ordered = [StepRecord(**{**vars(record), "num_tokens": next(tokens)}) for record in records]
    directory = write_run(tmp_path / "run", ordered)
    shuffled = write_run(tmp_path / "shuffled", records)
    text = call(directory, shuffled)
    assert "run: order correlates with length" in text
    assert "shuffled: order does not correlate with length" in text
    assert (directory / "report.html").read_text().count('<div class="warning"><strong>run: order') == 1


def test_loops_that_give_no_costs_are_reported_too(tmp_path: Path) -> None:
    records = [StepRecord(**{**vars(record), "cost": 0.0}) for record in small_records()]
    run = RunFigures.read(write_run(tmp_path / "run", records), label="run")
    assert render_all(run) == ALWAYS


def test_user_mistakes_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a" / "metrics", small_records())
    other = write_run(tmp_path / "b" / "metrics", small_records())
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no steps_rank*.jsonl" in call(empty, exit_code=1)
    assert "Give --label once per run" in call(run, other, "--label", "one", exit_code=1)
    assert "3 of them are warm-up" in call(run, "--warmup-steps", 3, exit_code=1)


def test_matplotlib_is_imported_only_for_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it fails
    package = Path(reporting.__file__).parent
    modules = [*package.glob("*.py"), package.parent / "report.py"]
    assert len(modules) > 5
    for module in modules:
        runpy.run_path(str(module))
    run = write_run(tmp_path / "run", small_records())
    assert "matplotlib is not installed" in call(run, exit_code=1)
