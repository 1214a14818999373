"""`zerofit doctor`: made-up machines, pairs that contradict a recipe, and the command."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, environment, tiny_model

from zerofit.cli import main
from zerofit.tools.doctor.check import Disk, Installation, Needs, check_machine
from zerofit.tools.doctor.doctor import make_report, read_options
from zerofit.tools.doctor.doctor_report import DoctorReport
from zerofit.tools.machine import Device

GIB = 2**30
A100 = Device("A100", 40 * GIB, 39 * GIB, has_bf16=True)
T4 = Device("T4", 16 * GIB, 15 * GIB, has_bf16=False)
OUTPUT = Disk("outputs/x", free=100 * GIB)
HOST = {"cores": 8, "memory_free": 60 * GIB, "memory": 64 * GIB, "shm": 32 * GIB}
HEALTHY = Installation(**HOST, kind="cuda", devices=(A100, A100), present={"NVIDIA": 2}, output=OUTPUT)
CPU = dataclasses.replace(HEALTHY, devices=(), kind="cpu", present={})
NEEDS = Needs(processes=2, precision="bf16")
RECIPE = """
config_name: gpt2
config_overrides: n_layer=2,n_head=2,n_embd=32,n_positions=64
train_tokenizer_vocab_size: 300
train_file: text.txt
block_size: 32
per_device_train_batch_size: 4
output_dir: out
"""


def check(machine: Installation = HEALTHY, needs: Needs = NEEDS, **variables: str) -> list[tuple[str, str]]:
    return [(found.level, f"{found.what}. {found.remedy}") for found in check_machine(machine, needs, variables)]


def change(machine=HEALTHY, **changes) -> Installation:
    return dataclasses.replace(machine, **changes)


def test_a_healthy_machine():
    assert check() == []
    assert check(CPU, Needs(processes=8, precision="fp32")) == []
    assert check(change(devices=(T4, T4)), dataclasses.replace(NEEDS, precision="fp16")) == []
    assert check(change(CPU, bf16_slowdown=12.4), Needs(precision="fp32")) == []


BUSY = dataclasses.replace(A100, free=10 * GIB)


@pytest.mark.parametrize(
    ("changes", "needs", "level", "words"),
    [
        ({}, {"processes": 4}, "error", ["4 processes", "2 devices", "--num_processes 2"]),
        ({**vars(CPU), "bf16_slowdown": 12.4}, {}, "warning", ["12 times", "--precision fp32"]),
        ({"devices": (T4, T4)}, {}, "warning", ["a T4", "--precision fp16"]),
        ({"devices": (A100, BUSY)}, {}, "warning", ["device 1 (A100): 30.00 GiB of 40.00 GiB"]),
        ({}, {"state_bytes": 100 * GIB}, "error", ["100.00 GiB of each device", "40.00 GiB"]),
        ({}, {"host_bytes": 100 * GIB}, "error", ["100.00 GiB for the state", "64.00 GiB"]),
        ({"shm": 64 * 2**20}, {}, "warning", ["/dev/shm has 64.0 MiB", "--shm-size"]),
        ({}, {"checkpoint_bytes": 101 * GIB}, "error", ["a checkpoint takes 101.00 GiB"]),
        ({}, {"num_machines": 2}, "warning", ["file system", "--output_dir"]),
    ],
)
def test_what_is_wrong_with_a_machine(changes, needs, level, words):
    ((found, said),) = check(change(**changes), dataclasses.replace(NEEDS, **needs))
    assert found == level
    assert all(word in said for word in words), said


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a recipe, data and the strategy pairs, without variables of a launcher."""
    (tmp_path / "clm").mkdir()
    (tmp_path / "clm/mine.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("a text\n" * 50)
    for name in ("accelerate_configs", "ds_configs"):
        (tmp_path / name).mkdir()
        for file in (ROOT / name).iterdir():
            (tmp_path / name / file.name).write_text(file.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", environment(HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"))
    return tmp_path


def examined(*words: str) -> DoctorReport:
    return make_report(*read_options(list(words)), dict(os.environ))


def texts(report: DoctorReport, *levels: str) -> list[str]:
    levels = levels or ("error",)
    return [f"{found.what}. {found.remedy}" for found in report.sorted_findings if found.level in levels]


def values(report: DoctorReport) -> dict[str, tuple]:
    return {value.name: (value.value, value.source) for value in report.values}


def edit(file: Path, **changes) -> Path:
    """Change top-level keys of a YAML or JSON."""
    reads_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if reads_json else yaml.safe_load(file.read_text())
    content |= changes
    file.write_text(json.dumps(content) if reads_json else yaml.safe_dump(content))
    return file


MINE = ("--config", "clm/mine.yaml", "--num_processes", "2")
ZERO2 = ("--strategy", "zero2")


def test_a_sound_run(folder, capsys):
    report = examined(*MINE, *ZERO2, "--global_batch_size", "32")
    assert report.exit_code == 0, texts(report)
    assert report.command.startswith("accelerate launch --config_file accelerate_configs/zero2.yaml")
    assert report.command.endswith("train/clm.py --config clm/mine.yaml --global_batch_size 32")
    found = values(report)
    assert found["global_batch_size"] == (32, "--global_batch_size")
    assert found["gradient_accumulation_steps"] == (4, "from global_batch_size")
    assert found["per_device_train_batch_size"] == (4, "clm/mine.yaml, line 7")
    assert found["precision"] == ("fp32", "default")
    assert found["num_machines"] == (1, "accelerate_configs/zero2.yaml")


def test_contradictions_of_three_files_at_once(folder, capsys):
    edit(folder / "accelerate_configs/zero2.yaml", mixed_precision="bf16")
    contradictions = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    edit(folder / "ds_configs/zero2.json", **contradictions, bf16={"enabled": False}, fp16={"enabled": False})
    more = "max_grad_norm: 1\nprecision: fp16\ngradient_accumulation_steps: 4\n"
    (folder / "clm/mine.yaml").write_text(RECIPE + more)
    report = examined(*MINE, *ZERO2)
    assert report.exit_code == 1
    said = "\n".join(texts(report))
    for words in (
        "bf16 (accelerate_configs/zero2.yaml)",
        "fp32 (ds_configs/zero2.json)",
        "fp16 (clm/mine.yaml, line",
        "train_micro_batch_size_per_gpu = 8, and per_device_train_batch_size = 4 (clm/mine.yaml, line 7)",
        "gradient_accumulation_steps = 2, and gradient_accumulation_steps = 4 (clm/mine.yaml, line",
        "gradient_clipping = 0.5, and max_grad_norm = 1.0 (clm/mine.yaml, line",
    ):
        assert words in said


def test_what_a_flag_takes_out_is_noted(folder, capsys):
    (folder / "clm/mine.yaml").write_text(RECIPE + "sample_tokens: 5\nsample_prompt: x\n")
    edit(folder / "ds_configs/zero2.json", gradient_clipping=0.5)
    report = examined(*MINE, *ZERO2, "--sample_tokens", "0", "--max_grad_norm", "1")
    assert not texts(report), "a flag wins"
    said = "\n".join(texts(report, "note"))
    assert "sample_prompt = 'x' (clm/mine.yaml, line 10) is left out" in said
    assert "gradient_clipping = 0.5 is left out: --max_grad_norm says otherwise" in said


def test_a_broken_recipe_and_a_broken_pair_at_once(folder, capsys):
    (folder / "clm/mine.yaml").write_text(RECIPE + "learning_rat: 1\nseed: -1\nlora_r: 4\nstrategy: zero1\n")
    edit(folder / "accelerate_configs/zero2.yaml", deepspeed_confg={})
    report = examined(*MINE, *ZERO2)
    assert report.exit_code == 2
    said = "\n".join(texts(report))
    for words in (
        "learning_rat is not an option. Did you mean learning_rate?",
        "seed = -1",
        "no effect without --lora",
        "strategy = 'zero1'",
        "deepspeed_confg",
    ):
        assert words in said


def test_checks_of_a_run_before_its_data(folder, capsys):
    """The model's positions, its layout, its template and its adapter, all in one go; nothing is read or loaded."""
    (folder / "model").mkdir()
    tiny_model("llama", vocab_size=300, max_position_embeddings=512).config.save_pretrained(folder / "model")
    command = ("--task", "clm", "--model_name_or_path", "model", "--train_file", "text.txt")
    found = texts(examined(*command, "--block_size", "4096"), "error")
    assert any("block_size = 4096 (--block_size):" in text for text in found)
    assert any("'model'" in text and "tokenizer" in text.lower() for text in found), "it has none"
    wrong = "--block_size 4096 --chat_template no --lora_target_modules foo --optim adamw8 --global_batch_size 7 "
    wrong += "--validation_file none.txt"
    report = examined(*command, "--train_tokenizer_vocab_size", "300", "--lora", *wrong.split())
    found = "\n".join(texts(report, "error"))
    for name in wrong.split()[::2]:
        assert f"{name[2:]} = " in found, found
    assert report.exit_code == 2


def test_variables_that_an_earlier_launch_has_left(folder, capsys):
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    report = examined("--strategy", "ddp", "--num_processes", "2")
    assert "unset ACCELERATE_USE_FSDP" in "\n".join(texts(report, "warning"))
    assert "fsdp_version = 1 is not supported" in "\n".join(texts(report))


def test_accelerates_own_refusals(folder, capsys):
    said = texts(examined("--strategy", "single", "--num_processes", "4"))[0]
    assert "starts one process, and num_processes = 4" in said
    edit(folder / "accelerate_configs/ddp.yaml", num_procesess=2)
    (said,) = texts(examined("--strategy", "ddp", "--num_processes", "2"))
    assert said.startswith("accelerate launch refuses accelerate_configs/ddp.yaml: ")
    assert "num_procesess" in said


def test_weights_that_are_elsewhere(folder, capsys):
    words = ("--task", "clm", "--model_name_or_path", "someone/model", "--train_file", "text.txt", "--strategy", "ddp")
    report = examined(*words)
    assert report.exit_code == 1
    assert "unset HF_HUB_OFFLINE" in "\n".join(texts(report))
    report = examined(*words)


def test_several_machines(folder, capsys):
    report = examined("--strategy", "zero2", "--num_processes", "3", "--num_machines", "2")
    assert "num_processes = 3 on 2 machines" in "\n".join(texts(report))


def test_the_machines_of_a_scheduler(folder, monkeypatch):
    for name, value in {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job"}.items():
        monkeypatch.setenv(name, value)
    said = "\n".join(texts(examined("--strategy", "zero2"), "note"))
    assert "machine 1 of 2, the first at job-node-0-0.job" in said
    assert "PET_NNODES = 2" in said


def test_bad_input(folder, capsys):
    for words, said in (
        (["--stratgy", "zero2"], "--stratgy is not an option. Did you mean strategy?"),
        (["--config", "ds_configs/zero2.json"], "the task is unknown"),
    ):
        assert main(["doctor", *words]) == 2
        assert said in capsys.readouterr().err
    report = examined(*MINE, "--strategy", "zero9")
    assert report.exit_code == 2
    assert "there is no file accelerate_configs/zero9.yaml" in texts(report)[0]
