"""What `zerofit plan` prints: remedies of what does not fit, parts that add up, and the examples of its pages."""

import json
import re
import shlex
from pathlib import Path

import pytest

from zerofit.cli import main
from zerofit.recipe.files import parse_bytes
from zerofit.tools.plan import plan
from zerofit.tools.plan.joint_search import option_words

DOCS = Path(__file__).resolve().parents[2] / "docs"
LLAMA = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096,
         "max_position_embeddings": 8192}  # fmt: skip
T5 = "d_model=128,d_ff=512,num_layers=6,num_decoder_layers=6,num_heads=4,vocab_size=1024,d_kv=32"
BERT = "hidden_size=128,num_hidden_layers=12,num_attention_heads=4,intermediate_size=512,vocab_size=1024"
OF_BERT = ["--task", "cls", "--config_name", "bert-base-uncased", "--config_overrides", BERT]
OF_T5 = ["--task", "seq2seq", "--config_name", "t5-large", "--config_overrides", T5]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list[str]:
    """Flags of a recipe that begins with weights: their configuration alone is read."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    return ["--task", "clm", "--model_name_or_path", str(folder), "--precision", "bf16", "--gpu", "a100-40gb"]


def planned(capsys, flags: list[str]) -> dict:
    assert main(["plan", *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


LONG = pytest.mark.long


@pytest.mark.parametrize(("flags", "strategy", "expected"), [
    ("--lora --block_size 1024 --gpu_memory 860MiB", "single", "--gradient_checkpointing"),
    pytest.param("--block_size 64 --host_memory 100MiB --gpu_memory 1GiB", "zero2_offload", "--lora", marks=LONG),
    pytest.param("--block_size 64 --num_gpus 2 --gpu_memory 1060MiB", "ddp", "--lora", marks=LONG),
    pytest.param("--block_size 256 --gpu_memory 820MiB --batch_sizes 1,8 --lora", "single",
                 "--gradient_checkpointing", marks=LONG),
    pytest.param("--task dpo --lora --block_size 1024 --gpu_memory 1GiB", "single",
                 "--gradient_checkpointing", marks=LONG),
    pytest.param("--lora --block_size 8192 --gradient_checkpointing --gpu_memory 1090MiB", "zero3",
                 "--per_device_eval_batch_size 1", marks=LONG),
    pytest.param("--lora --lengths 4k,8k --gpu_memory 1GiB", "single",
                 "--gradient_checkpointing --per_device_eval_batch_size 1", marks=LONG),
    pytest.param("--block_size 64 --gpu_memory 645MiB", "single", None, marks=LONG),
])  # fmt: skip
def test_a_remedy_is_what_a_plan_with_it_finds(weights, capsys, flags, strategy, expected):
    flags = [*weights[2 * ("--task" in flags) :], *flags.split(), "--strategies", strategy]
    found = planned(capsys, flags)["remedies"][strategy]
    assert next((" ".join(option_words(one["options"])) for one in found), None) == expected
    for one in found[:1]:
        again = planned(capsys, [*flags, *option_words(one["options"])])["predictions"]
        keys = ("length", "per_device_train_batch_size", "needed_bytes", "tokens_per_s", "fits")
        assert {name: one[name] for name in keys} in [{name: each[name] for name in keys} for each in again]
        assert one["fits"]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*OF_T5, "--max_source_length", "1024", "--gpu_memory", "900MiB"], marks=LONG, id="seq2seq"),
        pytest.param([*OF_BERT, "--gpu_memory", "760MiB", "--max_length", "512"], marks=LONG, id="cls"),
        pytest.param([*OF_BERT, "--gpu", "cpu", "--gpu_memory", "110MiB", "--max_length", "512"], id="cls on a CPU"),
    ],
)
def test_each_task_hears_of_remedies_on_80_columns(flags, capsys, monkeypatch):
    monkeypatch.setattr(plan, "screen_width", lambda: 80)
    assert main(["plan", *flags, "--strategies", "single"]) == 0
    said = capsys.readouterr().out
    assert "    with --gradient_checkpointing: " in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("device", ["--gpu a100-40gb --num_gpus 2", "--gpu cpu --gpu_memory 4GiB"])
def test_the_parts_add_up_to_the_total(device, capsys):
    assert main(["plan", *OF_BERT, *device.split(), "--strategies", "zero2", "--batch_sizes", "8"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory of"))
    total, *parts = re.findall(r"([\d,.]+ [GMK]iB)", line.partition("; nvidia-smi")[0])
    needed, *parts = (parse_bytes(text.replace(",", "").replace(" ", "")) for text in (total, *parts))
    assert len(parts) >= 5
    assert sum(parts) == pytest.approx(needed, abs=0.006 * 2**30 * (len(parts) + 1))


@pytest.mark.parametrize("page", [pytest.param("plan.md", marks=LONG), "ja/plan.md"])
def test_the_printed_example_is_what_the_program_prints(page, capsys, monkeypatch):
    text = (DOCS / page).read_text(encoding="utf-8")
    command, example = re.search(r"`(zerofit plan [^`]*)`[^`]*\n```\n(.*?)```\n", text, re.DOTALL).groups()
    if page == "ja/plan.md":  # the same, and made once
        assert f"`{command}`" in (DOCS / "plan.md").read_text().replace("\n--host_memory", " --host_memory")
        assert f"```\n{example}```" in (DOCS / "plan.md").read_text()
        return
    monkeypatch.setattr(plan, "screen_width", lambda: 80)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == example


def test_what_auto_compiles_is_said_with_both_speeds(weights, capsys):
    flags = [*weights, "--block_size", "64", "--num_gpus", "1", "--batch_sizes", "2", "--strategies"]
    for words, expected in (
        ("single --max_train_steps 4000", "torch_compile = auto, blocks under single (4,000 updates in bf16"),
        ("zero3", "compiles nothing under zero3: zero3 gathers"),
        ("single --torch_compile false", ""),
    ):
        assert main(["plan", *flags, *words.split()]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert expected in said
        assert ("torch_compile" in said) == bool(expected)
        if "blocks" in expected:
            seconds = re.search(r"([\d.]+) s/update in [\d.]+ [KMG]iB; the table is without, ([\d.]+) s", said)
            assert float(seconds[1]) < float(seconds[2])
