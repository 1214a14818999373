"""`zerofit evaluate`: each log-likelihood of lm-evaluation-harness is that of the program's own evaluation."""

import json
import subprocess
import sys

import pytest
from helpers import launch, write_records
from transformers import AutoTokenizer

from zerofit.cli import main as zerofit

TASK = """
task: docstrings
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood
doc_to_text: "<s>{{prompt}}"
doc_to_target: "{{completion}}</s>"
target_delimiter: ""
metric_list: [{metric: perplexity}]
"""


@pytest.fixture
def task(material, tmp_path):
    """Three prompts and completions as JSON lines, and the task's file."""
    texts = [text.split() for text in (material / "text" / "train.txt").read_text().split("\n") if len(text) > 60]
    records = [{"prompt": " ".join(words[:4]), "completion": " " + " ".join(words[4:])} for words in texts[:3]]
    write_records(tmp_path / "asked.jsonl", records)
    (tmp_path / "docstrings.yaml").write_text(TASK.replace("DATA", str(tmp_path / "asked.jsonl")))
    return tmp_path / "docstrings.yaml"


def log_likelihoods(output) -> dict[int, float]:
    """{document: its log-likelihood}."""
    items = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {item["doc_id"]: float(item["filtered_resps"][0][0]) for item in items}


def evaluated(task, model, output) -> dict[int, float]:
    assert zerofit(["evaluate", "--model", str(model), "--tasks", str(task), "--output", str(output)]) == 0
    found = json.loads((output / "results.json").read_text())["results"]["docstrings"]
    assert found["perplexity,none"] > 1
    return log_likelihoods(output)


def test_log_likelihoods_are_those_of_an_evaluation(llama, task, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional: pip install '.[tasks]'")
    found, tokenizer = evaluated(task, llama, tmp_path / "tasks"), AutoTokenizer.from_pretrained(llama)
    records = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert sorted(found) == list(range(len(records)))
    for number, record in enumerate(records):
        one = write_records(tmp_path / f"{number}.jsonl", [record])
        (line,) = launch(
            tmp_path / f"own{number}", "--model_name_or_path", llama, "--evaluate_only", "--validation_file", one,
            "--chat_template", "none", strategy="single", processes=1,
        )  # fmt: skip
        predicted = len(tokenizer(record["prompt"] + record["completion"])["input_ids"]) + 1
        predicted -= len(tokenizer(record["prompt"])["input_ids"])
        assert found[number] == pytest.approx(-line["eval_loss"] * predicted, rel=1e-5)


@pytest.mark.long
def test_several_processes_find_the_same(llama, task, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional: pip install '.[tasks]'")
    alone = evaluated(task, llama, tmp_path / "alone")
    words = ["--model", llama, "--tasks", task, "--num_processes", "2", "--output", tmp_path / "together"]
    subprocess.run([sys.executable, "-m", "zerofit.cli", "evaluate", *map(str, words)], check=True)
    assert log_likelihoods(tmp_path / "together") == pytest.approx(alone, rel=1e-6)


def test_what_is_missing_is_said_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr("zerofit.tools.evaluate.evaluate.find_spec", lambda name: None)
    assert zerofit(["evaluate", "--model", "gpt2", "--tasks", "mine.yaml"]) == 2
    assert "mine.yaml" in capsys.readouterr().err
    assert zerofit(["evaluate", "--model", "gpt2", "--tasks", "hellaswag"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err
