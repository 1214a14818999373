"""`zerofit doctor`: made-up machines, pairs that contradict a recipe, and the command."""

import dataclasses
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, environment, main_of, tiny_model

from zerofit import __version__
from zerofit.cli import main
from zerofit.record import environment as described
from zerofit.tools.doctor.doctor import make_report, read_doctor_options
from zerofit.tools.doctor.examine import Installation, check_machine
from zerofit.tools.doctor.report import DoctorReport
from zerofit.tools.machine import Device

GIB = 2**30
A100 = Device("A100", 40 * GIB, 39 * GIB, has_bf16=True)
BUSY = dataclasses.replace(A100, free=10 * GIB)
T4 = Device("T4", 16 * GIB, 15 * GIB, has_bf16=False)
HOST = {"cores": 8, "memory_free": 60 * GIB, "memory": 64 * GIB, "shm": 32 * GIB}
OUTPUT = {"output": "outputs/x", "disk_free": 100 * GIB}
HEALTHY = Installation(**HOST, **OUTPUT, kind="cuda", devices=(A100, A100), present={"NVIDIA": 2})
CPU = dataclasses.replace(HEALTHY, devices=(), kind="cpu", present={})
RECIPE = """
config_name: gpt2
config_overrides: n_layer=2,n_head=2,n_embd=32,n_positions=64
train_tokenizer_vocab_size: 300
train_file: text.txt
block_size: 32
per_device_train_batch_size: 4
output_dir: out
"""


@pytest.mark.parametrize(
    ("changes", "needs", "level", "words"),
    [
        ({}, {"processes": 4}, "error", ["4 processes", "2 devices", "--num_processes 2"]),
        ({}, {"processes": 1}, "note", ["2 devices", "--num_processes 2 for all of them"]),
        ({**vars(CPU), "present": {"NVIDIA": 2}}, {}, "warning", ["CUDA_VISIBLE_DEVICES = ''", "2 NVIDIA GPUs"]),
        ({**vars(CPU), "cores": 1}, {}, "warning", ["2 processes oversubscribe 1 core", "--num_processes 1"]),
        ({**vars(CPU), "bf16_slowdown": 12.4}, {}, "warning", ["12 times", "--precision fp32"]),
        ({"devices": (T4, T4)}, {}, "warning", ["a T4", "--precision fp16"]),
        ({"devices": (A100, BUSY)}, {}, "warning", ["device 1 (A100): 30.00 GiB of 40.00 GiB"]),
        ({"shm": 64 * 2**20}, {}, "warning", ["/dev/shm has 64.0 MiB", "--shm-size"]),
        ({"disk_free": 2**20}, {}, "warning", ["outputs/x: only 1.0 MiB free", "--output_dir"]),
        ({}, {"num_machines": 2}, "warning", ["file system", "--output_dir"]),
    ],
)
def test_what_is_wrong_with_a_machine(changes, needs, level, words):
    machine, needs = dataclasses.replace(HEALTHY, **changes), {"processes": 2, "precision": "bf16", **needs}
    ((found, said),) = check_machine(machine, {"CUDA_VISIBLE_DEVICES": ""}, **needs)
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
    return make_report(*read_doctor_options(list(words)), dict(os.environ))


def values(report: DoctorReport) -> dict[str, tuple]:
    return {name: (value, source) for name, value, source in report.values}


def edit(file: Path, **changes) -> Path:
    """Change top-level keys of a YAML or JSON."""
    reads_json = file.suffix == ".json"
    content = json.loads(file.read_text()) if reads_json else yaml.safe_load(file.read_text())
    content |= changes
    file.write_text(json.dumps(content) if reads_json else yaml.safe_dump(content))
    return file


MINE = ("--config", "clm/mine.yaml", "--num_processes", "2")
ZERO2 = ("--strategy", "zero2")


def test_a_sound_run(folder):
    report = examined(*MINE, *ZERO2, "--global_batch_size", "32")
    assert report.exit_code == 0, report.messages("error")
    assert report.command.startswith("accelerate launch --config_file accelerate_configs/zero2.yaml")
    assert report.command.endswith("train/clm.py --config clm/mine.yaml --global_batch_size 32")
    found = values(report)
    assert found["global_batch_size"] == (32, "--global_batch_size")
    assert found["gradient_accumulation_steps"] == (4, "from global_batch_size")
    assert found["per_device_train_batch_size"] == (4, "clm/mine.yaml, line 7")
    assert found["precision"] == ("fp32", "default")
    assert found["num_machines"] == (1, "accelerate_configs/zero2.yaml")


def test_contradictions_of_three_files_at_once(folder):
    edit(folder / "accelerate_configs/zero2.yaml", mixed_precision="bf16")
    contradictions = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    edit(folder / "ds_configs/zero2.json", **contradictions, bf16={"enabled": False}, fp16={"enabled": False})
    more = "max_grad_norm: 1\nprecision: fp16\ngradient_accumulation_steps: 4\n"
    (folder / "clm/mine.yaml").write_text(RECIPE + more)
    report = examined(*MINE, *ZERO2)
    assert report.exit_code == 1
    said = "\n".join(report.messages("error"))
    for words in (
        "bf16 (accelerate_configs/zero2.yaml)",
        "fp32 (ds_configs/zero2.json)",
        "fp16 (clm/mine.yaml, line",
        "train_micro_batch_size_per_gpu = 8, and per_device_train_batch_size = 4 (clm/mine.yaml, line 7)",
        "gradient_accumulation_steps = 2, and gradient_accumulation_steps = 4 (clm/mine.yaml, line",
        "gradient_clipping = 0.5, and max_grad_norm = 1.0 (clm/mine.yaml, line",
    ):
        assert words in said


def test_a_broken_recipe_and_a_broken_pair_at_once(folder):
    (folder / "clm/mine.yaml").write_text(RECIPE + "learning_rat: 1\nseed: -1\nlora_r: 4\nnum_processes: 3\n")
    edit(folder / "accelerate_configs/zero2.yaml", deepspeed_confg={})
    report = examined(*MINE, *ZERO2)
    assert report.exit_code == 2
    said = "\n".join(report.messages("error"))
    assert "learning_rat is not an option. Did you mean learning_rate?" in said
    for words in ("num_processes is not", "seed = -1", "lora_r has no effect without lora", "deepspeed_confg"):
        assert words in said


def test_checks_of_a_run_before_its_data(folder):
    """The model's positions, its layout, its template and its adapter, all in one go; nothing is read or loaded."""
    (folder / "model").mkdir()
    tiny_model("llama", vocab_size=300, max_position_embeddings=512).config.save_pretrained(folder / "model")
    command = ("--task", "clm", "--model_name_or_path", "model", "--train_file", "text.txt")
    found = examined(*command, "--block_size", "4096").messages("error")
    assert any("block_size = 4096 (--block_size):" in text for text in found)
    assert any("'model'" in text and "tokenizer" in text.lower() for text in found), "it has none"
    wrong = "--block_size 4096 --chat_template no --lora_target_modules foo --optim adamw8 --global_batch_size 7 "
    wrong += "--validation_file none.txt"
    report = examined(*command, "--train_tokenizer_vocab_size", "300", "--lora", *wrong.split())
    found = "\n".join(report.messages("error"))
    for name in wrong.split()[::2]:
        assert f"{name[2:]} = " in found, found
    assert report.exit_code == 2


def test_variables_that_an_earlier_launch_has_left(folder):
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "RANK": "0"}
    report = examined("--strategy", "ddp", "--num_processes", "2")
    (warning,) = report.messages("warning")
    assert "unset ACCELERATE_USE_FSDP" in warning
    assert "keep one" in "\n".join(report.messages("error"))
    del os.environ["ACCELERATE_USE_FSDP"]
    assert "unset RANK" in "\n".join(examined("--strategy", "single").messages("warning"))


def test_what_accelerate_reads_without_a_strategy(folder):
    """The user's own file, as for a launch without --config_file; else ddp for several processes."""
    report = examined(*MINE)
    assert values(report)["strategy"] == ("ddp", "accelerate_configs/ddp.yaml")
    (folder / "hf/accelerate").mkdir(parents=True)
    file = folder / "hf/accelerate/default_config.yaml"
    pair = (folder / "accelerate_configs/zero1.yaml").read_text()
    file.write_text(pair.replace("ds_configs", f"{folder}/ds_configs"))
    report = examined("--config", "clm/mine.yaml")
    assert f"{file}: accelerate launch reads it" in "\n".join(report.messages("note"))
    assert values(report)["num_processes"] == (2, str(file))
    assert report.command.startswith(f"accelerate launch --config_file {file} --num_processes 2 ")


def test_a_json_as_under_torchrun(folder):
    report = examined(*MINE, "--deepspeed_config", "ds_configs/zero1.json", "--max_grad_norm", "2")
    assert report.exit_code == 0, report.messages("error")
    assert report.command.startswith("torchrun --nproc_per_node 2 ")
    assert report.command.endswith("clm/mine.yaml --max_grad_norm 2.0 --strategy ds_configs/zero1.json")
    assert values(report)["strategy"] == ("zero1", "ds_configs/zero1.json")


def test_bad_input(folder, capsys):
    for words, said in (
        (["--stratgy", "zero2"], "--stratgy is not an option. Did you mean strategy?"),
        (["--config", "ds_configs/zero2.json"], "the task is unknown"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ):
        assert main(["doctor", *words]) == 2
        assert said in capsys.readouterr().err
    report = examined(*MINE, "--strategy", "zero9")
    assert report.exit_code == 2
    assert "there is no file accelerate_configs/zero9.yaml" in report.messages("error")[0]


# ------------------------------------------------------------------------------------------------------------ versions


def test_a_version_outside_the_bounds_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    """Of the packages that everybody has; a run says it before it imports them, and so does zerofit doctor."""
    assert described.untried_versions() == []
    needed = ["torch<2.3,>=2.2", "pytest", "peft>=0.1", 'pyyaml<1; extra == "x"', "not-there>=1", "tqdm>=99"]
    monkeypatch.setattr(described, "requires", lambda name: needed)
    (line,) = described.untried_versions()
    installed = f"torch {version('torch')}, tqdm {version('tqdm')}"
    assert line == f"zerofit {__version__} was not tried with {installed}: pip install 'torch<2.3,>=2.2' 'tqdm>=99'"
    assert ("warning", line) in make_report(*read_doctor_options([]), {}).findings
    words = f"--config_name gpt2 --tokenizer_name x --train_file {ROOT}/README.md --strategy x --output_dir {tmp_path}"
    assert main_of("clm")(words.split()) == 2
    assert f"warning   {line}" in capsys.readouterr().out
