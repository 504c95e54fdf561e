"""The ODB benchmarks on tiny input: figures that are known, never a statement about time."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import odb_round, odb_vs_peer
from benchmarks.common import token_cost
from length_sort.rounds import RoundRules


def test_figures_of_known_steps():
    emitted = odb_vs_peer.Emitted(steps=[[[100, 200], [400]]], planning_s=[0.002], bytes_sent=[40, 60])
    padded = odb_vs_peer.measure(emitted, 1000, padded=True)
    assert padded["padding"] == pytest.approx(1 - 700 / 800)
    assert padded["budget_use"] == pytest.approx(0.35)
    assert (padded["samples_per_step"], padded["planning_ms"], padded["bytes_sent"]) == (3, 2, 50)
    cost = dict(zip((100, 200, 400), token_cost(np.array([100, 200, 400]))))
    assert padded["step_efficiency"] == pytest.approx((2 * cost[200] + cost[400]) / 2 / cost[400])
    packed = odb_vs_peer.measure(emitted, 1000, padded=False)
    assert packed["padding"] == 0
    assert packed["step_efficiency"] == pytest.approx((cost[100] + cost[200] + cost[400]) / 2 / cost[400])


def test_every_rank_emits_the_same_steps_and_the_first_round_is_left_out():
    streams = np.random.default_rng(0).integers(1, 100, (4, 60))
    emitted = odb_vs_peer.run_rounds(streams, RoundRules(token_budget=200, buffer_size=10), num_rounds=2)
    assert {len(step) for step in emitted.steps} == {4}
    assert all(group for step in emitted.steps for group in step)
    assert len(emitted.planning_s) == 2 and len(emitted.bytes_sent) == 8


def test_draining_counts_what_join_and_non_join_leave():
    streams = np.full((2, 12), 10)
    joined = odb_round.drain(streams, RoundRules(token_budget=20, buffer_size=4, policy="packed"))
    assert (joined["steps"], joined["idle_share"], joined["left_share"]) == (6, 0, 0)


def test_the_peers_ranks_gather_from_each_other():
    ranks = odb_vs_peer.ThreadRanks(1)
    ranks.enter(0)
    output = torch.zeros(3)
    ranks.all_gather_into_tensor(output, torch.tensor([1.0, 2.0, 3.0]))
    assert output.tolist() == [1, 2, 3] and ranks.bytes_sent == [12]


def test_script_says_that_the_peer_is_absent(tmp_path, monkeypatch):
    monkeypatch.setitem(odb_vs_peer.sys.modules, "odb", None)  # makes the import fail, installed or not
    monkeypatch.setitem(odb_vs_peer.sys.modules, "odb.grouping", None)
    output = tmp_path / "out.json"
    arguments = ["--lengths", "mix", "--ranks", "2", "--budgets", "2048", "--buffers", "16", "--rounds", "1"]
    result = CliRunner().invoke(odb_vs_peer.main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "online-dynamic-batching is not installed: its rows are missing" in result.output
    assert len(json.loads(output.read_text())["rows"]) == len(odb_vs_peer.RULES)
