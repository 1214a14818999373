"""Every launcher starts every script alike: python, torchrun, accelerate launch, zerofit launch and deepspeed.

A launch is compared with the same recipe in one process.
"""

import json
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from helpers import BIN, ROOT, check_alike, environment, metrics, write_records
from ranks import free_port

STORED = ROOT / "tests" / "material" / "checkpoints" / "1-0.1.0"  # tiny random models, and a text
MODEL = ("--model_name_or_path", f"{STORED}/gpt2-single/checkpoints/update_00000003/model", "--block_size", "24")
TEXT = ("--train_file", f"{STORED}/text.txt", "--max_eval_samples", "3")
T5 = "d_model=8,d_kv=4,d_ff=16,num_layers=1,num_heads=2,dropout_rate=0,vocab_size=40"
GPT2 = "n_embd=8,n_layer=1,n_head=2,vocab_size=40,n_positions=128,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
BERT = (
    "hidden_size=8,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,hidden_dropout_prob=0,"
    "attention_probs_dropout_prob=0,vocab_size=40"
)
TASKS = {
    "clm": (*MODEL, *TEXT),
    "distill": (*MODEL, *TEXT, "--teacher", f"{STORED}/llama-ddp/checkpoints/update_00000003/model"),
    "dpo": ("--model_type", "gpt2", "--config_overrides", GPT2, "--tokenizer_name", "{tokenizer}", "--train_file",
            "{pairs}", "--chat_template", "instruction", "--block_size", "128"),
    "cls": ("--model_type", "bert", "--config_overrides", BERT, "--tokenizer_name", f"{STORED}/tokenizer",
            "--train_file", "{classes}", "--max_length", "16"),
    "seq2seq": ("--model_type", "t5", "--config_overrides", T5, "--tokenizer_name", "{tokenizer}",
                "--train_file", "{translations}", "--max_source_length", "16", "--max_target_length", "8",
                "--val_max_target_length", "4"),
}  # fmt: skip
EVERY = ("--max_train_steps", "2", "--global_batch_size", "4", "--per_device_train_batch_size", "2",
         "--learning_rate", "1e-3", "--save_strategy", "no", "--precision", "fp32")  # fmt: skip
# {launcher: the exit code of a refused option; torchrun and accelerate launch have 1 for each code of a script}
LAUNCHERS = {"python": 2, "torchrun": 1, "accelerate": 1, "zerofit": 2, "deepspeed": 2}
TABLE = [
    (launcher, task, strategy)
    for launcher in LAUNCHERS
    for task in TASKS
    for strategy in (("single",) if launcher == "python" else ("ddp", "zero2"))
]


def command(launcher: str, task: str, strategy: str) -> list[str]:
    """What is typed before the options of a script."""
    program, named = str(ROOT / "train" / f"{task}.py"), ["--strategy", strategy]
    return {
        "python": [BIN / "python", program],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node", "2", program, *named],
        "accelerate": [BIN / "accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
                       "--main_process_port", "0", program],
        "zerofit": [BIN / "zerofit", "launch", "--num_processes", "2", *named, program],
        "deepspeed": [BIN / "deepspeed", "--num_gpus", "2", "--master_port", free_port(), program, *named],
    }[launcher]  # fmt: skip


def typed(output: Path, launcher: str, task: str, strategy: str, *options: str) -> subprocess.CompletedProcess:
    words = [*command(launcher, task, strategy), "--output_dir", output, *options]
    variables = environment(DS_ACCELERATOR="cpu", PATH=f"{BIN}:{os.environ['PATH']}")
    return subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=300, env=variables)


@pytest.fixture(scope="module")
def options(tmp_path_factory, cache) -> dict[str, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("records")
    lines = (STORED / "text.txt").read_text().splitlines()
    pairs = [{"instruction": a[:9], "chosen": b[:9], "rejected": f"{b[-9:]} x"} for a, b in pairwise(lines)]
    classes = [{"text": line[:15], "label": "the" in line[:15]} for line in lines]
    translations = [{"source": line[:12], "target": line[12:18]} for line in lines]
    tokenizer = Path(shutil.copytree(STORED / "tokenizer", folder / "tokenizer"))
    about = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({**about, "pad_token": "<end>"}))  # decoders begin so
    names = {
        "tokenizer": tokenizer,
        "pairs": write_records(folder / "pairs.jsonl", pairs),
        "classes": write_records(folder / "classes.jsonl", classes),
        "translations": write_records(folder / "translations.jsonl", translations),
    }
    return {
        task: (*(word.format(**names) if word[0] == "{" else word for word in words), *EVERY, "--cache_dir", cache)
        for task, words in TASKS.items()
    }


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "task", "strategy"), TABLE)
def test_every_launcher_starts_every_script_alike(launcher, task, strategy, options, launched_once, tmp_path):
    done = typed(tmp_path / task, launcher, task, strategy, *options[task])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reference = launched_once(task, *options[task], task=task, strategy="single", processes=1)
    check_alike(metrics(tmp_path / task), metrics(reference))
    recipe, expected = (yaml.safe_load((run / "recipe.yaml").read_text()) for run in (tmp_path / task, reference))
    same = recipe.keys() - {"strategy", "output_dir"}
    assert len(same) > 50
    assert {name: recipe[name] for name in same} == {name: expected[name] for name in same}
    strategies = yaml.safe_load((tmp_path / task / "strategy.yaml").read_text())
    assert (strategies["name"], strategies["num_processes"]) == (strategy, 1 if launcher == "python" else 2)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=() if name in ("deepspeed", "zerofit") else pytest.mark.long) for name in LAUNCHERS],
)
def test_an_option_is_refused_alike(launcher, options, tmp_path):
    """Nothing is imported for it. The record has the code 2 also where the launcher ends with another."""
    output = tmp_path / "refused"
    output.mkdir()
    task = list(TASKS)[list(LAUNCHERS).index(launcher)]
    strategy = "single" if launcher == "python" else "ddp"
    done = typed(output, launcher, task, strategy, *options[task], "--learning_rat", "1")
    assert "--learning_rat is not an option" in done.stderr + done.stdout
    assert done.returncode == LAUNCHERS[launcher]
    assert json.loads((output / "environment.json").read_text())["exit_code"] == 2
