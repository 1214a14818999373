"""How long training stands still for a checkpoint, against the bytes written: written meanwhile, and written at once.

    python benchmarks/save_stall.py                        # the tokenizer is the hub's gpt2
    python benchmarks/save_stall.py --tokenizer data/tokenizers/gpt2

Each row is a real launch of train/clm.py: a small GPT-2 of random weights (--shape), fp32, 2 CPU processes (one for
`single`), 30 updates with a checkpoint every EVERY. `paused` is the mean over the checkpoints but the first,
in which the buffers are made (column `first`); `written in` is the mean time from the begin of a save to its end;
`updates meanwhile` is the median time of the updates that ran while one was written over that of the others. Writes
the table of docs/measurements/resume.md to outputs/save-stall.md.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STRATEGIES = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2}
EVERY = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the hub")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--shape", default="n_embd=512,n_layer=8,n_head=8", help="changes to GPT-2's configuration")
    parser.add_argument("--text", default="{stdlib}/*.py", help="what is trained on")
    parser.add_argument("--updates", type=int, default=30, help=f"a multiple of {EVERY}")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "save-stall.md")
    options = parser.parse_args()
    rows = [
        "| strategy | ranks | written | MB | first, s | paused, s | written in, s | updates meanwhile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(rows))
    options.output.parent.mkdir(exist_ok=True)
    for strategy in options.strategies:
        for meanwhile in (True, False):
            rows.append(measured(strategy, meanwhile, options))
            print(rows[-1], flush=True)
    options.output.write_text("\n".join([*rows, "", provenance("fp32", "torch", "accelerate", "deepspeed")]) + "\n")


def measured(strategy: str, meanwhile: bool, options: argparse.Namespace) -> str:
    """One row of the table."""
    from helpers import launch, updates

    processes = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory(dir=options.output.parent) as folder:
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
            "128",
            "--per_device_train_batch_size",
            str(4 // processes),
            "--max_train_steps",
            str(options.updates),
            "--validation_split_percentage",
            "0",
            "--precision",
            "fp32",
            "--save_steps",
            str(EVERY),
            "--save_total_limit",
            "2",
            "--save_async",
            str(meanwhile).lower(),
            strategy=strategy,
            processes=processes,
            timeout=1200,
        )
        saves = json.loads((output / "environment.json").read_text())["checkpoints"]
    assert len(saves) == options.updates // EVERY
    stood = statistics.mean(save["blocked_s"] for save in saves[1:])
    took = statistics.mean(save["seconds"] for save in saves[1:])
    busy, free = [], []
    for line in updates(lines)[EVERY:]:
        (busy if (line["update"] - 1) % EVERY < 2 else free).append(line["seconds"])
    slower = f"{statistics.median(busy) / statistics.median(free):.2f}" if meanwhile else ""
    size = saves[-1]["bytes"] / 1e6
    how = "meanwhile" if meanwhile else "at once"
    return (
        f"| {strategy} | {processes} | {how} | {size:,.0f} | {saves[0]['blocked_s']:.2f} | {stood:.2f} | "
        f"{took:.2f} | {slower} |"
    )


if __name__ == "__main__":
    main()
