"""A checkpoint counts only when it is complete, and the last few remain."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.llava_ov.checkpoint_files import checkpoint_path, latest_checkpoint, publish, unfinished_path

LATEST = "latest_checkpointed_iteration.txt"


def write(root: Path, step: int, content: str = "content") -> Path:
    """A checkpoint that is written and not yet published."""
    target = checkpoint_path(root, step)
    unfinished_path(target).mkdir(parents=True)
    (unfinished_path(target) / "common.pt").write_text(content)
    return target


def content_of_latest(root: Path) -> str:
    return (latest_checkpoint(root) / "common.pt").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_run_that_dies_while_saving_leaves_the_previous_checkpoint(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    publish(write(tmp_path, 10, "first"))
    write(tmp_path, 20, "half")
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000010"
    assert content_of_latest(tmp_path) == "first"
    publish(write(tmp_path, 30))
    assert names(tmp_path) == ["iter_0000010", "iter_0000030", LATEST]  # the half one is gone


def test_saving_a_step_again_replaces_it(tmp_path):
    publish(write(tmp_path, 10, "first"))
    publish(write(tmp_path, 10, "again"))
    assert content_of_latest(tmp_path) == "again"
    assert names(tmp_path) == ["iter_0000010", LATEST]


@pytest.mark.parametrize("num_renames", range(4))
def test_a_kill_between_any_two_renames_leaves_a_complete_checkpoint(tmp_path, monkeypatch, num_renames):
    """The latest checkpoint is being saved a second time, the case with the most steps."""
    publish(write(tmp_path, 10, "first"))
    target = write(tmp_path, 10, "again")
    renames = 0

    def interrupted(original):
        def call(*args):
            nonlocal renames
            if renames == num_renames:
                raise KeyboardInterrupt
            renames += 1
            return original(*args)

        return call

    with monkeypatch.context() as patch:
        for method in ("rename", "replace"):
            patch.setattr(Path, method, interrupted(getattr(Path, method)))
        try:
            publish(target)
        except KeyboardInterrupt:
            assert num_renames < 3
        else:
            assert num_renames == 3  # there are no more
    assert content_of_latest(tmp_path) == ("first" if num_renames < 2 else "again")
    publish(write(tmp_path, 20))
    assert names(tmp_path) == ["iter_0000010", "iter_0000020", LATEST]


def test_the_last_checkpoints_remain(tmp_path):
    for step in (10, 20, 30):
        publish(write(tmp_path, step), keep=2)
    assert names(tmp_path) == ["iter_0000020", "iter_0000030", LATEST]


def test_retention_never_removes_what_was_just_saved(tmp_path):
    """A run that was resumed from an earlier step writes below what its predecessor left."""
    for step in (10, 20, 30):
        publish(write(tmp_path, step))
    publish(write(tmp_path, 15), keep=1)
    assert names(tmp_path) == ["iter_0000015", "iter_0000020", "iter_0000030", LATEST]
    assert latest_checkpoint(tmp_path) == tmp_path / "iter_0000015"


def test_a_missing_checkpoint_is_an_error_not_a_restart(tmp_path):
    (tmp_path / LATEST).write_text("30")
    with pytest.raises(ValueError, match="names iter_0000030, which is not there"):
        latest_checkpoint(tmp_path)
