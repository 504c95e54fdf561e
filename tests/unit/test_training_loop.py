"""The training loop on one rank: freezing, schedule, faults, logs, precision, checkpoints, kinds of data."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import aiak_ext
from aiak_ext.run_summary import read_records
from examples.llava_ov.build_demo_data import prepare
from examples.llava_ov.data_loading import build_loader, tokenizer_of
from examples.llava_ov.forward_step import run_model
from examples.llava_ov.micro_batch import MicroBatch
from examples.llava_ov.training import Trainer
from tests.demo_data import image_file
from tests.training_run import CPU, arguments, one_rank

pytestmark = pytest.mark.megatron_in_process


@pytest.fixture(autouse=True)
def megatron() -> Iterator[None]:
    with one_rank():
        yield


def train(args: argparse.Namespace) -> list[float]:
    with Trainer(args, CPU) as trainer:
        return trainer.train()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model[0].module.named_parameters()}


def records(output: Path) -> list[Any]:
    return read_records(output / "metrics")


# --- optimizer ---------------------------------------------------------------------------------------------------


def test_only_trainable_modules_change(tmp_path):
    with Trainer(arguments(tmp_path, "--trainable-modules", "adapter", "vision_model"), CPU) as trainer:
        before = weights(trainer)
        trainer.train()
        changed = {name.split(".")[0] for name, value in weights(trainer).items() if not value.equal(before[name])}
    assert changed == {"adapter", "vision_model"}


def test_a_run_of_packs_ends_its_schedule_with_its_steps(tmp_path):
    """Packs hold several samples each; a schedule that counted them would be over too early."""
    flags = ("--packing-buffer-size", "6", "--seq-length", "600", "--train-iters", "4", "--lr-warmup-fraction", "0.25")
    with Trainer(arguments(tmp_path, *flags, "--lr", "1e-3", "--min-lr", "1e-4"), CPU) as trainer:
        trainer.train()
        assert trainer.num_samples > 8
    rates = [record.scalars["lr"] for record in records(tmp_path)]
    assert rates == pytest.approx([1e-3, 1e-4 + 9e-4 * 0.75, 1e-4 + 9e-4 * 0.25, 1e-4])


def test_a_quota_counts_the_samples_in_packs(tmp_path):
    flags = ("--packing-buffer-size", "6", "--seq-length", "600", "--train-iters", "99", "--sample-quota", "9")
    with Trainer(arguments(tmp_path, *flags, "--lr-warmup-fraction", "0"), CPU) as trainer:
        trainer.train()
        assert trainer.step < 9 <= trainer.num_samples
        assert trainer.num_samples == records(tmp_path)[-1].emitted_samples
    assert records(tmp_path)[-1].scalars["lr"] == pytest.approx(1e-5)


def test_a_skipped_step_does_not_move_the_schedule(tmp_path, monkeypatch):
    with Trainer(arguments(tmp_path, "--train-iters", "4"), CPU) as trainer:
        step, calls = trainer.optimizer.step, []

        def skip_the_second() -> Any:
            calls.append(1)
            return (False, None, None) if len(calls) == 2 else step()

        monkeypatch.setattr(trainer.optimizer, "step", skip_the_second)
        trainer.train()
        assert trainer.num_skipped_steps == 1
        assert trainer.scheduler.num_steps == 3
    rates = [record.scalars["lr"] for record in records(tmp_path)]
    assert rates[1] == rates[0] > rates[2]
    assert [record.scalars["skipped_steps"] for record in records(tmp_path)] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("first_spoiled", "message"),
    [(0, r"step 0 is not finite \(loss sum [0-9.]+, gradient norm nan"), (1, r"step 1 .* gave the same")],
)
def test_a_gradient_that_is_not_a_number_stops_the_run(tmp_path, first_spoiled, message):
    """At the first step by our own check, later by Megatron's machine, which runs the step again first."""
    checkpoints = tmp_path / "checkpoints"
    with Trainer(arguments(tmp_path, "--save", str(checkpoints), "--save-interval", "1"), CPU) as trainer:
        norm = trainer.model[0].module.language_model.decoder.final_layernorm
        norm.weight.register_hook(lambda grad: grad * torch.nan if trainer.step >= first_spoiled else grad)
        with pytest.raises(RuntimeError, match=f"The loss or a gradient of {message}"):
            trainer.train()
    assert len(list(checkpoints.glob("iter*"))) == first_spoiled


@pytest.mark.parametrize("optimizer", [(), ("--use-distributed-optimizer", "--async-save")], ids=["plain", "sharded"])
def test_bf16_trains_and_resumes(tmp_path, optimizer):
    flags = ("--bf16", *optimizer, "--train-iters", "4", "--lr", "3e-3")
    straight = train(arguments(tmp_path / "straight", *flags))
    in_float32 = train(arguments(tmp_path / "float32", *flags[1:]))
    assert straight == pytest.approx(in_float32, rel=0.02)
    save = ("--save", str(tmp_path / "checkpoints"), "--load", str(tmp_path / "checkpoints"), "--exit-interval", "2")
    halves = [train(arguments(tmp_path / name, *flags, *save)) for name in ("first", "second")]
    assert [*halves[0], *halves[1]] == straight


def test_another_order_of_the_data_is_refused_unless_it_starts_over(tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    train(arguments(tmp_path / "first", "--save", checkpoints, "--exit-interval", "1"))
    other = ("--load", checkpoints, "--data-seed", "1")
    with pytest.raises(ValueError, match=r"saved with --data-seed 0, this run has 1.*Resume with the same setting"):
        train(arguments(tmp_path / "refused", *other))
    assert len(train(arguments(tmp_path / "over", *other, "--restart-data"))) == 1


# --- logs --------------------------------------------------------------------------------------------------------


def test_logs_hold_rates_and_validation(tmp_path):
    args = arguments(tmp_path, "--eval-interval", "2", "--train-iters", "4", "--log-interval", "1")
    with Trainer(args, CPU) as trainer:
        trainer.train()
        final = trainer.evaluate()
    for record in records(tmp_path):
        assert record.scalars["samples_per_s"] > 0
        assert record.scalars["tokens_per_s"] == pytest.approx(record.scalars["samples_per_s"] * record.num_tokens)
        assert 0 <= record.scalars["wait_share"] < 1
    lines = (tmp_path / "metrics" / "validation.jsonl").read_text().splitlines()
    validations = [json.loads(line) for line in lines]
    assert [(v["step"], v["num_samples"]) for v in validations] == [(2, 2), (4, 4)]
    assert validations[-1]["loss"] == final != validations[0]["loss"]

    events = EventAccumulator(str(tmp_path / "metrics")).Reload()
    names = ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s", "wait_share", "skipped_steps")
    wanted = {f"train/{name}" for name in names} | {"data/padding", "data/emitted_samples", "validation/loss"}
    assert wanted <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("validation/loss")] == [2, 4]
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx([record.scalars["loss"] for record in records(tmp_path)])


# --- checkpoints -------------------------------------------------------------------------------------------------


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """The written state is that of its step, whatever has been trained since; the last two remain."""
    straight = train(arguments(tmp_path / "straight", "--train-iters", "5"))
    root = tmp_path / "checkpoints"
    save = ("--train-iters", "5", "--save", str(root), "--save-interval", "1", "--async-save")
    assert train(arguments(tmp_path / "saving", *save, "--keep-checkpoints", "2")) == straight
    assert sorted(path.name for path in root.iterdir()) == [
        *("iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt")
    ]
    (root / "latest_checkpointed_iteration.txt").write_text("4")
    assert train(arguments(tmp_path / "resumed", "--train-iters", "5", "--load", str(root))) == straight[4:]


def test_the_next_stage_starts_from_the_weights_alone(tmp_path):
    checkpoints = str(tmp_path / "checkpoints")
    with Trainer(arguments(tmp_path / "one", "--trainable-modules", "adapter", "--save", checkpoints), CPU) as first:
        first.train()
        loss = first.evaluate()
    with Trainer(arguments(tmp_path / "two", "--pretrained-checkpoint", checkpoints), CPU) as second:
        assert second.evaluate() == loss
        assert (second.step, second.num_samples) == (0, 0)
        second.train()
        assert second.evaluate() != loss
    own = str(tmp_path / "own")
    with Trainer(arguments(tmp_path / "two", "--pretrained-checkpoint", checkpoints, "--save", own), CPU) as third:
        third.train()
    with Trainer(arguments(tmp_path / "two", "--pretrained-checkpoint", checkpoints, "--load", own), CPU) as resumed:
        assert resumed.step == 2  # a checkpoint of its own comes first


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    root = str(tmp_path / "checkpoints")
    train(arguments(tmp_path / "one", "--trainable-modules", "adapter", "--train-iters", "1", "--save", root))
    mistakes = {
        ("--load", root): r"saved with --trainable-modules \['adapter'\], this run has \['all'\]",
        ("--load", root, "--trainable-modules", "adapter", "--bf16"): "saved with --bf16 False, this run has True",
        (
            *("--load", root, "--trainable-modules", "adapter", "--use-distributed-optimizer"),
        ): "saved with --use-distributed-optimizer False, this run has True",
        ("--pretrained-checkpoint", str(tmp_path)): "holds no checkpoint",
    }
    for flags, message in mistakes.items():
        with pytest.raises(ValueError, match=message):
            Trainer(arguments(tmp_path / "two", *flags), CPU)


# --- data --------------------------------------------------------------------------------------------------------


def asked(question: str, answer: str, *media: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "media": list(media)}


def picture(color: str, width: int = 84, height: int = 56) -> bytes:
    return image_file(Image.new("RGB", (width, height), color))


def write_data(folder: Path, samples: dict[str, tuple[dict[str, Any], dict[str, bytes]]]) -> Path:
    """A data set of samples, given as json content and image files by key; the first is held out as well."""
    folder.mkdir()
    first = next(iter(samples))
    for split, content_of in {"train": samples, "val": {f"val_{first}": samples[first]}}.items():
        with webdataset.ShardWriter(str(folder / f"{split}-%06d.tar"), encoder=False, verbose=0) as shards:
            for key, (content, parts) in content_of.items():
                shards.write({"__key__": key, "json": json.dumps(content).encode(), **parts})
    prepare(folder)
    return folder


def test_video_offline_packs_text_and_broken_pictures_in_one_run(tmp_path, capfd):
    noise = image_file(Image.effect_noise((200, 200), 90), "JPEG")
    packed = {"packed": [asked("<image>\nWhat?", "A wall.", "a.png"), asked("Why?", "So it is.")]}
    data = write_data(
        tmp_path / "data",
        {
            "picture": (asked("<image>\nWhat is it?", "A field.", "a.png"), {"a.png": picture("green")}),
            "truncated": (asked("<image>\nWhat is it?", "Noise.", "a.jpg"), {"a.jpg": noise[:-2000]}),
            "flat": (asked("<image>\nWhat is it?", "A line.", "a.png"), {"a.png": picture("red", 2000, 4)}),
            "cmyk": (
                asked("<image>\nWhat is it?", "A print.", "a.jpg"),
                {"a.jpg": image_file(Image.new("CMYK", (60, 60)), "JPEG")},
            ),
            "video": (
                asked("<video>\nWhat moves?", "Nothing.", ["a.png", "b.png"]),
                {"a.png": picture("red"), "b.png": picture("blue")},
            ),
            "text": (asked("Say yes.", "Yes."), {}),
            "packed": (packed, {"a.png": picture("grey")}),
        },
    )
    # One epoch: five readable samples, of which one holds two.
    flags = ("--train-iters", "5", "--shuffle-buffer-size", "1")
    with Trainer(arguments(tmp_path, *flags, data=data), CPU) as trainer:
        losses = trainer.train()
        assert trainer.num_samples == 6
    assert all(0 < loss < 20 for loss in losses)
    printed = capfd.readouterr()
    for name in ("truncated", "flat"):
        assert f"sample {name}: " in printed.out + printed.err
    packing = ("--packing-buffer-size", "4", "--seq-length", "300", "--train-iters", "2")
    with Trainer(arguments(tmp_path / "packing", *packing, data=data), CPU) as trainer:
        trainer.train()
        assert trainer.num_samples >= 6


def test_a_sample_does_not_see_its_neighbours_in_a_pack(tmp_path):
    """The same packs with one picture exchanged: only the losses of its own sample change."""

    def samples(color: str) -> dict[str, tuple[dict[str, Any], dict[str, bytes]]]:
        colors = {f"s{i}": "white" for i in range(8)} | {"s3": color}
        return {
            key: (asked("<image>\nWhich colour is this?", "Let me see.", "a.png"), {"a.png": picture(value)})
            for key, value in colors.items()
        }

    losses = []
    for color in ("black", "orange"):
        data = write_data(tmp_path / color, samples(color))
        packing = ("--packing-buffer-size", "8", "--seq-length", "150", "--shuffle-buffer-size", "1")
        args = arguments(tmp_path, *packing, data=data)
        with Trainer(args, CPU) as trainer:
            loader = build_loader(args, aiak_ext.ExtensionConfig.from_args(args), tokenizer_of(args))
            by_sample: dict[str, torch.Tensor] = {}
            while len(by_sample) < 8:
                batch = next(loader)
                assert len(batch.cu_lengths) > 2
                (row,) = run_model(trainer.model[0], MicroBatch.from_batch(batch, CPU)).detach()
                segments = row.split(batch.cu_lengths.diff().tolist())
                by_sample.update(zip(batch.__key__[0].split(","), segments))
            loader.close()
        losses.append(by_sample)
    black, orange = losses
    assert list(black) == list(orange)
    assert [key for key in black if not black[key].equal(orange[key])] == ["s3"]
