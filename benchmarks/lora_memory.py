"""What each rank holds under full fine-tuning and under LoRA: bytes of weights, of the optimizer, and the peak.

    python benchmarks/lora_memory.py                       # the tokenizer is the hub's gpt2
    python benchmarks/lora_memory.py --tokenizer data/tokenizers/gpt2

Each row is a real launch of train/clm.py with 2 CPU processes (one for `single`): the shape of GPT-2 (124 M) with
random weights, fp32, three updates. Weights and optimizer are what rank 0 holds from update to update (device and
host together; `bytes_held_by_rank_0` of environment.json), the peak is resident memory of the largest rank. Writes the
table of docs/measurements/lora.md to outputs/lora-memory.md.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "zero3_offload_optimizer": 2}
METHODS = {"full": [], "LoRA": ["--lora"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the hub")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--shape", default="", help="changes to GPT-2's configuration")
    parser.add_argument("--text", default="{stdlib}/*.py", help="what is trained on")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "lora-memory.md")
    options = parser.parse_args()
    rows = [
        "| strategy | ranks | method | trained | weights, MB | optimizer, MB | peak resident, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(rows))
    for strategy in options.strategies:
        for method, flags in METHODS.items():
            rows.append(measured(strategy, method, flags, options))
            print(rows[-1], flush=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(
        "\n".join([*rows, "", provenance("fp32", "torch", "accelerate", "deepspeed", "peft")]) + "\n"
    )


def measured(strategy: str, method: str, flags: list[str], options: argparse.Namespace) -> str:
    """One row of the table."""
    from helpers import launch

    processes = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        lines = launch(
            output,
            "--config_name",
            "gpt2",
            "--config_overrides",
            options.shape,
            "--tokenizer_name",
            options.tokenizer,
            "--train_file",
            options.text,
            "--block_size",
            "64",
            "--per_device_train_batch_size",
            "1",
            "--max_train_steps",
            "3",
            "--validation_split_percentage",
            "0",
            "--precision",
            "fp32",
            *flags,
            strategy=strategy,
            processes=processes,
            timeout=1200,
        )
        held = json.loads((output / "environment.json").read_text())["bytes_held_by_rank_0"]
        trained = sum(trained_parameters(output / "model"))
    peak = max(line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line)
    figures = (f"{value / 1e6:,.1f}" for value in (held["parameters"], held["optimizer"], peak))
    return f"| {strategy} | {processes} | {method} | {trained:,} | {' | '.join(figures)} |"


def trained_parameters(model: Path) -> list[int]:
    """The sizes of the tensors that the run left behind: those that it trained."""
    from safetensors import safe_open

    sizes = []
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            sizes += [tensors.get_tensor(name).numel() for name in tensors.keys()]  # noqa: SIM118
    return sizes


if __name__ == "__main__":
    main()
