"""A batch and rows that grow in the first updates, against a plain run, at equal tokens.

    python benchmarks/growing.py          # three runs of recipes/clm/stdlib-gpt2.yaml, one process each

The plain run has 200 updates of 16 rows of 256 tokens. With --global_batch_warmup 4@100 and with
--block_size_warmup 64@100 the first 100 updates read half as many tokens or less, and the run has as many more updates
as make up for it. The learning rate follows the updates of each run. Held-out losses are of full rows in all three.
Writes the table of docs/measurements/pre-train.md to outputs/growing.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RECIPE = ROOT / "recipes" / "clm" / "stdlib-gpt2.yaml"
ROWS, LENGTH = 16, 256  # of an update, in the recipe
QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of the tokens, at which the held-out loss is shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200, help="of the plain run")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "growing.md")
    parser.add_argument("--max_eval_samples", default="40")
    options, more = parser.parse_known_args()  # more: of the recipe
    half = options.updates // 2
    tokens = options.updates * ROWS * LENGTH
    cases = {
        "plain": ([], 0),
        f"--global_batch_warmup 4@{half}": (["--global_batch_warmup", f"4@{half}"], grown(4, ROWS, half) * LENGTH),
        f"--block_size_warmup 64@{half}": (["--block_size_warmup", f"64@{half}"], grown(64, LENGTH, half) * ROWS),
    }
    shares = " | ".join(f"{share:.0%}" for share in QUARTERS)
    rows = [f"| | updates | {shares} of {tokens:,} tokens | seconds |", "|---" * (len(QUARTERS) + 3) + "|"]
    for name, (flags, while_growing) in cases.items():
        full = (tokens - while_growing) // (ROWS * LENGTH)
        updates = full + (half if flags else 0)
        often = str(max(1, options.updates // 20))
        lines = run(
            [
                *flags,
                "--max_train_steps",
                str(updates),
                "--eval_steps",
                often,
                "--max_eval_samples",
                options.max_eval_samples,
                *more,
            ]
        )
        read = losses_by_tokens(lines)
        losses = [loss_at(read, share * tokens) for share in QUARTERS]
        seconds = sum(line.get("seconds", 0.0) for line in lines)
        rows.append(f"| {name} | {updates} | {' | '.join(f'{loss:.3f}' for loss in losses)} | {seconds:.0f} |")
    about = provenance("one process, fp32", "torch", "transformers")
    print("\n".join([*rows, "", about]))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join([*rows, "", about]) + "\n")


def grown(first: int, last: int, updates: int) -> int:
    """The sum of the sizes of the updates that grow."""
    from zerofit.recipe.growth import Growth

    growth = Growth(first, last, updates)
    return sum(growth(update) for update in range(1, updates + 1))


def run(flags: list[str]) -> list[dict]:
    from helpers import launch

    with tempfile.TemporaryDirectory() as folder:
        return launch(
            Path(folder) / "run",
            "--config",
            str(RECIPE),
            "--per_device_train_batch_size",
            "4",
            "--sample_tokens",
            "1",
            *flags,
            strategy="single",
            processes=1,
            timeout=3600,
        )


def losses_by_tokens(lines: list[dict]) -> list[tuple[int, float]]:
    """(tokens that were read, held-out loss) of each evaluation."""
    read, found = 0, []
    for line in lines:
        read += line.get("tokens", 0)
        if "eval_loss" in line:
            found.append((read, line["eval_loss"]))
    return found


def loss_at(losses: list[tuple[int, float]], tokens: float) -> float:
    """The loss after so many tokens, on the line between two evaluations."""
    after = next((pair for pair in losses if pair[0] >= tokens), losses[-1])
    before = max((pair for pair in losses if pair[0] < tokens), default=after)
    if after[0] == before[0]:
        return after[1]
    return before[1] + (after[1] - before[1]) * (tokens - before[0]) / (after[0] - before[0])


if __name__ == "__main__":
    main()
