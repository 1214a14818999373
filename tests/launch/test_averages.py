"""ema_decay: the mean of the weights, computed again from the checkpoint of each update, under every strategy."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import completed, cut_after
from safetensors.torch import load_file

DECAY = 0.6  # the mean is far from the weights, and the first weights are still in it after 6 updates
LAYOUTS = {  # processes, micro-batch
    "single": (1, 4), "ddp": (2, 4), "zero1": (2, 4), "zero2": (2, 4), "zero3": (2, 4), "fsdp2": (2, 4),
    "hsdp": (4, 2), "zero2_offload": (2, 4), "zero3_offload": (2, 4), "tp": (2, 4), "tp_zero3": (4, 4), "pp": (2, 4),
    "sp": (2, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(llama, material, cache, tmp_path_factory):
    """run(strategy, output, further flags) trains 6 updates, with a checkpoint of each."""
    made = tmp_path_factory.mktemp("averages")

    def train(strategy: str, output: Path | None = None, *flags: str) -> Path:
        output, (processes, micro_batch) = output or made / "-".join((strategy, *flags)), LAYOUTS[strategy]
        if not (output / "model").is_dir():
            completed(
                output, "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size",
                "64", "--max_train_samples", "60", "--max_eval_samples", "5", "--max_train_steps", "6", "--save_steps",
                "1", "--learning_rate", "1e-2", "--weight_decay", "0.1", "--precision", "fp32", "--global_batch_size",
                "8", "--per_device_train_batch_size", micro_batch, "--cache_dir", cache, "--ema_decay", DECAY, *flags,
                strategy=strategy, processes=processes,
            )  # fmt: skip
        return output

    return train


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check_average(output: Path, average: dict[str, torch.Tensor]) -> None:
    """That of the run is the mean of the first weights and of those of each update."""
    for update in range(1, 7):
        for name, tensor in weights_in(output / "checkpoints" / f"update_{update:08}" / "model").items():
            average[name] = DECAY * average[name].float() + (1 - DECAY) * tensor
    exported, last = weights_in(output / "model" / "ema"), weights_in(output / "model")
    assert exported.keys() == last.keys() == average.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7, msg=name)
        assert (tensor - last[name]).abs().max() > 1e-3, "it is not the last weights"


@pytest.mark.long
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_it_is_the_mean_of_all_updates(run, llama, strategy):
    check_average(run(strategy), weights_in(llama))


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "legs"),
    [
        ("zero2", [(2, "zero3"), (4, "fsdp2")]),
        ("fsdp2", [(2, "single"), (4, "zero1")]),
        ("tp", [(2, "pp"), (4, "ddp")]),
        ("zero3", [(3, "zero2_offload")]),
    ],
)
def test_it_goes_on_under_another_strategy(run, tmp_path, begun, legs):
    whole = run(begun)
    output = tmp_path / "run"
    shutil.copytree(whole, output, symlinks=True)
    for update, strategy in legs:
        cut_after(output, update)
        run(strategy, output)
        ours, theirs = (weights_in(each / "model" / "ema") for each in (output, whole))
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-5, msg=name)
