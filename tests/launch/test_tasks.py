"""Real launches of classification and dialogue: metrics, predictions, the best checkpoint, published commands, ..."""

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from folders import hub_folder, tools_in_this_process
from helpers import BIN, ROOT, completed, environment, launch, metrics, tiny_deberta, tiny_t5, updates, write_records
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BlenderbotTokenizer,
)

from zerofit.cli import main as zerofit

SMALL_BERT = [
    "--model_type", "bert", "--train_tokenizer_vocab_size", "2000", "--config_overrides",
    "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,max_position_embeddings=160,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "--max_length", "160", "--per_device_train_batch_size", "8", "--global_batch_size", "32",
    "--per_device_eval_batch_size", "50", "--learning_rate", "3e-3",
]  # fmt: skip


def predictions(output: Path, name: str = "predictions.jsonl") -> list[dict]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(material, cache, tmp_path_factory):
    """(metrics, output folder) of a small BERT's run that evaluates three times."""
    output = tmp_path_factory.mktemp("sst2") / "run"
    lines = launch(
        output, *SMALL_BERT, "--task_name", "sst2", "--train_file", material / "glue/SST-2/train.tsv",
        "--validation_file", material / "glue/SST-2/dev.tsv", "--max_train_steps", 60, "--lr_scheduler_type",
        "constant", "--length_grouping", "update", "--eval_steps", "20", "--cache_dir", cache, task="cls",
    )  # fmt: skip
    return lines, output


def test_the_metrics_are_scikit_learns(trained, material):
    """Recomputed from predictions.jsonl: every held-out sentence once, in the order of the file."""
    lines, output = trained
    rows = predictions(output)
    file = (material / "glue/SST-2/dev.tsv").read_text().splitlines()[1:]
    assert [row["sentence"].strip() for row in rows] == [line.split("\t")[0].strip() for line in file]
    assert [str(int(row["label"] == "positive")) for row in rows] == [line.split("\t")[1] for line in file]
    truth, found = ([row[name] == "positive" for row in rows] for name in ("label", "prediction"))
    for name, score in (("accuracy", accuracy_score), ("f1", f1_score), ("matthews_correlation", matthews_corrcoef)):
        assert lines[-1][f"eval_{name}"] == pytest.approx(score(truth, found), abs=1e-12)
    assert all(0.5 <= row["probability"] <= 1 for row in rows)
    assert lines[-1]["eval_accuracy"] > sum(not each for each in truth) / len(truth), "more than the commoner class"


def test_the_best_checkpoint_is_kept(trained):
    lines, output = trained
    evaluated = {line["update"]: line["eval_accuracy"] for line in updates(lines) if "eval_accuracy" in line}
    assert len(evaluated) == 3
    best = max(evaluated, key=evaluated.get)  # the first of equals
    assert [path.name for path in (output / "checkpoints").iterdir() if not path.is_symlink()] == [f"update_{best:08}"]
    assert (output / "checkpoints" / "best").resolve().name == f"update_{best:08}"
    kept = predictions(output / "checkpoints" / "best")
    right = [row["label"] == row["prediction"] for row in kept]
    assert sum(right) / len(right) == pytest.approx(evaluated[best], abs=1e-12)
    AutoModelForSequenceClassification.from_pretrained(output / "checkpoints" / "best" / "model")


def test_evaluation_alone_gives_the_figures_of_the_run(trained, tmp_path):
    """With the run's own recipe, most of which is about training. (Under every strategy: test_agreement.py.)"""
    lines, output = trained
    flags = ("--config", output / "recipe.yaml", "--model_name_or_path", output, "--evaluate_only")
    (line,) = launch(tmp_path / "again", *flags, task="cls")
    figures = {name: value for name, value in lines[-1].items() if name.startswith("eval_")}
    assert len(figures) == 5
    assert {name: line[name] for name in figures} == pytest.approx(figures, abs=1e-6)
    assert alike(predictions(tmp_path / "again"), predictions(output))


def test_predictions_without_labels_are_those_of_the_run(trained, cache, tmp_path):
    """The run's held-out sentences as GLUE's test.tsv has them; 2 processes and batches of 50 divide them unevenly."""
    _, output = trained
    expected = predictions(output)
    rows = [f"{number}\t{row['sentence']}" for number, row in enumerate(expected, 100)]
    (tmp_path / "test.tsv").write_text("\n".join(["index\tsentence", *rows]) + "\n")
    completed(
        tmp_path / "answers", "--model_name_or_path", output / "model", "--task_name", "sst2", "--max_length", "160",
        "--per_device_eval_batch_size", "50", "--predict_file", tmp_path / "test.tsv", "--cache_dir", cache,
        strategy="zero3", processes=2, task="cls",
    )  # fmt: skip
    found = predictions(tmp_path / "answers")
    assert not any("label" in row for row in found)
    assert [row.pop("index") for row in found] == [str(number) for number in range(100, 100 + len(expected))]
    assert alike(found, [{name: row[name] for name in row if name != "label"} for row in expected])
    assert not list((tmp_path / "answers").glob("metrics*"))


def alike(ours: list[dict], theirs: list[dict]) -> bool:
    """The same rows, probabilities but for rounding."""
    numbers = [
        [p for row in rows for p in (row["probability"], *row["probabilities"].values())] for rows in (ours, theirs)
    ]
    texts = [[{**row, "probability": 0, "probabilities": 0} for row in rows] for rows in (ours, theirs)]
    return texts[0] == texts[1] and numbers[0] == pytest.approx(numbers[1], abs=1e-6)


@pytest.fixture(scope="module")
def labelled_sets(cache, tmp_path_factory):
    """(metrics, output folder) of a run on texts with any number of labels, the held-out ones a .jsonl file."""
    folder = tmp_path_factory.mktemp("sets")
    words = {"red": "0110", "green": "110", "blue": "NA"}
    for name, count in (("train", 120), ("held", 31)):
        rows = []
        for number in range(count):
            own = [word for place, word in enumerate(words) if (number >> place) & 1]
            text = f"line {number} " + " and ".join(own or ["nothing"]) + " then more words" * (number % 5)
            rows.append({"id": f"{number:04}", "text": text, "labels": [words[word] for word in own]})
        write_records(folder / f"{name}.jsonl", rows)
    lines = launch(
        folder / "run", *SMALL_BERT, "--train_file", folder / "train.jsonl",
        "--validation_file", folder / "held.jsonl", "--max_length", "12", "--max_train_steps", "40",
        "--cache_dir", cache, task="cls",
    )  # fmt: skip
    return lines, folder


def test_figures_of_label_sets_are_scikit_learns_and_transformers_own(labelled_sets):
    lines, folder = labelled_sets
    rows = predictions(folder / "run")
    assert [row["id"] for row in rows] == [f"{number:04}" for number in range(31)]
    names = ["0110", "110", "NA"]
    truth, found = ([[name in row[key] for name in names] for row in rows] for key in ("label", "prediction"))
    for average in ("micro", "macro"):
        expected = f1_score(truth, found, average=average, zero_division=0)
        assert lines[-1][f"eval_f1_{average}"] == pytest.approx(expected, abs=1e-12)
    assert lines[-1]["eval_accuracy"] == pytest.approx(accuracy_score(truth, found), abs=1e-12)
    assert lines[-1]["eval_f1_micro"] > lines[0]["eval_f1_micro"]
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run" / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "model")
    assert model.config.problem_type == "multi_label_classification"
    assert list(model.config.id2label.values()) == names
    total = 0.0
    for row, flags in zip(rows, truth):
        encoded = tokenizer(row["text"], truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            answer = model(**encoded, labels=torch.tensor([flags]).float())
        total += float(answer.loss)
        assert answer.logits[0].sigmoid().tolist() == pytest.approx(list(row["probabilities"].values()), abs=1e-5)
    assert lines[-1]["eval_loss"] == pytest.approx(total / len(rows), rel=1e-5)


def test_a_stored_model_reads_its_inputs_as_in_training(labelled_sets, cache, tmp_path):
    """Without --max_length, which has another default; with it, that is said."""
    lines, folder = labelled_sets
    model = ("--model_name_or_path", folder / "run", "--cache_dir", cache)
    held_out = ("--evaluate_only", "--validation_file", folder / "held.jsonl")
    done = completed(tmp_path / "again", *model, *held_out, task="cls")
    assert "as in training: max_length = 12" in done.stdout
    figures = {name: value for name, value in lines[-1].items() if name.startswith("eval_f1") or name == "eval_loss"}
    assert {name: metrics(tmp_path / "again")[-1][name] for name in figures} == pytest.approx(figures, rel=1e-6)
    asked = [f"{row['id']};{row['text']}" for row in predictions(folder / "run")]
    (tmp_path / "asked.csv").write_text("\n".join(["id;text", *asked]) + "\n")
    asked = ("--predict_file", tmp_path / "asked.csv", "--max_length", "32")
    done = completed(tmp_path / "asked", *model, *asked, task="cls")
    assert "max_length = 32 (--max_length): the model was trained with 12" in done.stdout
    rows = predictions(folder / "run")
    assert [row["id"] for row in predictions(tmp_path / "asked")] == [row["id"] for row in rows]


def test_mnli_has_two_held_out_parts_and_training_stops_early(cache, tmp_path):
    """At a learning rate of 0 nothing gets better: two evaluations after the first, training stops."""
    header = "index\tpromptID\tsentence1\tsentence2\tgold_label"
    names = ("entailment", "neutral", "contradiction")
    for name, rows in (("train", 60), ("matched", 7), ("mismatched", 11)):
        lines = (f"{i}\t{i}\tthe cat number {i} sat\tit {'stood' * (i % 3)} {i}\t{names[i % 3]}" for i in range(rows))
        (tmp_path / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n")
    bert = [{"2000": "280", "3e-3": "0"}.get(word, word) for word in SMALL_BERT]
    output = tmp_path / "run"
    lines = launch(
        output, *bert, "--task_name", "mnli", "--train_file", tmp_path / "train.tsv",
        "--validation_file", tmp_path / "matched.tsv", "--validation_mismatched_file", tmp_path / "mismatched.tsv",
        "--max_train_steps", "50", "--eval_steps", "2", "--early_stopping_patience", "2", "--cache_dir", cache,
        task="cls",
    )  # fmt: skip
    assert lines[-1]["update"] == 6, "evaluated at 2, 4 and 6"
    assert {"eval_accuracy", "eval_accuracy_mismatched", "eval_loss_mismatched", "eval_f1_macro"} <= lines[-1].keys()
    assert len(predictions(output)) == 7
    assert len(predictions(output, "predictions_mismatched.jsonl")) == 11
    assert (output / "checkpoints" / "best").resolve().name == "update_00000002"


def run_published(command: str, folder: Path, *launcher: str) -> None:
    """The command as it was published; names resolve to folders under `folder`, as the hub cannot be reached."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    words = [str(BIN / "accelerate"), "launch", "--main_process_port", "0", *launcher, ROOT / words[2], *words[3:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, env=environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


PUBLISHED_CLS = """accelerate launch train/cls.py --model_name_or_path "microsoft/deberta-v2-xlarge-mnli"
  --task_name "mrpc" --ignore_mismatched_sizes --max_length 128 --per_device_train_batch_size 40 --learning_rate 2e-5
  --num_train_epochs 3 --output_dir "outputs/mrpc/deepspeed_stage2/" --with_tracking --report_to "wandb" """


@pytest.mark.long  # in small, without a hub: test_agreement.py
def test_the_published_classification_command(tmp_path):
    """Its model has a head of three labels and the task two: a new head, also where the ranks hold parts of it; the
    same under both strategies."""
    tiny_deberta(tmp_path / "microsoft" / "deberta-v2-xlarge-mnli", num_labels=3)
    start = AutoModelForSequenceClassification.from_pretrained(tmp_path / "microsoft" / "deberta-v2-xlarge-mnli")
    rows = [{"sentence1": f"he said {i}", "sentence2": f"{i} he said", "label": i % 2, "idx": i} for i in range(90)]
    hub_folder(tmp_path / "nyu-mll" / "glue", "mrpc", {"train": rows, "validation": rows[:13]})
    first = []
    for strategy in ("zero3", "zero2"):
        pair = str(ROOT / f"accelerate_configs/{strategy}.yaml")
        run_published(PUBLISHED_CLS, tmp_path, "--config_file", pair, "--num_processes", "2")
        output = tmp_path / "outputs" / "mrpc" / "deepspeed_stage2"
        lines = metrics(output)
        assert lines[-1]["epoch"] == 3.0
        assert updates(lines)[0]["learning_rate"] == 2e-5
        assert list(output.rglob("*.wandb"))
        first.append(lines[0]["eval_loss"])
        model, info = AutoModelForSequenceClassification.from_pretrained(output / "model", output_loading_info=True)
        assert not any(info.values()), info
        assert model.classifier.weight.shape == (2, 32)
        assert model.classifier.weight.std() > 1e-3
        ours, theirs = (each.deberta.encoder.rel_embeddings.weight for each in (model, start))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
        shutil.rmtree(output)
    assert first[0] == pytest.approx(math.log(2), abs=0.01), "a head that knows nothing yet"
    assert first[0] == pytest.approx(first[1], rel=1e-6)


PUBLISHED_SEQ2SEQ = """accelerate launch train/seq2seq.py --dataset_name "smangrul/MuDoConv" --max_source_length 128
  --source_prefix "chatbot: " --max_target_length 64 --val_max_target_length 64 --val_min_target_length 20
  --n_val_batch_generations 5 --n_train 10000 --n_val 1000 --pad_to_max_length --num_beams 10
  --model_name_or_path "facebook/blenderbot-400M-distill" --per_device_train_batch_size 200
  --per_device_eval_batch_size 100 --learning_rate 1e-6 --weight_decay 0.0 --num_train_epochs 1
  --gradient_accumulation_steps 1 --num_warmup_steps 100 --output_dir "outputs/deepspeed_zero_stage2_accelerate_test"
  --seed 25 --logging_steps 100 --with_tracking --report_to "wandb" --report_name "blenderbot_400M_finetuning" """


@pytest.mark.long
def test_the_published_dialogue_command(material, tmp_path, capfd):
    model = tmp_path / "facebook" / "blenderbot-400M-distill"
    tokenizer = BlenderbotTokenizer.from_pretrained(material / "tokenizers" / "blenderbot")
    config = AutoConfig.for_model(
        "blenderbot", vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    talker = AutoModelForSeq2SeqLM.from_config(config)
    words = [*tokenizer(" the", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    talker.final_logits_bias[0, words] = 20.0  # it knows one word and when to stop: bytes at random would be no text
    talker.save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [{"past": f"hello , how are you {i} ?", "reply": f"i am fine , number {i} ."} for i in range(410)]
    hub_folder(tmp_path / "smangrul" / "MuDoConv", "default", {"train": rows, "validation": rows[:5]})
    run_published(PUBLISHED_SEQ2SEQ, tmp_path)
    output = tmp_path / "outputs" / "deepspeed_zero_stage2_accelerate_test"
    lines = metrics(output)
    assert lines[-1]["epoch"] == 1.0
    assert {"eval_bleu", "eval_rougeL", "eval_perplexity"} <= lines[-1].keys()
    assert updates(lines)[0]["padding"] > 0.8, "padded to the maximum, as asked for"
    rows = predictions(output)
    assert len(rows) == 5
    assert rows[0]["source"].startswith("chatbot: hello")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert tokenizer("hello")["input_ids"][-1] == tokenizer.eos_token_id, "as the model was trained"
    lengths = [len(tokenizer(row["prediction"])["input_ids"]) for row in rows]
    assert all(20 <= length <= 66 for length in lengths), "64 tokens, and the end that a tokenizer adds"
    assert AutoModelForSeq2SeqLM.from_pretrained(output / "model").generation_config.use_cache
    with tools_in_this_process():  # prefix, beams and lengths are those of the run
        asked = rows[0]["source"].removeprefix("chatbot: ")
        assert zerofit(["generate", "--model", str(output), "--prompt", asked]) == 0
    assert capfd.readouterr().out.splitlines()[-1].strip() == rows[0]["prediction"]
    assert list(output.rglob("*.wandb"))


def test_a_t5_trains_in_bf16_in_place_of_fp16_and_the_record_says_so(material, cache, tmp_path):
    tiny_t5(tmp_path / "t5", material / "tokenizers" / "blenderbot")
    rows = [{"source": f"say {number}", "target": f"it is {number}"} for number in range(16)]
    pairs = write_records(tmp_path / "pairs.jsonl", rows)
    done = completed(
        tmp_path / "run", "--model_name_or_path", tmp_path / "t5", "--train_file", pairs, "--precision", "fp16",
        "--max_train_steps", "1", "--save_strategy", "no", "--predict_with_generate", "false", "--cache_dir", cache,
        strategy="single", processes=1, task="seq2seq",
    )  # fmt: skip
    assert "bf16 instead of fp16" in done.stdout
    for name in ("recipe.yaml", "strategy.yaml"):
        assert yaml.safe_load((tmp_path / "run" / name).read_text())["precision"] == "bf16"
