"""How long training stands still for a checkpoint, against the bytes written: written meanwhile, and written at once.

    python benchmarks/save_stall.py                        # the tokenizer is the hub's gpt2
    python benchmarks/save_stall.py --tokenizer data/tokenizers/gpt2

Each row is a real launch of train/clm.py: a small GPT-2 of random weights (SHAPE), fp32, 2 CPU processes (one for
`single`), UPDATES updates with a checkpoint every EVERY. `stood still` is the mean over the checkpoints but the first,
in which the buffers are made (column `first`); `written in` is the mean time from the begin of a save to its end;
`updates meanwhile` is the median time of the updates that ran while one was written over that of the others. Writes
the table of docs/checkpoints.md to outputs/save-stall.md.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from foot import foot

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STRATEGIES = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2}
UPDATES, EVERY = 30, 6
SHAPE = "n_embd=512,n_layer=8,n_head=8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the hub")
    tokenizer = parser.parse_args().tokenizer
    rows = ["| strategy | ranks | written | MB | first, s | stood still, s | written in, s | updates meanwhile |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    print("\n".join(rows))
    for strategy, processes in STRATEGIES.items():
        for meanwhile in (True, False):
            rows.append(measured(strategy, processes, meanwhile, tokenizer))
            print(rows[-1], flush=True)
    (ROOT / "outputs").mkdir(exist_ok=True)
    (ROOT / "outputs" / "save-stall.md").write_text(
        "\n".join([*rows, "", foot("fp32", "torch", "accelerate", "deepspeed")]) + "\n"
    )


def measured(strategy: str, processes: int, meanwhile: bool, tokenizer: str) -> str:
    """One row of the table."""
    from helpers import launch, updates

    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:
        output = Path(folder) / "run"
        lines = launch(
            output, "--config_name", "gpt2", "--config_overrides", SHAPE, "--tokenizer_name", tokenizer,
            "--train_file", "{stdlib}/*.py", "--block_size", "128", "--per_device_train_batch_size",
            str(4 // processes), "--max_train_steps", str(UPDATES), "--validation_split_percentage", "0",
            "--precision", "fp32", "--save_steps", str(EVERY), "--save_total_limit", "2", "--save_async",
            str(meanwhile).lower(), strategy=strategy, processes=processes, timeout=1200,
        )  # fmt: skip
        saves = json.loads((output / "environment.json").read_text())["checkpoints"]
    assert len(saves) == UPDATES // EVERY
    stood = statistics.mean(save["stood_still"] for save in saves[1:])
    took = statistics.mean(save["seconds"] for save in saves[1:])
    busy, free = [], []
    for line in updates(lines)[EVERY:]:
        (busy if (line["update"] - 1) % EVERY < 2 else free).append(line["seconds"])
    slower = f"{statistics.median(busy) / statistics.median(free):.2f}" if meanwhile else ""
    size = saves[-1]["bytes"] / 1e6
    how = "meanwhile" if meanwhile else "at once"
    return (
        f"| {strategy} | {processes} | {how} | {size:,.0f} | {saves[0]['stood_still']:.2f} | {stood:.2f} | "
        f"{took:.2f} | {slower} |"
    )


if __name__ == "__main__":
    main()
