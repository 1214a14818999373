"""Real launches of the causal task: from scratch, options, a user's own DeepSpeed JSON, the published command, ..."""

import gzip
import json
import re
import shlex
import shutil
import subprocess

import pytest
import torch
import yaml
from folders import hub_folder
from helpers import BIN, ROOT, completed, environment, launch, metrics, tiny_model, updates
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from zerofit.recipe import ClmRecipe, parse_recipe

LONG = pytest.mark.long
SCRATCH = ["--config_name", "gpt2", "--train_tokenizer_vocab_size", "400", "--block_size", "64",
           "--config_overrides", "n_layer=2,n_head=2,n_embd=32,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
           "--per_device_train_batch_size", "2", "--global_batch_size", "8", "--learning_rate", "1e-3",
           "--make_vocab_size_divisible_by", "256"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text that every machine has, as one short file a document."""
    folder = tmp_path_factory.mktemp("text")
    for file in sorted((ROOT / "zerofit").rglob("*.py")):
        (folder / f"{file.parent.name}_{file.stem}.txt").write_text(file.read_text())
    return str(folder / "*.txt")


@pytest.fixture(scope="module")
def scratch(text, cache, tmp_path_factory):
    """One process from scratch over a whole number of epochs and a bit, with tensorboard and wandb."""
    output = tmp_path_factory.mktemp("scratch") / "run"
    options = ["--train_file", text, "--num_train_epochs", "1.5", "--max_train_samples", "12", "--with_tracking",
               "--sample_tokens", "8", "--profile", "1:2", "--cache_dir", cache]  # fmt: skip
    done = completed(output, *SCRATCH, *options, launcher=True)
    assert "%|" not in done.stderr, "bars of libraries are for terminals"
    return output, metrics(output), done.stdout


def test_the_run_folder(scratch):
    output, _, shown = scratch
    names = {path.name for path in output.iterdir()}
    assert {"recipe.yaml", "strategy.yaml", "environment.json", "metrics.jsonl", "loss.png", "model"} <= names
    assert (output / "loss.png").stat().st_size > 10_000
    assert list(output.rglob("events.out.tfevents*")), "tensorboard"
    assert list(output.rglob("*.wandb")), "wandb, offline"
    recipe = yaml.safe_load((output / "recipe.yaml").read_text())
    assert recipe["learning_rate"] == 1e-3
    assert recipe["precision"] == "fp32"
    again = parse_recipe(ClmRecipe, ["--config", str(output / "recipe.yaml")])
    assert again.to_dict() == recipe, "it can be run again"
    assert "auto" not in (output / "strategy.yaml").read_text()
    environment = json.loads((output / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["seconds_to_first_update"]["first update"] > 0
    assert any("accelerate" in word for word in environment["command"])
    assert (output / "model" / "README.md").read_text().startswith("---\nlibrary_name: transformers")
    for word in ("documents", "tokens trained on", "tokens truncated", "padding", "loss      ", "a sample of what it"):
        assert word in shown


def test_every_update_is_one_line(scratch):
    _, lines, _ = scratch
    assert [line["update"] for line in lines] == list(range(len(lines)))
    needed = {"update", "epoch", "consumed_samples", "loss", "grad_norm", "learning_rate", "tokens_per_s",
              "flops_per_s", "peak_memory_bytes"}  # fmt: skip
    assert needed <= lines[1].keys()
    assert all(line["peak_memory_bytes"] > 10 * 2**20 for line in updates(lines))


def test_an_epoch_is_every_sample_once(scratch):
    _, lines, _ = scratch
    last = lines[-1]
    samples = round(last["consumed_samples"] / last["epoch"])
    assert last["epoch"] == pytest.approx(1.5, abs=0.51 / samples)
    assert last["consumed_samples"] == round(1.5 * samples)
    assert last["update"] == -(-last["consumed_samples"] // 8)
    held = [line["update"] for line in lines if "eval_loss" in line]
    assert held == [0, -(-samples // 8), last["update"]], "before training, at the end of the epoch, at the end"


OTHERWISE = (
    "--loss full --gradient_checkpointing selective --attn_implementation eager --dataloader_num_workers 1".split()
)


@pytest.mark.parametrize(
    ("strategy", "otherwise"),
    [("zero3", OTHERWISE), *(pytest.param(each, [], marks=LONG) for each in ("zero2", "zero3"))],
)
def test_random_weights_are_the_same_under_every_strategy(scratch, text, cache, tmp_path, strategy, otherwise):
    """Also under ZeRO-3, where weights drawn share by share would differ (zero.Init draws them so), and with what
    changes the cost alone."""
    output = tmp_path / "run"
    lines = launch(
        output, *SCRATCH, "--train_file", text, "--max_train_steps", "2", "--max_train_samples", "12", *otherwise,
        "--save_steps", "2", "--sample_tokens", "8", "--cache_dir", cache, strategy=strategy, processes=2,
    )  # fmt: skip
    reference, tolerance = scratch[1], 1e-5 if otherwise else 1e-6
    assert lines[0]["eval_loss"] == pytest.approx(reference[0]["eval_loss"], rel=tolerance)
    for name in ("loss", "grad_norm"):
        assert updates(lines)[0][name] == pytest.approx(updates(reference)[0][name], rel=tolerance)
    for folder in (scratch[0] / "model", output / "model", output / "checkpoints" / "latest" / "model"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(parameter.numel() for parameter in model.parameters())
        rows = model.get_input_embeddings().weight.shape[0]
        assert model.config.vocab_size == rows == 400, "not the 512 that it was trained with"


@LONG  # in one process: unit/test_compilation.py
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "zero1", "zero2", "tp", "pp"])
def test_blocks_are_compiled_under_a_strategy(scratch, text, cache, tmp_path, strategy):
    """Layers of one kind run one graph: of rows with a mask, without one, and without gradients."""
    done = completed(
        tmp_path / "run", *SCRATCH, "--train_file", text, "--num_train_epochs", "1.5", "--max_train_samples", "12",
        "--cache_dir", cache, "--torch_compile", "--gradient_checkpointing", "selective", "--save_steps", "2",
        strategy=strategy, TORCH_COMPILE_OVERRIDE_BACKENDS=">=0:aot_eager",
    )  # fmt: skip
    ours, expected = ([line["loss"] for line in updates(each)] for each in (metrics(tmp_path / "run"), scratch[1]))
    assert len(ours) >= 2
    assert ours == pytest.approx(expected, rel=1e-5)
    assert 1 <= int(re.search(r"^compiled +(\d+) graph", done.stdout, re.MULTILINE)[1]) <= 6
    names = set(load_file(tmp_path / "run" / "model" / "model.safetensors"))
    assert names == set(load_file(scratch[0] / "model" / "model.safetensors"))


def test_updates_are_profiled(scratch):
    """The trace is of two updates; the log has the ten costliest operators."""
    output, _, shown = scratch
    with gzip.open(output / "profile_rank0.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step") for event in events) == 2
    assert "profile_rank0.json.gz" in json.loads((output / "files.json").read_text())["written"]
    logged = shown.splitlines()
    header = next(index for index, line in enumerate(logged) if re.match(r" +Name +Self CPU %", line))
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in logged[header + 2 : header + 12]]
    assert shares == sorted(shares, reverse=True)


def published(folder, of: str) -> str:
    """A pair as it was published (docs/articles.md), for a machine without a GPU: its precision is left open."""
    names = {"zero2": "zero2_config_accelerate.json", "zero3_offload": "zero3_offload_config_accelerate.json"}
    for name in (f"{of}.yaml", names[of]):
        text = (ROOT / "tests" / "published" / name).read_text().replace("/path/to", str(folder))
        text = text.replace("mixed_precision: fp16", "mixed_precision: 'no'")
        text = re.sub('"enabled": (true|"true")', '"enabled": "auto"', text)
        (folder / name).write_text(text)
    return str(folder / f"{of}.yaml")


@pytest.mark.parametrize(("pair", "warmup"), [("zero2", 4), ("zero2", 0), ("zero3_offload", 0)])
@LONG
def test_deepspeeds_scheduler_block_gives_the_recipes_curve(text, cache, tmp_path, pair, warmup):
    """With 2 processes and "auto" everywhere: where accelerate alone would reach zero at half of the run."""
    options = ["--num_warmup_steps", warmup] if warmup else []
    run = [word for word in SCRATCH if word not in ("--global_batch_size", "8")]  # the JSONs say accumulation 1
    done = completed(
        tmp_path / "run", *run, "--train_file", text, "--max_train_steps", "12", *options, "--cache_dir", cache,
        strategy=published(tmp_path, pair), launcher=True,
    )  # fmt: skip
    lines = metrics(tmp_path / "run")
    expected = [1e-3 * (k / warmup if k < warmup else (12 - k) / (12 - warmup)) for k in range(12)]
    assert [line["learning_rate"] for line in updates(lines)] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    effective = yaml.safe_load((tmp_path / "run" / "strategy.yaml").read_text())["deepspeed"]
    assert "scheduler" not in effective
    assert "scheduler: the recipe takes its values over" in done.stdout
    assert "auto" not in json.dumps(effective)


@pytest.mark.long
def test_the_published_command_word_for_word(material, tmp_path):
    """Its names resolve to folders here, as the hub cannot be reached: a small gpt2-xl, and texts of our own."""
    tiny_model("gpt2", vocab_size=3000, n_positions=128).config.save_pretrained(tmp_path / "gpt2-xl")
    shutil.copytree(material / "tokenizers" / "gpt2", tmp_path / "gpt2-xl", dirs_exist_ok=True)
    rows = [{"text": row} for row in (material / "text" / "valid.txt").read_text().splitlines(keepends=True)]
    splits = {"train": rows[:400], "validation": rows[400:420]}
    hub_folder(tmp_path / "wikitext", "wikitext-2-raw-v1", splits)

    published = """accelerate launch train/clm.py --config_name "gpt2-xl" --tokenizer_name "gpt2-xl"
      --dataset_name "wikitext" --dataset_config_name "wikitext-2-raw-v1" --block_size 128
      --output_dir "outputs/clm_deepspeed_stage3_offload__accelerate" --learning_rate 5e-4
      --per_device_train_batch_size 16 --per_device_eval_batch_size 1 --num_train_epochs 1 --with_tracking
      --report_to "wandb" """
    words = shlex.split(published)
    words[0], words[2] = str(BIN / "accelerate"), str(ROOT / "train" / "clm.py")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    output = tmp_path / "outputs" / "clm_deepspeed_stage3_offload__accelerate"
    lines = metrics(output)
    assert lines[-1]["epoch"] == 1.0
    assert updates(lines)[0]["learning_rate"] == 5e-4
    assert list(output.rglob("*.wandb"))
