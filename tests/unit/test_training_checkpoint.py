"""A checkpoint counts only when it is complete."""

from __future__ import annotations

import pytest

from examples.llava_ov.checkpoint import latest_checkpoint, publish


def unfinished_checkpoint(root, step: int, content: str):
    directory = root / f"iter_{step:07d}.unfinished"
    directory.mkdir(parents=True)
    (directory / "common.pt").write_text(content)
    return directory, root / f"iter_{step:07d}"


def test_a_run_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    publish(*unfinished_checkpoint(tmp_path, 10, "first"))
    unfinished_checkpoint(tmp_path, 20, "half")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert (latest_checkpoint(tmp_path) / "common.pt").read_text() == "first"


def test_saving_a_step_again_replaces_it(tmp_path):
    publish(*unfinished_checkpoint(tmp_path, 10, "first"))
    publish(*unfinished_checkpoint(tmp_path, 10, "again"))
    assert (latest_checkpoint(tmp_path) / "common.pt").read_text() == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]


def test_a_missing_checkpoint_is_an_error_not_a_restart(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    with pytest.raises(ValueError, match="names iter_0000030, which is not there"):
        latest_checkpoint(tmp_path)
