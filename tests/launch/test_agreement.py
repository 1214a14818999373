"""Same weights, same data, same global batch: the same loss, gradient norm and learning rate in every update.

Strategy pairs, launched for real with 2 CPU processes in fp32 from the same pretrained weights, against one process,
for all three tasks. A core of the table runs every time; `-m "long or not long"` tries every pair with every case.
Each run is launched once and all tests here read its record. The table that comes out is written to
outputs/tests/agreement.md (a copy of the whole one lies in docs/measurements/agreement.md).
"""

import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import (
    ROOT,
    check_same_weights,
    completed,
    cut_after,
    largest_differences,
    launch,
    load_texts,
    loss_of_transformers,
    metrics,
    tiny_deberta,
    tiny_t5,
    updates,
    write_records,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BlenderbotTokenizer,
)

from zerofit.data.tables import random_split
from zerofit.recipe import ClmRecipe

RTOL = 1e-5
LAYOUTS = {  # strategy, processes, micro-batch; the accumulation follows from the global batch of 8
    "1 process, accumulation 4": ("single", 1, 2),
    "1 process, accumulation 2": ("single", 1, 4),
    "ddp": ("ddp", 2, 2),
    "zero1": ("zero1", 2, 2),
    "zero2": ("zero2", 2, 2),
    "zero3": ("zero3", 2, 2),
    "zero2_offload": ("zero2_offload", 2, 2),
    "zero3_offload": ("zero3_offload", 2, 2),
    "zero2_plain": ("zero2_plain", 2, 2),
    "zero3_offload_optimizer": ("zero3_offload_optimizer", 2, 2),
    "fsdp2": ("fsdp2", 2, 2),
    "hsdp": ("hsdp", 4, 1),
    "sp": ("sp", 2, 2),
    "sp x dp": ("sp", 4, 2),
    "tp": ("tp", 2, 2),
    "tp x dp": ("tp", 4, 2),
    "tp_zero2 x dp": ("tp_zero2", 4, 2),
    "tp_zero3 x dp": ("tp_zero3", 4, 2),
    "pp": ("pp", 2, 2),
    "pp x dp": ("pp", 4, 2),
    "3d": ("3d", 4, 2),
}
REFERENCE, *OTHERS = LAYOUTS
SPLIT_ROWS = ("packed", "padded", "preferences", "tokens", "smoothed", "averaged", "streamed", "resized")
SPLIT_LAYERS = (*SPLIT_ROWS, "untied", "gpt2", "neox")
SPLIT = {  # of model parallelism: processes of a replica, and the cases
    "sp": (2, (*SPLIT_ROWS, "muon")),
    "tp": (2, SPLIT_LAYERS),
    "pp": (2, SPLIT_LAYERS),
    "3d": (4, SPLIT_LAYERS),
}
FIGURES = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Case:
    """What is trained: a task on some data, from weights that the fixture `weights` has."""

    task: str
    updates: int
    flags: tuple[str, ...]
    core: tuple[str, ...] = ()  # the layouts that every test run tries; the marker `long` adds the others
    learning_rate: float = 5e-4


PAIRS = ("--train_file", "{material}/dialogue/keyed.json", "--max_source_length", "48", "--max_target_length", "24",
         "--max_train_samples", "300", "--max_eval_samples", "11", "--num_beams", "2",
         "--per_device_eval_batch_size", "3", "--val_min_target_length", "4",
         "--val_max_target_length", "12")  # fmt: skip
SCRATCH = ("--train_tokenizer_vocab_size", "301", "--train_file", "{material}/text/train.txt", "--block_size", "96",
           "--packing", "none", "--max_train_samples", "100", "--max_eval_samples", "17")  # fmt: skip
PACKED = ("--model_name_or_path", "{llama}", "--train_file", "{material}/text/train.txt", "--max_eval_samples", "17",
          "--block_size", "128", "--packing", "documents", "--save_steps", "8", "--record_samples", "true",
          "--global_batch_warmup", "4@12", "--block_size_warmup", "32@12")  # fmt: skip
CLASSES = ("--model_name_or_path", "{deberta}", "--train_file", "{classes}", "--max_length", "64",
           "--max_train_samples", "100", "--max_eval_samples", "101", "--save_steps", "8",
           "--record_samples", "true")  # fmt: skip
CONTINUED = ("--model_name_or_path", "{adapter}", "--chat_template", "instruction", "--block_size", "160",
             "--max_eval_samples", "17", "--save_steps", "8", "--record_samples", "true")  # fmt: skip
CASES = {
    "packed": Case("clm", 22, PACKED, ("ddp", "tp", "pp")),
    "padded": Case("clm", 22, (  # the run spans two epochs
        "--model_name_or_path", "{llama}", "--train_file", "{material}/text/train.txt",
        "--max_eval_samples", "17", "--block_size", "192", "--packing", "none", "--max_train_samples", "100",
    )),
    "tokens": Case("clm", 12, (  # the run spans two epochs
        "--model_name_or_path", "{llama}", "--train_file", "{material}/instruct/english.json", "--chat_template",
        "instruction", "--block_size", "192", "--packing", "none", "--max_train_samples", "120",
        "--max_eval_samples", "17", "--tokens_per_batch", "1536",
    )),
    "streamed": Case("clm", 12, (  # the run reads its shard more than once, in several windows
        "--model_name_or_path", "{llama}", "--train_file", "{material}/instruct/english.json", "--validation_file",
        "{material}/instruct/english.json", "--chat_template", "instruction", "--block_size", "160",
        "--max_eval_samples", "9", "--streaming", "1KiB",
    )),
    "tokens of pairs": Case("seq2seq", 12, (
        "--model_name_or_path", "{t5}", *PAIRS, "--tokens_per_batch", "576",
    )),
    "untied": Case("clm", 12, (
        "--model_type", "llama", "--config_overrides", "hidden_size=64,num_hidden_layers=3,num_attention_heads=4,"
        "num_key_value_heads=2,intermediate_size=160,max_position_embeddings=128,tie_word_embeddings=false", *SCRATCH,
    )),
    "gpt2": Case("clm", 12, (  # its vocabulary is tied, and 2 does not divide it
        "--config_name", "gpt2", "--config_overrides", "n_layer=2,n_head=4,n_embd=64,n_positions=128,resid_pdrop=0,"
        "embd_pdrop=0,attn_pdrop=0", *SCRATCH,
    )),
    "neox": Case("clm", 12, (
        "--model_type", "gpt_neox", "--config_overrides", "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "intermediate_size=160,max_position_embeddings=128", *SCRATCH,
    )),
    "preferences": Case("dpo", 16, (  # each layout makes its own reference
        "--model_name_or_path", "{llama}", "--train_file", "{pairs}", "--chat_template", "instruction",
        "--block_size", "160", "--max_eval_samples", "17",
    ), ("zero2",)),
    "muon": Case("clm", 22, (*PACKED, "--optim", "muon")),
    "adafactor": Case("clm", 22, (*PACKED, "--optim", "adafactor")),
    "smoothed": Case("clm", 22, (*PACKED, "--label_smoothing", "0.1", "--z_loss", "0.01")),
    "averaged": Case("clm", 22, (*PACKED, "--ema_decay", "0.6"), learning_rate=2e-3),
    "teacher": Case("distill", 12, (  # which each process holds next to the student
        *PACKED, "--teacher", "{teacher}", "--distill_divergence", "forward",
    )),
    "mixture": Case("clm", 12, (
        "--model_name_or_path", "{llama}", "--train_file", "3", "{material}/text/train.txt", "1",
        "{material}/instruct/english.json", "--chat_template", "instruction", "--block_size", "160",
        "--max_train_samples", "90", "--max_eval_samples", "9",
    )),
    "deberta": Case("cls", 16, (
        "--model_name_or_path", "{deberta}", "--task_name", "mrpc", "--train_file", "{material}/glue/MRPC/train.tsv",
        "--validation_file", "{material}/glue/MRPC/dev.tsv", "--max_length", "64", "--max_train_samples", "100",
        "--max_eval_samples", "101",
    ), ("zero3",)),
    "classes": Case("cls", 22, (
        *CLASSES, "--class_weights", "balanced", "--label_smoothing", "0.1", "--focal_gamma", "2",
    )),
    "mixed labels": Case("cls", 22, (
        *CLASSES, "--model_name_or_path", "{body}", "--train_file", "3", "{classes}", "1", "{kinds}",
        "--class_weights", "balanced", "--validation_split_percentage", "10",
    )),
    "label sets": Case("cls", 22, (
        *CLASSES, "--model_name_or_path", "{body}", "--train_file", "{sets}", "--max_eval_samples", "11",
    )),
    "layers": Case("cls", 22, (*CLASSES, "--layer_decay", "0.7")),
    "tags": Case("cls", 22, (
        "--model_type", "bert", "--config_overrides", "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,"
        "intermediate_size=64,hidden_dropout_prob=0,attention_probs_dropout_prob=0", "--tokenizer_name", "{deberta}",
        "--train_file", "{tags}", "--validation_split_percentage", "10", "--max_length", "64", "--max_eval_samples",
        "11", "--class_weights", "balanced", "--save_steps", "8", "--record_samples", "true",
    )),
    "lora tags": Case("cls", 22, (
        "--model_name_or_path", "{body}", "--train_file", "{tags}", "--lora", "--validation_split_percentage", "10",
        "--max_length", "64", "--max_eval_samples", "11", "--save_steps", "8", "--record_samples", "true",
    ), learning_rate=4e-3),
    "choices": Case("cls", 12, (  # drawn so large that the gradients of its choices do not cancel each other
        "--model_type", "bert", "--config_overrides", "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,"
        "intermediate_size=64,hidden_dropout_prob=0,attention_probs_dropout_prob=0,initializer_range=0.2",
        "--tokenizer_name", "{deberta}", "--train_file", "{choices}", "--validation_split_percentage", "30",
        "--max_length", "64", "--max_eval_samples", "11",
    ), learning_rate=1e-4),
    "blenderbot": Case("seq2seq", 12, (
        "--model_name_or_path", "{blenderbot}", *PAIRS,
    ), ("zero2",)),
    "t5": Case("seq2seq", 6, ("--model_name_or_path", "{t5}", *PAIRS)),
    "smoothed pairs": Case("seq2seq", 6, (
        "--model_name_or_path", "{t5}", *PAIRS, "--label_smoothing", "0.1", "--z_loss", "0.01",
    )),
    "mixed pairs": Case("seq2seq", 22, (
        "--model_name_or_path", "{t5}", *PAIRS, "--train_file", "3", "{material}/dialogue/keyed.json", "1",
        "{questions}", "--save_steps", "8", "--record_samples", "true",
    )),
    "lora": Case("clm", 14, (
        "--model_name_or_path", "{llama}", "--train_file", "{material}/instruct/english.json", "--lora",
        "--chat_template", "instruction", "--max_train_samples", "200", "--max_eval_samples", "17",
        "--block_size", "256", "--save_strategy", "epoch", "--save_total_limit", "2",
    ), ("zero2",), 4e-3),
    "continued adapter": Case("clm", 22, (*CONTINUED, "--train_file", "{material}/instruct/english.json"), (), 2e-3),
    "preferences on an adapter": Case("dpo", 22, (  # each layout makes its own reference: base and adapter
        *CONTINUED, "--train_file", "{pairs}",
    ), (), 2e-3),
    "resized": Case("clm", 22, (*PACKED, "--tokenizer_name", "{added}", "--resize_embeddings")),
    "resized with lora": Case("clm", 22, (
        *PACKED, "--tokenizer_name", "{added}", "--resize_embeddings", "--lora",
    ), learning_rate=2e-3),
}  # fmt: skip


def table(*names: str, layouts: Iterable[str] = OTHERS) -> list:
    """(case, layout) of these cases, the longer part marked."""
    pairs = [(name, layout) for name in names for layout in layouts if _is_possible(name, layout)]
    core = {(name, layout) for name in names if CASES[name].core for layout in (*CASES[name].core, REFERENCE)}
    return [pytest.param(*pair, marks=() if pair in core else pytest.mark.long) for pair in pairs]


def _is_possible(name: str, layout: str) -> bool:
    strategy = LAYOUTS[layout][0]
    if name == "teacher" and strategy.startswith(("zero3", "fsdp2", "hsdp")):
        return False
    if name == "muon" and "offload" in strategy:
        return False
    if name == "adafactor" and strategy not in ("single", "ddp"):
        return False
    return strategy[:2] not in SPLIT or name in SPLIT[strategy[:2]][1]


RUNS, PREDICTING = (
    table(*CASES),
    table("deberta", "choices", "tags", "lora tags", "mixed labels", "label sets", "blenderbot", "t5"),
)


@pytest.fixture(scope="module")
def weights(llama, material, cache, tmp_path_factory) -> dict[str, Path]:
    """Pretrained weights by name. None of these models has dropout, whose noise depends on the layout."""
    folder = tmp_path_factory.mktemp("weights")
    tiny_deberta(folder / "deberta", num_labels=2)
    tiny_t5(folder / "t5", material / "tokenizers" / "blenderbot")
    train_blenderbot(folder / "blenderbot", material)
    made = {name: folder / name for name in ("deberta", "t5", "blenderbot")}
    made |= {"choices": questions(folder), "classes": rare_words(folder, material), "tags": names(folder, material)}
    made |= {"kinds": answers_that_are_short(folder, material), "sets": words_of_lines(folder, material)}
    made |= {"body": without_a_head(folder / "body", folder / "deberta")}
    made |= {"pairs": pairs_of_answers(folder, material)}
    made |= {"teacher": another_model(folder / "teacher", llama), "questions": answered(folder, material)}
    made |= {"adapter": moved_adapter(folder / "adapter", llama), "added": with_more_tokens(folder / "added", llama)}
    return {"llama": llama, "material": material, **made}


def without_a_head(body: Path, whole: Path) -> Path:
    for auto_class in (AutoModel, AutoTokenizer):
        auto_class.from_pretrained(whole).save_pretrained(body)
    return body


def questions(folder: Path) -> Path:
    """Questions with four or five choices, one of which can be eaten."""
    draw, path = random.Random(1), folder / "questions.jsonl"
    food = ["apple", "pear", "plum", "cherry", "grape"]
    other = ["hammer", "stone", "river", "cloud", "paper", "engine", "ladder"]
    with path.open("w") as file:
        for number in range(160):
            choices = draw.sample(other, 4 + number % 2)
            right = draw.randrange(len(choices))
            choices[right] = draw.choice(food)
            line = {"question": "Which of these can be eaten?", "choices": choices, "label": right}
            file.write(json.dumps(line) + "\n")
    return path


def rare_words(folder: Path, material: Path) -> Path:
    """Lines of text, about one in six of which has a word that makes its class."""
    lines = [line for line in (material / "text" / "train.txt").read_text().splitlines() if len(line.split()) > 3]
    records = [{"text": line, "label": "returns" if "return" in line.lower() else "other"} for line in lines[:400]]
    return write_records(folder / "classes.jsonl", records)


def words_of_lines(folder: Path, material: Path) -> Path:
    """Lines of text, each with those of three words that it has."""
    lines = [line for line in (material / "text" / "train.txt").read_text().splitlines() if len(line.split()) > 3]
    words = ("the", "return", "of")
    records = [{"text": line, "labels": [word for word in words if word in line.lower()]} for line in lines[:400]]
    return write_records(folder / "sets.jsonl", records)


def answered(folder: Path, material: Path) -> Path:
    """Instructions with their answers, in other columns than those of conversations."""
    records = json.loads((material / "instruct" / "english.json").read_text())
    pairs = [{"question": record["instruction"], "answer": record["output"]} for record in records]
    return write_records(folder / "answered.jsonl", pairs)


def answers_that_are_short(folder: Path, material: Path) -> Path:
    """Pairs of texts; one of their classes is that of lines of text too."""
    records = json.loads((material / "instruct" / "english.json").read_text())
    pairs = ((record["instruction"], record["output"]) for record in records)
    rows = [{"sentence1": a, "sentence2": b, "label": "short" if len(b) < 80 else "other"} for a, b in pairs]
    return write_records(folder / "kinds.jsonl", rows)


def names(folder: Path, material: Path) -> Path:
    """Lines of text as words; words with a capital are names, which may have several words."""
    lines = (line.split() for line in (material / "text" / "train.txt").read_text().splitlines())
    records = []
    for words in [words for words in lines if len(words) > 3][:300]:
        inside = [word[:1].isupper() for word in words]
        tags = ["O" if not now else "I-NAME" if before else "B-NAME" for before, now in zip([False, *inside], inside)]
        records.append({"tokens": words, "ner_tags": tags})
    return write_records(folder / "tags.jsonl", records)


def pairs_of_answers(folder: Path, material: Path) -> Path:
    """Instructions, each with its answer and with that of another one."""
    records = json.loads((material / "instruct" / "english.json").read_text())[:120]
    others = [record["output"] for record in records[1:]] + [records[0]["output"]]
    asked = ({name: record[name] for name in ("instruction", "input")} for record in records)
    answers = ((record["output"], other) for record, other in zip(records, others))
    pairs = [{**prompt, "chosen": good, "rejected": bad} for prompt, (good, bad) in zip(asked, answers) if good != bad]
    return write_records(folder / "pairs.jsonl", pairs)


def another_model(folder: Path, llama: Path) -> Path:
    """The same with other weights."""
    shutil.copytree(llama, folder)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights = {name: one + 0.02 * torch.randn(one.shape, generator=generator) for name, one in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return folder


def moved_adapter(folder: Path, llama: Path) -> Path:
    """An adapter of rank 4 that moves what the model says."""
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted, generator = get_peft_model(base, settings), torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def with_more_tokens(folder: Path, llama: Path) -> Path:
    """The tokenizer with tokens that the model has no rows for; the text has them."""
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert tokenizer.add_tokens(["function", "returns", "the argument"]) == 3
    tokenizer.save_pretrained(folder)
    return folder


def train_blenderbot(folder: Path, material: Path) -> None:
    """A small BlenderBot that was trained until what it writes is text: a bare loop over turns and their answers."""
    tokenizer = BlenderbotTokenizer.from_pretrained(material / "tokenizers" / "blenderbot")
    config = AutoConfig.for_model(
        "blenderbot", vocab_size=len(tokenizer), d_model=96, encoder_layers=1, decoder_layers=1, dropout=0.0,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    talks = json.loads((material / "dialogue" / "talks.json").read_text())
    turns = [pair for talk in talks for pair in zip(talk["dialogue"], talk["dialogue"][1:])]
    for start in range(0, 80 * 16, 16):
        asked, said = zip(*turns[start : start + 16])
        batch, labels = (
            tokenizer(list(texts), padding=True, truncation=True, max_length=48, return_tensors="pt")
            for texts in (asked, said)
        )
        targets = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
        model(**batch, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def run(weights, cache, tmp_path_factory):
    """run(case, layout) -> (metrics, output folder); each is launched once."""
    folder, done = tmp_path_factory.mktemp("agreement"), {}

    def once(name: str, layout: str) -> tuple[list[dict], Path]:
        if (name, layout) not in done:
            case, (strategy, processes, micro) = CASES[name], LAYOUTS[layout]
            output = folder / f"{name}-{layout.replace(' ', '_')}"
            flags = [flag.format(**weights) for flag in case.flags]
            stored = folder / f"cache-{layout}" if name.startswith("preferences") else cache
            lines = launch(
                output, *flags, "--per_device_train_batch_size", micro, "--global_batch_size", "8",
                "--max_train_steps", case.updates, "--learning_rate", case.learning_rate, "--num_warmup_steps", "5",
                "--weight_decay", "0.1", "--precision", "fp32", "--cache_dir", stored,
                strategy=strategy, processes=processes, task=case.task,
            )  # fmt: skip
            done[name, layout] = lines, output
        return done[name, layout]

    once.done = done
    return once


def differences(run, case: str, layout: str) -> dict[str, float]:
    """The largest relative difference from the reference over all updates, for each figure."""
    ours, reference = (updates(run(case, each)[0]) for each in (layout, REFERENCE))
    assert len(ours) == len(reference) == CASES[case].updates
    return largest_differences(ours, reference, FIGURES)


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_strategies_agree(run, case, layout):
    """The figures of each update, of the same samples and tokens; the held-out losses, and with the tasks that have
    them the metrics: each example counts once, 2 divides none of them."""
    largest = differences(run, case, layout)
    assert all(value <= RTOL for value in largest.values()), largest
    ours, reference = (run(case, each)[0] for each in (layout, REFERENCE))
    for line, other in zip(updates(ours), updates(reference)):
        assert all(line[count] == other[count] for count in ("consumed_samples", "targets", "tokens"))
    held, expected = (
        [{name: line[name] for name in line if name.startswith("eval_")} for line in lines]
        for lines in (ours, reference)
    )
    assert sum(map(bool, expected)) >= 2
    for line, other in zip(held, expected):
        # A margin is a difference of sums of log-probabilities, which nearly cancel.
        assert line == pytest.approx(other, rel=RTOL, abs=5e-6)


@pytest.mark.parametrize(("case", "layout"), table("mixed labels", layouts=LAYOUTS))
def test_the_loss_of_a_mixture_is_the_mean_of_its_sources(run, case, layout):
    lines, output = run(case, layout)
    rows = [json.loads(line) for line in (output / "predictions.jsonl").read_text().splitlines()]
    of_classes = sum("text" in row for row in rows)
    assert 0 < of_classes < len(rows)
    for line in lines:
        if "eval_loss" in line:
            total = of_classes * line["eval_loss_classes"] + (len(rows) - of_classes) * line["eval_loss_kinds"]
            assert line["eval_loss"] == pytest.approx(total / len(rows), rel=1e-7)
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert lines[-1]["eval_accuracy"] == pytest.approx(right / len(rows))


@pytest.mark.parametrize(("case", "layout"), PREDICTING)
def test_predictions_are_the_same(run, case, layout):
    ours, expected = (
        [json.loads(line) for line in (run(case, each)[1] / "predictions.jsonl").read_text().splitlines()]
        for each in (layout, REFERENCE)
    )
    assert len(expected) == {"deberta": 101, "mixed labels": 140}.get(case, 11)
    assert [row["prediction"] for row in ours] == [row["prediction"] for row in expected]


@pytest.mark.parametrize(("case", "layout"), table(*CASES, layouts=[REFERENCE]))
def test_the_reference_moves_and_warms_up(run, case, layout):
    """That agreement is not agreement in standing still."""
    about, (lines, _) = CASES[case], run(case, layout)
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert abs(held[-1] - held[0]) > 1e-4 * held[0]
    rates = [line["learning_rate"] for line in updates(lines)]
    end = about.updates
    expected = [about.learning_rate * (k / 5 if k < 5 else (end - k) / (end - 5)) for k in range(end)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_equal_bleu_and_rouge_are_no_equal_zeros(run):
    figures = run("blenderbot", REFERENCE)[0][-1]
    assert figures["eval_rouge1"] > 1
    assert figures["eval_bleu"] > 0


@pytest.mark.parametrize(("case", "layout"), table("packed", "averaged"))
def test_the_exported_weights_are_whole_and_the_same(run, case, layout):
    """And so is the mean of the weights: that it is the mean, test_optimizers.py."""
    for folder in ("model", "model/ema") if case == "averaged" else ("model",):
        check_same_weights(*(run(case, each)[1] / folder for each in (layout, REFERENCE)))


@pytest.mark.parametrize(("case", "layout"), table("padded", layouts=LAYOUTS))
def test_the_exported_model_has_the_loss_that_the_run_reported(run, material, case, layout):
    """Recomputed without zerofit: transformers' own loss over the same held-out texts, one by one."""
    lines, output = run(case, layout)
    texts = load_texts(ClmRecipe(train_file=[str(material / "text" / "train.txt")], packing="none")).validation["text"]
    assert lines[-1]["eval_loss"] == pytest.approx(loss_of_transformers(output / "model", texts[:17], 192), rel=1e-5)


@pytest.mark.parametrize(("case", "layout"), table("lora", layouts=LAYOUTS))
def test_the_adapter_is_the_same_and_has_learnt(run, case, layout):
    lines, output = run(case, layout)
    held = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held[-1] < held[0] - 0.15
    ours, reference = (
        load_file(run(case, each)[1] / "model" / "adapter_model.safetensors") for each in (layout, REFERENCE)
    )
    assert ours.keys() == reference.keys()
    assert len(ours) == 70  # seven projections of five layers, A and B
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-3, atol=1e-4, msg=name)
    assert json.loads((output / "environment.json").read_text())["bytes_held_by_rank_0"]["optimizer"] > 0


@pytest.mark.parametrize(("case", "layout"), table("lora"))
def test_plain_peft_has_the_loss_that_the_run_reported(run, llama, material, case, layout):
    """Recomputed without zerofit: the template written out by hand, the loss of the answers alone, one by one."""
    lines, output = run(case, layout)
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, output / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")

    records = json.loads((material / "instruct" / "english.json").read_text())
    _, held_out = random_split(Dataset.from_dict({"number": range(len(records))}), 0.05)
    total = count = 0
    for record in (records[number] for number in held_out["number"][:17]):
        extra = f"### Input:\n{record['input'].strip()}\n\n" if record["input"] else ""
        prompt = f"<s>### Instruction:\n{record['instruction'].strip()}\n\n{extra}### Response:\n"
        text = f"{prompt}{record['output'].strip()}</s>"
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor([encoded["input_ids"][:256]])
        answer = torch.tensor([stop > len(prompt) for _, stop in encoded["offset_mapping"][:256]])
        with torch.no_grad():
            total += model(input_ids=ids, labels=ids.masked_fill(~answer[None], -100)).loss.item() * answer.sum()
        count += answer.sum()
    assert lines[-1]["eval_loss"] == pytest.approx(total.item() / count.item(), rel=1e-5)


LONG_LEGS = (  # data, begun under; goes on after this update, strategy, processes
    ("packed", "zero2", [(8, "single", 1), (16, "zero3_offload", 2)]),
    ("packed", "zero2", [(8, "single", 1), (16, "sp", 2)]),
    ("packed", "zero2", [(8, "tp", 2), (16, "sp", 2)]),
    ("packed", "tp_zero3 x dp", [(8, "tp_zero2", 2), (16, "zero3", 2)]),
    ("packed", "pp", [(8, "zero2", 2), (16, "single", 1)]),
    ("packed", "3d", [(8, "zero3", 2), (16, "pp", 2)]),
    ("packed", "zero2", [(8, "3d", 4), (16, "tp", 2)]),
    ("packed", "fsdp2", [(8, "single", 1), (16, "zero2", 2)]),
    ("packed", "hsdp", [(8, "single", 1), (16, "zero2", 2)]),
    ("muon", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("muon", "fsdp2", [(8, "single", 1), (16, "zero1", 2)]),
    ("adafactor", "ddp", [(8, "single", 1), (16, "ddp", 2)]),
    ("smoothed", "tp", [(8, "zero3", 2), (16, "single", 1)]),
    ("averaged", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("averaged", "tp", [(8, "pp", 2), (16, "zero2_offload", 2)]),
    ("teacher", "zero2", [(8, "ddp", 2)]),
    ("classes", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("tags", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("lora tags", "zero2", [(8, "single", 1), (16, "zero3", 2)]),
    ("classes", "fsdp2", [(8, "single", 1), (16, "zero1", 2)]),
    ("layers", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("layers", "fsdp2", [(8, "single", 1), (16, "zero1", 2)]),
    ("continued adapter", "zero2", [(8, "fsdp2", 2), (16, "zero3", 2)]),
    ("preferences on an adapter", "fsdp2", [(8, "zero3", 2), (16, "single", 1)]),
    ("resized", "zero3", [(8, "single", 1), (16, "tp", 2)]),
    ("resized with lora", "zero2", [(8, "zero3", 2), (16, "fsdp2", 2)]),
    ("mixed pairs", "zero2", [(8, "single", 1), (16, "ddp", 2)]),
    ("mixed labels", "zero2", [(8, "single", 1), (16, "ddp", 2)]),
)
LEGS = [("packed", "tp", [(16, "zero2", 2)]), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_LEGS)]


@pytest.mark.parametrize(("case", "origin", "legs"), LEGS)  # from ZeRO-3 to one process: test_chain.py
def test_a_run_goes_on_under_another_strategy_with_other_processes(run, weights, cache, tmp_path, case, origin, legs):
    """Begun under one strategy and left, against the run that was left alone; the options stay as they were."""
    lines, whole = run(case, origin)
    ledger, made = (whole / "samples.jsonl").read_text(), CASES[case].updates
    assert len(ledger.splitlines()) == made
    output, flags = tmp_path / "run", [flag.format(**weights) for flag in CASES[case].flags]
    shutil.copytree(whole, output, symlinks=True)
    given_for = replicas(*LAYOUTS[origin][:2])
    for start, strategy, processes in legs:
        cut_after(output, start)
        done = completed(
            output, *flags, "--per_device_train_batch_size", "2", "--max_train_steps", made, "--learning_rate",
            CASES[case].learning_rate,
            "--num_warmup_steps", "5", "--weight_decay", "0.1", "--precision", "fp32", "--cache_dir", cache,
            "--gradient_accumulation_steps", 8 // (2 * given_for), strategy=strategy, processes=processes,
            task=CASES[case].task,
        )  # fmt: skip
        assert f"after update {start}, written under" in done.stdout
        assert ("the accumulation follows" in done.stdout) == (replicas(strategy, processes) != given_for)
        again = metrics(output)
        assert [line["update"] for line in again] == list(range(made + 1)), "each update once"
        for figure, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0)):
            ours, theirs = ([line[figure] for line in updates(each)] for each in (again, lines))
            assert ours == pytest.approx(theirs, rel=tolerance, abs=0)
        assert (output / "samples.jsonl").read_text() == ledger, "none repeated, none skipped"
    if case == "averaged":
        check_same_weights(output / "model" / "ema", whole / "model" / "ema")
    best = {"tags": 22, "lora tags": 22, "mixed pairs": 22, "mixed labels": 17, "teacher": 8}  # which is kept
    newest = best.get(case, 16)
    assert (output / "checkpoints" / "latest").resolve().name == f"update_{newest:08}"


def replicas(strategy: str, processes: int) -> int:
    return processes // SPLIT.get(strategy[:2], (1, ()))[0]


ANSWERING = [
    (name, layout)
    for name in ("lora", "lora tags", "blenderbot", "packed")
    for layout in ("ddp", "zero2", "zero3", "fsdp2", "sp", "tp", "tp_zero3 x dp", "pp", "3d")
    if _is_possible(name, layout)
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "layout"), ANSWERING)
def test_evaluation_alone_gives_the_figures_of_the_run(run, tmp_path, case, layout):
    lines, output = run(case, REFERENCE)
    strategy, processes, _ = LAYOUTS[layout]
    flags = ("--config", output / "recipe.yaml", "--model_name_or_path", output, "--evaluate_only")
    (line,) = launch(tmp_path / "again", *flags, strategy=strategy, processes=processes, task=CASES[case].task)
    figures = {name: value for name, value in lines[-1].items() if name.startswith("eval_")}
    assert figures
    assert {name: line[name] for name in figures} == pytest.approx(figures, rel=1e-6)


@pytest.mark.long
def test_prompts_are_answered_alike_under_every_strategy(run, tmp_path):
    """By an adapter: of prompts that differ in length, and that 2 processes do not divide."""
    output, asked = run("lora", REFERENCE)[1], tmp_path / "asked.jsonl"
    prompts = [f"Describe {'this ' * n}function in one sentence." for n in range(7)]
    asked.write_text("".join(json.dumps({"instruction": prompt}) + "\n" for prompt in prompts))
    flags = ("--model_name_or_path", output, "--predict_file", asked, "--max_new_tokens", "16",
             "--per_device_eval_batch_size", "2")  # fmt: skip
    found = []
    for layout in (REFERENCE, "ddp", "zero2", "zero3"):
        strategy, processes, _ = LAYOUTS[layout]
        completed(tmp_path / layout, *flags, strategy=strategy, processes=processes)
        found.append([json.loads(line) for line in (tmp_path / layout / "predictions.jsonl").read_text().splitlines()])
    assert [row["messages"][-1]["content"] for row in found[0]] == prompts
    assert any(row["prediction"] for row in found[0])
    assert found[1:] == found[:1] * 3


def test_the_table(run):
    """Writes the agreement table; what it shows is asserted above."""
    rows = []
    for case, layout in [*run.done]:  # to compare two adds the reference
        if layout == REFERENCE:
            continue
        largest = differences(run, case, layout)
        rows.append(f"| {case} | {layout} | " + " | ".join(f"{largest[figure]:.1e}" for figure in FIGURES) + " |")
    assert len(rows) >= 6
    head = ["| data | layout | loss | gradient norm | learning rate |", "|---|---|---|---|---|"]
    target = ROOT / "outputs" / "tests"
    target.mkdir(parents=True, exist_ok=True)
    (target / "agreement.md").write_text("\n".join([*head, *rows]) + "\n")
