"""Runs that are killed with SIGKILL at random moments, and what is lost: nothing.

    python benchmarks/kills.py                              # 30 kills a strategy: about 8 minutes each on two cores
    python benchmarks/kills.py --strategies zero3 --kills 60

A tiny GPT-2 from scratch (a Llama under sp), in fp32, two processes, a checkpoint after every update. Every other kill
comes at a moment drawn uniformly from the whole time of a launch (start and resume included), the others at one drawn
uniformly from what is left of the training. All processes get the signal at once. A killed run is launched again, and
killed again or left to end; then another one begins, until there were as many kills as asked for. Every run must end
with the samples of the undisturbed run in every update, none repeated, none skipped, with its losses to 1e-6, and
without a traceback.

Builds of DeepSpeed's operations lie in the folder too. A kill in the middle of one leaves a lock (column `builds cut
off`) that the next launch would wait for, for ever, if it did not take it away (zerofit/strategy/builds.py).

A strategy's result is kept in the folder; the same command again measures only those that have none yet.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from random import Random

import torch
import yaml

from zerofit.record.environment import describe_environment
from zerofit.record.jsonl import JsonlFile
from zerofit.tools.launches import Trial, ending_in_order, failure, launched
from zerofit.tools.verify.killing import Killed, Moment, after_seconds, run_and_kill, within_the_rest
from zerofit.tools.verify.record_comparison import compare_metrics, compare_samples

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-6
LIMIT_S = 300.0  # a launch that has not ended by then hangs
RECIPE = {
    "config_name": "gpt2",
    "config_overrides": "n_layer=2,n_head=2,n_embd=128,n_positions=128,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "train_tokenizer_vocab_size": 300,
    "block_size": 128,
    "validation_split_percentage": 0,
    "per_device_train_batch_size": 4,
    "global_batch_size": 16,
    "learning_rate": 1e-3,
    "num_warmup_steps": 4,
    "precision": "fp32",
    "record_samples": True,
    "report_to": "none",
    "logging_steps": 1,
}

LLAMA = {  # GPT-2 has no sequence parallelism
    "config_name": "llama-2-7b",
    "config_overrides": "num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,hidden_size=128,"
    "intermediate_size=344,max_position_embeddings=128",
}


@dataclass
class Result:
    """Of one strategy. Differences and counts are against the undisturbed run."""

    kills: int = 0
    while_saving: int = 0
    while_starting: int = 0
    builds_cut_off: int = 0
    launches: int = 0
    resumes: int = 0
    runs: int = 0
    loss_difference: float = 0.0
    repeated: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, killed: Killed) -> None:
        self.kills += killed.kills
        self.while_saving += killed.kills_while_saving
        self.while_starting += killed.kills_while_starting
        self.builds_cut_off += killed.locks
        self.launches += len(killed.processes)
        self.resumes += killed.resumes
        self.runs += 1

    def compare(self, run: Path, reference: Path, num_updates: int) -> None:
        metrics, ledgers = (
            [JsonlFile(folder / name).read() for folder in (run, reference)]
            for name in ("metrics.jsonl", "samples.jsonl")
        )
        difference, ledger = compare_metrics(*metrics, num_updates), compare_samples(*ledgers)
        self.loss_difference = max(self.loss_difference, difference.largest["loss"])
        self.repeated += ledger.repeated
        self.skipped += ledger.skipped
        self.failures += difference.problems
        if not difference.largest["loss"] <= TOLERANCE:
            self.failures.append(f"{run}: the loss differs by {difference.largest['loss']:.1e}")
        if not ledger.is_same:
            self.failures.append(f"{run}: {ledger}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="ddp,zero2,zero3")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--save_steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "benchmarks" / "kills")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(options.folder.resolve() / "builds")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    environment = describe_environment(sys.argv, device)
    results = {}
    with ending_in_order():
        for strategy in options.strategies.split(","):
            results[strategy] = kept_or_measured(strategy, options, environment["zerofit_commit"])
    print(f"\n{markdown(results, environment, options)}", flush=True)
    failures = [f"{name}: {problem}" for name, result in results.items() for problem in result.failures]
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures or any(result.kills < options.kills for result in results.values()) else 0


def kept_or_measured(strategy: str, options, commit: str | None) -> Result:
    kept, about = options.folder / f"{strategy}.json", {**vars(options), "commit": commit}
    about = {name: str(value) for name, value in about.items() if name not in ("folder", "strategies")}
    if kept.is_file() and (found := json.loads(kept.read_text()))["about"] == about:
        print(f"{strategy}: as kept in {kept}", flush=True)
        return Result(**found["result"])
    result = measure(strategy, options)
    if not result.failures:
        kept.write_text(json.dumps({"about": about, "result": dataclasses.asdict(result)}, indent=1) + "\n")
    return result


def measure(strategy: str, options) -> Result:
    """Kill runs of one strategy until there were enough kills, or one has failed."""
    folder, result, random = options.folder / strategy, Result(), Random(f"{options.seed} {strategy}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    time_launch(trial_of(folder, "first", strategy, options), folder, options)  # builds what is to be built
    reference = trial_of(folder, "undisturbed", strategy, options)
    whole_s, update_s = time_launch(reference, folder, options)
    print(f"{strategy}: undisturbed, {whole_s:.1f} s, an update and its checkpoint {update_s:.2f} s", flush=True)
    while result.kills < options.kills and not result.failures:
        trial = trial_of(folder, f"run-{result.runs + 1}", strategy, options)
        moments = draw(random, result.kills, whole_s, options.updates, update_s)
        killed = run_and_kill(
            trial,
            folder / "logs",
            islice(moments, options.kills - result.kills),
            repeat(options.num_processes),
            LIMIT_S,
            say=lambda text: print(f"{strategy}: {text}", flush=True),
        )
        result.add(killed)
        if killed.failure:
            result.failures.append(f"{trial.output}: {killed.failure}")
        else:
            result.compare(trial.output, reference.output, options.updates)
            shutil.rmtree(trial.output)
    return result


def draw(random: Random, number: int, whole_s: float, num_updates: int, update_s: float) -> Iterator[Moment]:
    """Moments without end: the even ones somewhere in a launch, the odd ones somewhere in what is left to train."""
    while True:
        if number % 2 == 0:
            yield after_seconds(random.uniform(0, whole_s))
        else:
            yield within_the_rest(random.random(), num_updates, update_s)
        number += 1


def trial_of(folder: Path, name: str, strategy: str, options) -> Trial:
    text, recipe = folder.parent / "text.txt", folder / "recipe.yaml"
    if not text.is_file():
        words = Random(0)
        text.write_text("".join(f"{words.randrange(10**6)} is a number\n" for _ in range(20_000)))
    length = {"max_train_steps": options.updates, "save_steps": options.save_steps, "save_total_limit": 2}
    files = {"train_file": str(text), "cache_dir": str(folder.parent / "cache")}
    model = LLAMA if strategy == "sp" else {}
    recipe.write_text(yaml.safe_dump({**RECIPE, **model, **length, **files}, sort_keys=False))
    return Trial("clm", ROOT / "accelerate_configs" / f"{strategy}.yaml", recipe, folder / name)


def time_launch(trial: Trial, folder: Path, options) -> tuple[float, float]:
    """(seconds of a whole launch that nobody disturbs, seconds from one update to the next, its checkpoint included).

    Raises:
        RuntimeError: it has failed.
    """
    command, log = trial.command(options.num_processes), folder / "logs" / f"{trial.output.name}.log"
    with launched(command, trial.output, log) as launch:
        launch.wait(LIMIT_S, lambda launch: launch.newest_update >= 1)
        first_s = launch.seconds
        launch.wait(LIMIT_S, lambda launch: launch.newest_update >= options.updates)
        update_s = (launch.seconds - first_s) / (options.updates - 1)
        failed = failure(launch, launch.wait(LIMIT_S))
        if failed:
            raise RuntimeError(f"the undisturbed run {failed}")
        return launch.seconds, update_s


def markdown(results: dict[str, Result], environment: dict, options) -> str:
    """The table, and under it what it was measured with."""
    names = (
        "strategy",
        "kills",
        "while saving",
        "while starting",
        "builds cut off",
        "launches",
        "resumes",
        "runs",
        "largest difference of a loss",
        "samples repeated",
        "samples skipped",
    )
    rows = [
        (
            name,
            result.kills,
            result.while_saving,
            result.while_starting,
            result.builds_cut_off,
            result.launches,
            result.resumes,
            result.runs,
            f"{result.loss_difference:.1e}" if result.loss_difference else "0",
            result.repeated,
            result.skipped,
        )
        for name, result in results.items()
    ]
    packages = ", ".join(
        f"{name} {environment['packages'][name]}" for name in ("torch", "accelerate", "deepspeed", "transformers")
    )
    hardware = environment["hardware"]
    devices = ", ".join(hardware.get("gpus", [])) or f"{hardware['cpu']}, {hardware['cores']} cores, no GPU"
    changed = ", with changes" if environment["zerofit_changed"] else ""
    command = f"python benchmarks/kills.py {' '.join(sys.argv[1:])}".strip()
    return "\n".join(
        [
            f"| {' | '.join(names)} |",
            "|---" * len(names) + "|",
            *(f"| {' | '.join(map(str, row))} |" for row in rows),
            "",
            f"{options.num_processes} processes, {options.updates} updates, save_steps {options.save_steps}, fp32; "
            f"{devices}; {packages}; commit {(environment['zerofit_commit'] or '?')[:7]}{changed}; `{command}`.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
