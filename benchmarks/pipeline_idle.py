"""How much of an update a pipeline stands idle, against (p - 1) / (m + p - 1).

    python benchmarks/pipeline_idle.py                # pp with 2 processes, 1 to 16 micro-batches an update

Each row is a launch of train/clm.py: a Llama of random weights (--shape), fp32, rows of 128, micro-batches of 8; the
median time of its updates but the first two. A micro-batch takes t, the slope of a line through the times of updates
of 1 to m micro-batches; of an update of T seconds the slower stage computes m t, and 1 - m t / T is idle. So the
optimizer's step and the start of an update count as idle too. Writes the table of docs/measurements/strategies.md to
outputs/pipeline-idle.md.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
SHAPE = "num_hidden_layers=4,hidden_size=256,intermediate_size=688,num_attention_heads=4,num_key_value_heads=4"
STAGES = 2  # of the pair pp, with as many processes
NOT_COUNTED = 2  # updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--shape", default=SHAPE, help="changes to Llama's configuration")
    parser.add_argument("--text", default="{stdlib}/*.py", help="what is trained on")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "pipeline-idle.md")
    options = parser.parse_args()
    times = {count: seconds_of_an_update(count, options) for count in options.micro_batches}
    slope = statistics.linear_regression(list(times), list(times.values())).slope
    rows = ["| micro-batches | update, s | idle | (p - 1) / (m + p - 1) |", "|---|---|---|---|"]
    for count, seconds in times.items():
        idle, bubble = 1 - count * slope / seconds, STAGES - 1
        rows.append(f"| {count} | {seconds:.3f} | {idle:.1%} | {bubble / (count + bubble):.1%} |")
    about = provenance(f"pp, {STAGES} processes, fp32", "torch", "deepspeed", "transformers")
    print("\n".join([*rows, "", about]))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text("\n".join([*rows, "", about]) + "\n")


def seconds_of_an_update(micro_batches: int, options: argparse.Namespace) -> float:
    from helpers import launch, updates

    with tempfile.TemporaryDirectory() as folder:
        lines = launch(
            Path(folder) / "run",
            "--config_name",
            "llama-2-7b",
            "--config_overrides",
            options.shape,
            "--train_tokenizer_vocab_size",
            "2048",
            "--train_file",
            options.text,
            "--block_size",
            "128",
            "--per_device_train_batch_size",
            "8",
            "--gradient_accumulation_steps",
            str(micro_batches),
            "--max_train_steps",
            str(options.updates),
            "--validation_split_percentage",
            "0",
            "--precision",
            "fp32",
            "--max_train_samples",
            "4000",
            strategy="pp",
            processes=STAGES,
            timeout=1200,
        )
    return statistics.median(line["seconds"] for line in updates(lines)[NOT_COUNTED:])


if __name__ == "__main__":
    main()
