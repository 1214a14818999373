"""Real launches of classification and dialogue: metrics, predictions, the best checkpoint, published commands, ..."""

import json
import math
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import BIN, ROOT, SMALL_BLENDERBOT, environment, launch, launched, metrics, tiny_deberta, tiny_t5, updates
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

SMALL_BERT = [
    "--model_type", "bert", "--train_tokenizer_vocab_size", "2000", "--config_overrides",
    "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,max_position_embeddings=160,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "--max_length", "160", "--per_device_train_batch_size", "8", "--global_batch_size", "32",
    "--per_device_eval_batch_size", "50", "--learning_rate", "3e-3",
]  # fmt: skip


def predictions(output: Path, name: str = "predictions.jsonl") -> list[dict]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


# -------------------------------------------------------------------------------------------------------------- MRPC


@pytest.fixture(scope="module")
def mrpc(shared, cache, tmp_path_factory):
    """mrpc(name, *flags) -> (metrics, output folder) of a small BERT on MRPC; each is launched once."""
    folder, done = tmp_path_factory.mktemp("mrpc"), {}

    def once(name: str, *flags: str):
        if name not in done:
            lines = launch(
                folder / name, *SMALL_BERT, "--task_name", "mrpc", "--train_file", shared / "glue/MRPC/train.tsv",
                "--validation_file", shared / "glue/MRPC/dev.tsv", "--max_train_steps", "60", "--eval_steps", "20",
                "--cache_dir", cache, *flags, task="cls",
            )  # fmt: skip
            done[name] = lines, folder / name
        return done[name]

    return once


def test_the_metrics_are_scikit_learns(mrpc):
    """Recomputed from predictions.jsonl: every dev pair once, in the order of the file."""
    lines, output = mrpc("default")
    rows = predictions(output)
    assert len(rows) == 408
    assert rows[0]["#1 String"].startswith("He said the foodservice pie business")
    truth, found = ([row[name] == "equivalent" for row in rows] for name in ("label", "prediction"))
    assert sum(truth) == 279
    assert lines[-1]["eval_accuracy"] == pytest.approx(accuracy_score(truth, found), abs=1e-12)
    assert lines[-1]["eval_f1"] == pytest.approx(f1_score(truth, found), abs=1e-12)
    assert all(0.5 <= row["probability"] <= 1 for row in rows)


def test_the_exported_classifier_gives_the_same_predictions(mrpc):
    """Through transformers alone, one pair at a time without padding, from the label names of its configuration."""
    _, output = mrpc("default")
    model = AutoModelForSequenceClassification.from_pretrained(output / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    assert model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    for row in predictions(output)[:20]:
        encoded = tokenizer(row["#1 String"], row["#2 String"], truncation=True, max_length=160, return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**encoded).logits.softmax(-1)[0]
        assert model.config.id2label[int(probabilities.argmax())] == row["prediction"]
        assert float(probabilities.max()) == pytest.approx(row["probability"], abs=1e-5)


def test_the_best_checkpoint_is_kept(mrpc):
    lines, output = mrpc("default")
    evaluated = {line["update"]: line["eval_accuracy"] for line in updates(lines) if "eval_accuracy" in line}
    assert len(evaluated) == 3
    best = max(evaluated, key=evaluated.get)  # the first of equals
    assert [path.name for path in (output / "checkpoints").iterdir() if not path.is_symlink()] == [f"update_{best:08}"]
    assert (output / "checkpoints" / "best").resolve().name == f"update_{best:08}"
    kept = predictions(output / "checkpoints" / "best")
    right = [row["label"] == row["prediction"] for row in kept]
    assert sum(right) / len(right) == pytest.approx(evaluated[best], abs=1e-12)
    AutoModelForSequenceClassification.from_pretrained(output / "checkpoints" / "best" / "model")


@pytest.mark.parametrize("flags", [["--length_grouping", "none"], ["--length_grouping", "update"],
                                   ["--length_grouping", "update", "--pad_to_max_length"]])  # fmt: skip
def test_how_rows_are_padded_changes_no_loss(mrpc, flags):
    """`update` only deals an update's own samples to its micro-batches: the curve is that of no grouping at all."""
    reference, _ = mrpc("none", "--length_grouping", "none", "--max_train_steps", "12", "--save_best", "false")
    lines, _ = mrpc("_".join(flags), *flags, "--max_train_steps", "12", "--save_best", "false")
    for name in ("loss", "grad_norm", "tokens"):
        ours, expected = ([line[name] for line in updates(each)] for each in (lines, reference))
        assert len(ours) == 12
        assert ours == pytest.approx(expected, rel=1e-5)
    padding = [sum(line["padding"] for line in updates(each)) / 12 for each in (lines, reference)]
    if "--pad_to_max_length" in flags:
        assert padding[0] > padding[1] + 0.05
    elif "update" in flags:
        assert padding[0] < 0.7 * padding[1]


# ------------------------------------------------------------------------------------- other data, other families


def test_mnli_has_two_held_out_parts_and_training_stops_early(shared, cache, tmp_path):
    """At a learning rate of 0 nothing gets better: two evaluations after the first, training stops."""
    header = "index\tpromptID\tsentence1\tsentence2\tgold_label\n"
    names = ("entailment", "neutral", "contradiction")
    for name, rows in (("train", 60), ("matched", 7), ("mismatched", 11)):
        lines = [
            f"{i}\t{i}\tthe cat number {i} sat\tit {'stood' * (i % 3)} {i}\t{names[i % 3]}\n" for i in range(rows)
        ]
        (tmp_path / f"{name}.tsv").write_text(header + "".join(lines))
    bert = [{"2000": "280", "3e-3": "0"}.get(word, word) for word in SMALL_BERT]
    output = tmp_path / "run"
    lines = launch(
        output, *bert, "--task_name", "mnli", "--train_file", tmp_path / "train.tsv",
        "--validation_file", tmp_path / "matched.tsv", "--validation_mismatched_file", tmp_path / "mismatched.tsv",
        "--max_train_steps", "50", "--eval_steps", "2", "--early_stopping_patience", "2", "--cache_dir", cache,
        strategy="ddp", processes=2, task="cls",
    )  # fmt: skip
    assert lines[-1]["update"] == 6, "evaluated at 2, 4 and 6"
    assert {"eval_accuracy", "eval_accuracy_mismatched", "eval_loss_mismatched", "eval_f1_macro"} <= lines[-1].keys()
    assert len(predictions(output)) == 7
    assert len(predictions(output, "predictions_mismatched.jsonl")) == 11
    assert (output / "checkpoints" / "best").resolve().name == "update_00000002"


def test_a_llama_learns_a_number(stories, cache, tmp_path):
    """Regression with a real pretrained Llama, which has no padding token, under ZeRO-3 with two processes."""
    rows = ["text,score"] + [f"{'very ' * (i % 5)}good story number {i},{i % 5 + 0.5}" for i in range(90)]
    (tmp_path / "scores.csv").write_text("\n".join(rows) + "\n")
    output = tmp_path / "run"
    lines = launch(
        output, "--model_name_or_path", stories, "--train_file", tmp_path / "scores.csv", "--max_train_steps", "40",
        "--validation_split_percentage", "10", "--learning_rate", "2e-3", "--per_device_train_batch_size", "8",
        "--per_device_eval_batch_size", "2", "--cache_dir", cache, strategy="zero3", processes=2, task="cls",
    )  # fmt: skip
    assert len(predictions(output)) == 9
    assert lines[-1]["eval_mse"] < 0.5 * lines[0]["eval_mse"]
    assert lines[-1]["eval_pearson"] > 0.8
    assert lines[-1]["eval_mse"] == pytest.approx(lines[-1]["eval_loss"], rel=1e-4)
    errors = [(row["label"] - row["prediction"]) ** 2 for row in predictions(output)]
    assert sum(errors) / len(errors) == pytest.approx(lines[-1]["eval_mse"], rel=1e-5)
    model = AutoModelForSequenceClassification.from_pretrained(output / "model")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    assert model.config.pad_token_id is not None


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_t5_is_trained_in_bf16_where_fp16_was_asked_for(shared, cache, tmp_path, strategy):
    tiny_t5(tmp_path / "t5", shared / "tokenizers" / "blenderbot-400M-distill")
    rows = [{"document": f"a long text number {i} about a cat", "summary": f"cat {i}"} for i in range(40)]
    (tmp_path / "news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = launched(
        tmp_path / "run", "--model_name_or_path", tmp_path / "t5", "--train_file", tmp_path / "news.jsonl",
        "--source_prefix", "summarize: ", "--precision", "fp16", "--max_train_steps", "4", "--cache_dir", cache,
        "--val_max_target_length", "4", strategy=strategy, processes=1, task="seq2seq",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "bf16 is used in place of fp16: a t5" in done.stdout
    assert all(math.isfinite(line["loss"]) for line in updates(metrics(tmp_path / "run")))
    assert "precision: bf16" in (tmp_path / "run" / "strategy.yaml").read_text()
    assert predictions(tmp_path / "run")[0]["source"].startswith("summarize: a long text number")


# ----------------------------------------------------------------------------------------------- published commands


def hub_folder(folder: Path, config: str, splits: dict[str, list[dict]]) -> None:
    """A data set as the hub has it: a configuration with splits, in a folder of the same name."""
    folder.mkdir(parents=True)
    front = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        front += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*front, "---", ""]))


def run_published(command: str, folder: Path, *launcher: str) -> None:
    """The command as it was published; names resolve to folders under `folder`, as the hub cannot be reached."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    words = [
        str(BIN / "accelerate"),
        "launch",
        "--main_process_port",
        "0",
        *launcher,
        str(ROOT / words[2]),
        *words[3:],
    ]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=400, env=environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


PUBLISHED_CLS = """accelerate launch train/cls.py --model_name_or_path "microsoft/deberta-v2-xlarge-mnli"
  --task_name "mrpc" --ignore_mismatched_sizes --max_length 128 --per_device_train_batch_size 40 --learning_rate 2e-5
  --num_train_epochs 3 --output_dir "outputs/mrpc/deepspeed_stage2/" --with_tracking --report_to "wandb" """


def test_the_published_classification_command(tmp_path):
    """Its model has a head of three labels and the task two: a new head, also where ranks hold shares of it, and the
    same one under every strategy."""
    first = {}
    for strategy in ("zero2", "zero3"):
        folder = tmp_path / strategy
        tiny_deberta(folder / "microsoft" / "deberta-v2-xlarge-mnli", num_labels=3)
        rows = [
            {"sentence1": f"he said {i}", "sentence2": f"{i} he said", "label": i % 2, "idx": i} for i in range(90)
        ]
        hub_folder(folder / "nyu-mll" / "glue", "mrpc", {"train": rows, "validation": rows[:13]})
        pair = str(ROOT / f"accelerate_configs/{strategy}.yaml")
        run_published(PUBLISHED_CLS, folder, "--config_file", pair, "--num_processes", "2")
        output = folder / "outputs" / "mrpc" / "deepspeed_stage2"
        lines = metrics(output)
        assert lines[-1]["epoch"] == 3.0
        assert updates(lines)[0]["learning_rate"] == 2e-5
        assert list(output.rglob("*.wandb"))
        first[strategy] = lines[0]["eval_loss"]
        model, info = AutoModelForSequenceClassification.from_pretrained(output / "model", output_loading_info=True)
        assert not any(info.values()), info
        assert model.classifier.weight.shape == (2, 32)
        assert model.classifier.weight.std() > 1e-3
        start = AutoModelForSequenceClassification.from_pretrained(folder / "microsoft" / "deberta-v2-xlarge-mnli")
        ours, theirs = (each.deberta.encoder.rel_embeddings.weight for each in (model, start))
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert first["zero3"] == pytest.approx(first["zero2"], rel=1e-6)


PUBLISHED_SEQ2SEQ = """accelerate launch train/seq2seq.py --dataset_name "smangrul/MuDoConv" --max_source_length 128
  --source_prefix "chatbot: " --max_target_length 64 --val_max_target_length 64 --val_min_target_length 20
  --n_val_batch_generations 5 --n_train 10000 --n_val 1000 --pad_to_max_length --num_beams 10
  --model_name_or_path "facebook/blenderbot-400M-distill" --per_device_train_batch_size 200
  --per_device_eval_batch_size 100 --learning_rate 1e-6 --weight_decay 0.0 --num_train_epochs 1
  --gradient_accumulation_steps 1 --num_warmup_steps 100 --output_dir "outputs/deepspeed_zero_stage2_accelerate_test"
  --seed 25 --logging_steps 100 --with_tracking --report_to "wandb" --report_name "blenderbot_400M_finetuning" """


def test_the_published_dialogue_command(shared, cache, tmp_path):
    model = tmp_path / "facebook" / "blenderbot-400M-distill"
    launch(
        tmp_path / "scratch", *SMALL_BLENDERBOT, "--tokenizer_name", shared / "tokenizers/blenderbot-400M-distill",
        "--train_file", shared / "dialogue/blended_skill_talk_val.json", "--predict_with_generate", "false",
        "--max_train_steps", "2", "--cache_dir", cache, task="seq2seq",
    )  # fmt: skip
    model.parent.mkdir()
    (tmp_path / "scratch" / "model").rename(model)
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
    assert list(output.rglob("*.wandb"))
