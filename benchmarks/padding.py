"""What padding costs, and what it costs to avoid it: samples/s and padding of four ways to batch rows of any length.

    python benchmarks/padding.py --data data               # 5 rounds of 16 launches: 12 to 16 minutes on two cores
    python benchmarks/padding.py --data data --rounds 9 --samples 2048
    python benchmarks/padding.py --data data --rounds 0    # only what follows from lengths, without any training

The lengths of real data are the point: --data is a folder of published data, laid out as docs/real-data.md says.

Every figure of speed is from a real `accelerate launch` of train/cls.py or train/seq2seq.py, one process, and its own
metrics.jsonl: all samples of the updates after the warm-up divided by all their seconds. A round launches all ways of
a task and a layout one after another, with the same seed, so that they see the same samples but for a few; the order
rotates from round to round and turns around in every other one, and the next round has another seed. Ratios are taken
within a round: on a machine that others share, only they count.

The rest follows from the lengths of the same samples and zerofit.data.order alone: the share of padding and what else
depends on the window of LengthGroups, and the mean place of short and of long samples in an epoch.

The tables are printed, kept with all figures as JSON, and set into docs/measurements/padding.md.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerofit.data.order import LengthGroups, MicroBatches, SampleOrder
from zerofit.recipe import ClsRecipe, Seq2SeqRecipe, parse_recipe
from zerofit.record.environment import describe_environment
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
}
PROGRAMS = {"MRPC": "train/cls.py", "Topical-Chat": "train/seq2seq.py"}
WAYS = {  # shown name: its options; the first is what the others are compared with
    "maximum": {"pad_to_max_length": "true", "length_grouping": "none"},
    "none": {"length_grouping": "none"},
    "update": {"length_grouping": "update"},
    "window": {"length_grouping": "window"},
}
LAYOUTS = {"32 = 32 x 1": (32, 32), "64 = 16 x 4": (64, 16)}  # shown name: (global batch, micro-batch)
WINDOWS = (1, 2, 4, 8, 16, 50)  # updates
DOCUMENT = "docs/measurements/padding.md"
BLOCKS = ("speed", "environment", "places", "windows")  # fenced blocks of the document


@dataclass(frozen=True)
class Options:
    """Of the benchmark. Samples are those of one run, the warm-up included."""

    data: str  # the folder of published data
    rounds: int = 5
    samples: int = 1024
    cases: int = len(TASKS) * len(LAYOUTS)  # of a task and a layout that are launched, the first so many
    warmup: int = 2  # updates of a run that are left out of its figures
    epochs: int = 2000  # over which the mean place is taken
    output: str = "outputs/benchmarks/padding.json"
    document: str = DOCUMENT  # whose tables are replaced; empty: none


# ------------------------------------------------------------------------------------------------------------ launches


def measure(task: str, layout: str, way: str, seed: int, options: Options, scratch: Path) -> dict[str, float]:
    """The figures of one launch.

    Raises:
        RuntimeError: the run failed; its last output is the message.
    """
    size, micro = LAYOUTS[layout]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        batches = {
            "global_batch_size": size,
            "per_device_train_batch_size": micro,
            "max_train_steps": options.samples // size,
            "seed": seed,
        }
        run = {"cache_dir": scratch / "cache", "output_dir": Path(folder) / "run"}
        command = [
            str(Path(sys.executable).parent / "accelerate"),
            *"launch --config_file accelerate_configs/single.yaml --num_processes 1".split(),
            PROGRAMS[task],
            *flags({**task_options(task, options.data), **COMMON, **WAYS[way], **batches, **run}),
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
    """Samples/s, tokens/s and padding of all updates after the warm-up together."""
    steady = lines[warmup:]
    seconds, tokens = (sum(line[name] for line in steady) for name in ("seconds", "tokens"))
    samples = steady[-1]["consumed_samples"] - lines[warmup - 1]["consumed_samples"]
    positions = sum(line["tokens"] / (1 - line["padding"]) for line in steady)
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens / seconds,
        "padding": 1 - tokens / positions,
        "seconds": seconds,
        "updates": len(steady),
    }


def order_of(round_: int) -> list[str]:
    """The ways' order in this round, counted from 0."""
    names = list(WAYS)
    first = round_ % len(names)
    turned = names[first:] + names[:first]
    return turned[::-1] if round_ % 2 else turned


def measure_rounds(options: Options, scratch: Path) -> list[dict[str, dict[str, dict[str, float]]]]:
    """{task, layout: {way: figures}} of each round."""
    rounds = []
    for number in range(options.rounds):
        found: dict[str, dict[str, dict[str, float]]] = {}
        for task, layout in [(task, layout) for task in TASKS for layout in LAYOUTS][: options.cases]:
            case = found[f"{task}, {layout}"] = {}
            for way in order_of(number):
                case[way] = measure(task, layout, way, number, options, scratch)
            rates = "  ".join(f"{way} {case[way]['samples_per_s']:6.1f}" for way in WAYS)
            print(f"round {number + 1}  {task:12}  {layout}  samples/s: {rates}", flush=True)
        rounds.append(found)
    return rounds


def summarise(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """{task, layout: {way: medians over rounds, and the ratios' spread}}."""
    first = next(iter(WAYS))
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for case in rounds[0]:
        summary[case] = {}
        for way in WAYS:
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


# ------------------------------------------------------------------------------------------------ from lengths alone


def read_lengths(task: str, data: str, scratch: Path) -> tuple[np.ndarray, ...]:
    """Tokens of each training sample: (rows,), or (sources, targets), as the run itself prepares them."""
    from zerofit.data.labelled.examples import prepare_examples
    from zerofit.data.pairs.prepare import prepare_pairs
    from zerofit.model.configuration import load_configuration

    kind, prepare = (ClsRecipe, prepare_examples) if task == "MRPC" else (Seq2SeqRecipe, prepare_pairs)
    recipe = parse_recipe(kind, flags({**task_options(task, data), **COMMON, "cache_dir": scratch / "cache"}))
    samples = prepare(recipe, load_configuration(recipe)).train
    names = ("input_ids",) if kind is ClsRecipe else ("input_ids", "labels")
    return tuple(samples.columns[name].lengths for name in names)


def order_with(lengths: np.ndarray, size: int, window: int, seed: int) -> SampleOrder:
    """The order of a run; window 0: no groups."""
    return SampleOrder(len(lengths), seed, LengthGroups(lengths, size, window) if window else None)


def by_source(columns: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """What updates are made by, and what an update's rows are sorted by, as zerofit/data/tokenized.py has them."""
    source, *target = columns
    return source, source * (target[0].max() + 1) + target[0] if target else source


def by_sum(columns: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The alternative: both by all tokens of a sample."""
    return (np.sum(columns, axis=0),) * 2


KEYS = {"source": by_source, "sum": by_sum}


def padding_share(
    columns: tuple[np.ndarray, ...],
    keys: tuple[np.ndarray, np.ndarray],
    size: int,
    micro: int,
    window: int,
    epochs: int = 10,
) -> float:
    """The share of padding in all positions of one process; window 0: at random, 1: as --length_grouping update."""
    tokens = positions = 0
    order, sort_key = order_with(keys[0], size, window, seed=0), keys[1] if window else None
    total = epochs * len(keys[0]) // size * size
    for rows in MicroBatches(order, total, 0, micro, size // micro, 1, 0, sort_key):
        for column in columns:
            tokens += int(column[rows].sum())
            positions += len(rows) * int(column[rows].max())
    return 1 - tokens / positions


def updates_of(order: SampleOrder, epoch: int, size: int) -> np.ndarray:
    """The update that each sample of an epoch is in, counted from the run's start."""
    updates = np.empty(order.num_samples, dtype=np.int64)
    updates[order.epoch(epoch)] = (epoch * order.num_samples + np.arange(order.num_samples)) // size
    return updates


def company(lengths: np.ndarray, size: int, window: int, seeds: int = 20) -> float:
    """Of the samples that share an update with a sample, the share that does so again in the next epoch."""
    met = again = 0
    for seed in range(seeds):
        order = order_with(lengths, size, window, seed)
        first, second = updates_of(order, 0, size), updates_of(order, 1, size)
        met += _pairs(first)
        again += _pairs(first * (second.max() + 1) + second)
    return again / met


def _pairs(updates: np.ndarray) -> int:
    counts = np.unique(updates, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def token_weights(
    targets: np.ndarray, key: np.ndarray, size: int, window: int, seeds: int = 20
) -> tuple[float, float]:
    """How much a target token of the shortest and of the longest fifth of targets counts, beside the mean of all.

    An update's loss is the mean over its target tokens, so that each counts one over their number.
    """
    weights = np.zeros(len(targets))
    for seed in range(seeds):
        updates = updates_of(order_with(key, size, window, seed), 0, size)
        weights += 1 / np.bincount(updates, weights=targets)[updates]
    weights /= np.average(weights, weights=targets)
    ranked, fifth = np.argsort(targets, kind="stable"), len(targets) // 5
    shortest, longest = (
        float(np.average(weights[part], weights=targets[part])) for part in (ranked[:fifth], ranked[-fifth:])
    )
    return shortest, longest


def window_figures(columns: dict[str, tuple[np.ndarray, ...]]) -> list[dict[str, Any]]:
    """What depends on the window and on what is sorted by. Window 0: at random."""
    cases = [("source", 0), *(("source", window) for window in WINDOWS), *(("sum", window) for window in (1, 16))]
    found = []
    for name, window in cases:
        keys = {task: KEYS[name](columns[task]) for task in TASKS}
        padding = {
            f"{task} {layout}": padding_share(columns[task], keys[task], size, micro, window)
            for task in TASKS
            for layout, (size, micro) in LAYOUTS.items()
        }
        again = company(keys["MRPC"][0], 32, window)
        weights = token_weights(columns["Topical-Chat"][1], keys["Topical-Chat"][0], 32, window)
        found.append({"key": name, "window": window, "padding": padding, "company": again, "token_weights": weights})
    return found


def window_table(found: list[dict[str, Any]]) -> str:
    short = {f"{task} {layout}": f"{task} {size}" for task in TASKS for layout, (size, _) in LAYOUTS.items()}
    rows = [("window", *short.values(), "same company", "short : long")]
    for each in found:
        label = f"{each['window']}" if each["window"] else "at random"
        label += "" if each["key"] == "source" else f", {each['key']}"
        shares = (f"{each['padding'][case]:.1%}" for case in short)
        weights = " : ".join(f"{weight:.2f}" for weight in each["token_weights"])
        rows.append((label, *shares, f"{each['company']:.1%}", weights))
    return table(rows)


class InOrder(LengthGroups):
    """Groups whose batches stay in order: what LengthGroups must not be like."""

    def arrange(self, drawn: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return drawn[np.argsort(self.lengths[drawn], kind="stable")]


def epochs_of(lengths: np.ndarray, size: int, way: str, count: int) -> Iterator[np.ndarray]:
    """The first epoch of as many seeds: at random, in windows (drawn, or computed as of very many samples), or in
    windows whose batches stay in order."""
    for seed in range(count):
        order = order_with(lengths, size, LengthGroups.window if way in ("window", "computed") else 0, seed)
        if way == "computed":
            order._drawn = order._computed
        if way == "in order":
            order.groups = InOrder(lengths, size)
        yield updates_of(order, 0, size)


def place_figures(lengths: np.ndarray, size: int, count: int) -> list[dict[str, Any]]:
    """Where short and long samples come in an epoch, as a share of it (0.5 is the middle), with standard errors."""
    found, ranked, tenth = [], np.argsort(lengths, kind="stable"), len(lengths) // 10
    for way in ("none", "window", "computed", "in order"):
        mean, tenths, correlations = np.zeros(len(lengths)), [], []
        for updates in epochs_of(lengths, size, way, count):
            places = (updates + 0.5) * size / len(lengths)
            mean += places / count
            tenths.append((places[ranked[:tenth]].mean(), places[ranked[-tenth:]].mean()))
            correlations.append(np.corrcoef(lengths, places)[0, 1])
        found.append(
            {
                "way": way,
                "shortest": [float(f(np.array(tenths)[:, 0])) for f in (np.mean, lambda x: np.std(x) / count**0.5)],
                "longest": [float(f(np.array(tenths)[:, 1])) for f in (np.mean, lambda x: np.std(x) / count**0.5)],
                "correlation": float(np.corrcoef(lengths, mean)[0, 1]),
                "noise": float(np.std(correlations)),
            }
        )
    return found


def place_table(found: list[dict[str, Any]]) -> str:
    rows = [("way", "shortest tenth", "longest tenth", "correlation", "noise")]
    for each in found:
        tenths = (f"{each[name][0]:.4f} ± {each[name][1]:.4f}" for name in ("shortest", "longest"))
        rows.append((each["way"], *tenths, f"{each['correlation']:+.3f}", f"± {each['noise']:.3f}"))
    return table(rows)


# ---------------------------------------------------------------------------------------------------------------- main


def set_into_document(path: Path, tables: dict[str, str]) -> None:
    """Replace the fenced block after each `<!-- name -->`."""
    text = path.read_text(encoding="utf-8")
    for name, content in tables.items():
        pattern = rf"(<!-- {name} -->\n```\n).*?^```"
        text = re.sub(pattern, lambda m, c=content: f"{m[1]}{c}\n```", text, flags=re.DOTALL | re.MULTILINE)
    path.write_text(text, encoding="utf-8")


def described(environment: dict[str, Any]) -> str:
    """Hardware, versions, commit and command."""
    hardware, packages = environment["hardware"], environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate", "numpy"))
    changed = ", with uncommitted changes" if environment["zerofit_changed"] else ""
    return "\n".join(
        [
            f"command   python {' '.join(environment['arguments'][1:])}",
            f"hardware  {hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']} GiB, no GPU used",
            f"versions  {versions}, Python {environment['python']}",
            f"commit    {(environment['zerofit_commit'] or 'unknown')[:7]}{changed}",
        ]
    )


def _text(document: str) -> str:
    path = ROOT / document
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def parse_options(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in dataclasses.fields(Options):
        if each.default is dataclasses.MISSING:
            parser.add_argument(f"--{each.name}", type=each.type, required=True)
        else:
            parser.add_argument(f"--{each.name}", type=each.type, default=each.default, help=f"[{each.default}]")
    options = Options(**vars(parser.parse_args(argv)))
    options = dataclasses.replace(options, data=str(Path(options.data).resolve()))
    if not (Path(options.data) / "glue" / "MRPC").is_dir():
        parser.error(f"--data {options.data}: it has no glue/MRPC (docs/real-data.md says what lies where)")
    if options.rounds < 0 or options.warmup < 1 or options.epochs < 2:
        parser.error("--rounds: at least 0, --warmup: at least 1, --epochs: at least 2")
    missing = [
        name for name in BLOCKS if options.document and f"<!-- {name} -->\n```\n" not in _text(options.document)
    ]
    if missing:
        parser.error(f"--document {options.document}: it has no place for {', '.join(missing)}")
    shortest = max(size for size, _ in LAYOUTS.values()) * (options.warmup + 1)
    if options.samples < shortest:
        parser.error(f"--samples {options.samples}: at least {shortest}, to have an update after the warm-up")
    return options


def main(argv: list[str] | None = None) -> int:
    options, began = parse_options(argv), time.perf_counter()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        columns = {task: read_lengths(task, options.data, Path(folder)) for task in TASKS}
        windows, places = window_figures(columns), place_figures(columns["MRPC"][0], 32, options.epochs)
        tables = {"windows": window_table(windows), "places": place_table(places)}
        print("\n\n".join(tables.values()), flush=True)
        rounds = measure_rounds(options, Path(folder))
    content: dict[str, Any] = {"windows": windows, "places": places}
    if rounds:
        content |= {"summary": summarise(rounds), "rounds": rounds}
        tables["speed"] = speed_table(content["summary"])
        print(f"\n{tables['speed']}")
    environment = describe_environment([sys.executable, *sys.argv], torch.device("cpu"))
    environment["arguments"] = ["", "benchmarks/padding.py", *(sys.argv[1:] if argv is None else argv)]
    content |= {"options": dataclasses.asdict(options), "environment": environment}
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if options.document and rounds:
        set_into_document(Path(options.document), {**tables, "environment": described(environment)})
    print(f"\n{duration(time.perf_counter() - began)} in all, written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
