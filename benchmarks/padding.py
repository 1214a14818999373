"""What padding costs, and what it costs to avoid it: samples/s and padding of the ways to batch rows of any length.

    python benchmarks/padding.py --data data               # 5 rounds of 16 launches: 12 to 16 minutes on two cores
    python benchmarks/padding.py --data data --rounds 9 --samples 2048

The lengths of real data are the point: --data is a folder of published data, laid out as docs/real-data.md says.

Every figure of speed is from a real `accelerate launch`, one process, and its own
metrics.jsonl: all samples of the updates after the warm-up divided by all their seconds. A round launches all ways of
a task and a layout one after another, with the same seed, so that they see the same samples but for a few; the order
rotates from round to round and turns around in every other one, and the next round has another seed. Ratios are taken
within a round: on a machine that others share, only they count.

The table of docs/measurements/padding.md is printed, and kept as JSON.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import parse_options, provenance, rotated

from zerofit.record.terminal import duration, table

ROOT = Path(__file__).resolve().parents[1]
COMMON = {
    "eval_on_start": "false",
    "max_eval_samples": 8,
    "save_best": "false",
    "report_to": "none",
}
TASKS: dict[str, dict[str, Any]] = {  # shown name: the options of train/cls.py or train/seq2seq.py
    "MRPC": {
        "model_type": "bert",
        "config_overrides": "num_hidden_layers=2,hidden_size=128,num_attention_heads=2,intermediate_size=256",
        "train_tokenizer_vocab_size": 8192,
        "task_name": "mrpc",
        "train_file": "{data}/glue/MRPC/train.tsv",
        "validation_file": "{data}/glue/MRPC/dev.tsv",
        "max_length": 128,
    },
    "Topical-Chat": {
        "config_name": "blenderbot-400M-distill",
        "config_overrides": "d_model=64,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
        "decoder_attention_heads=2,encoder_ffn_dim=256,decoder_ffn_dim=256",
        "tokenizer_name": "{data}/tokenizers/blenderbot-400M-distill",
        "train_file": "{data}/dialogue/valid_freq.json",
        "validation_split_percentage": 1,
        "max_source_length": 128,
        "max_target_length": 64,
        "predict_with_generate": "false",
    },
    "instructions": {
        "model_type": "llama",
        "config_overrides": "num_hidden_layers=2,hidden_size=128,num_attention_heads=2,num_key_value_heads=2,"
        "intermediate_size=256,max_position_embeddings=512",
        "train_tokenizer_vocab_size": 4096,
        "train_file": "{data}/instruct/alpaca_en_demo.json",
        "chat_template": "instruction",
        "validation_split_percentage": 1,
        "block_size": 512,
        "packing": "none",
    },
}
PROGRAMS = {"MRPC": "train/cls.py", "Topical-Chat": "train/seq2seq.py", "instructions": "train/clm.py"}
FULL_ROW = {"Topical-Chat": 128 + 64, "instructions": 512}  # tokens
GROUPED = {
    "maximum": {"pad_to_max_length": "true", "length_grouping": "none"},
    "none": {"length_grouping": "none"},
    "update": {"length_grouping": "update"},
    "window": {"length_grouping": "window"},
}
BY_TOKENS: dict[str, Any] = {"tokens": {}}
WAYS: dict[str, dict[str, dict[str, Any]]] = {  # shown name: its options; the first is what others are compared with
    "MRPC": GROUPED,
    "Topical-Chat": GROUPED | BY_TOKENS,
    "instructions": {"none": {}} | BY_TOKENS,
}
LAYOUTS = {"32 = 32 x 1": (32, 32), "64 = 16 x 4": (64, 16)}  # shown name: (global batch, micro-batch)


@dataclass(frozen=True)
class Options:
    """Of the benchmark. Samples are those of one run, the warm-up included."""

    data: str  # the folder of published data
    rounds: int = 5
    samples: int = 1024
    tasks: str = ",".join(TASKS)
    cases: int = len(TASKS) * len(LAYOUTS)  # of a task and a layout that are launched, the first so many
    warmup: int = 2  # updates of a run that are left out of its figures


# ------------------------------------------------------------------------------------------------------------ launches


def measure(task: str, layout: str, way: str, seed: int, options: Options, scratch: Path) -> dict[str, float]:
    """The figures of one launch.

    Raises:
        RuntimeError: the run failed; its last output is the message.
    """
    size, micro = LAYOUTS[layout]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        samples = {"tokens_per_batch": size * FULL_ROW[task]} if way == "tokens" else {"global_batch_size": size}
        batches = samples | {
            "per_device_train_batch_size": micro,
            "max_train_steps": options.samples // size,
            "seed": seed,
        }
        run = {"cache_dir": scratch / "cache", "output_dir": Path(folder) / "run"}
        command = [
            str(Path(sys.executable).parent / "accelerate"),
            *"launch --config_file accelerate_configs/single.yaml --num_processes 1".split(),
            PROGRAMS[task],
            *flags({**task_options(task, options.data), **COMMON, **WAYS[task][way], **batches, **run}),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{task} {way} left with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        lines = (run["output_dir"] / "metrics.jsonl").read_text().splitlines()
    return figures([json.loads(line) for line in lines], options.warmup)


def task_options(task: str, data: str) -> dict[str, Any]:
    """TASKS[task] with the folder of the data put in."""
    return {name: str(value).format(data=data) for name, value in TASKS[task].items()}


def flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def figures(lines: list[dict[str, Any]], warmup: int) -> dict[str, float]:
    """Samples/s and padding of all updates after the warm-up together."""
    steady = lines[warmup:]
    seconds, tokens = (sum(line[name] for line in steady) for name in ("seconds", "tokens"))
    samples = steady[-1]["consumed_samples"] - lines[warmup - 1]["consumed_samples"]
    positions = sum(line["tokens"] / (1 - line["padding"]) for line in steady)
    return {
        "samples_per_s": samples / seconds,
        "padding": 1 - tokens / positions,
    }


def measure_rounds(options: Options, scratch: Path) -> list[dict[str, dict[str, dict[str, float]]]]:
    """{task, layout: {way: figures}} of each round."""
    rounds = []
    for number in range(options.rounds):
        found: dict[str, dict[str, dict[str, float]]] = {}
        cases = [(task, layout) for task in options.tasks.split(",") for layout in LAYOUTS]
        for task, layout in cases[: options.cases]:
            case = found[f"{task}, {layout}"] = {}
            for way in rotated(list(WAYS[task]), number):
                case[way] = measure(task, layout, way, number, options, scratch)
            rates = "  ".join(f"{way} {case[way]['samples_per_s']:6.1f}" for way in WAYS[task])
            print(f"round {number + 1}  {task:12}  {layout}  samples/s: {rates}", flush=True)
        rounds.append(found)
    return rounds


def summarise(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """{task, layout: {way: medians over rounds, and the ratios' spread}}."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for case in rounds[0]:
        summary[case], first = {}, next(iter(WAYS[case.partition(",")[0]]))
        for way in rounds[0][case]:
            mine = [found[case][way] for found in rounds]
            medians = {name: statistics.median(each[name] for each in mine) for name in mine[0]}
            ratios = [found[case][way]["samples_per_s"] / found[case][first]["samples_per_s"] for found in rounds]
            spread = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
            summary[case][way] = medians | spread
    return summary


def speed_table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [("global batch = micro-batch x number", "way", "samples/s", "ratio", "min", "max", "padding")]
    for case, ways in summary.items():
        for way, each in ways.items():
            ratios = (f"{each[key]:.2f}" for key in ("ratio", "ratio_min", "ratio_max"))
            rows.append((case, way, f"{each['samples_per_s']:.0f}", *ratios, f"{each['padding']:.1%}"))
    return table(rows)


def main() -> None:
    options, began = parse_options(Options, __doc__), time.perf_counter()
    options = dataclasses.replace(options, data=str(Path(options.data).resolve()))
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        summary = summarise(measure_rounds(options, Path(folder)))
    print(f"\n{speed_table(summary)}\n\n{provenance('fp32', 'torch', 'transformers', 'accelerate')}")
    print(f"\n{duration(time.perf_counter() - began)} in all")


if __name__ == "__main__":
    main()
