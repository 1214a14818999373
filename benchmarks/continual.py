"""The worked example of docs/pre-train.md: a real pretrained Llama, continued, against one from scratch.

    python benchmarks/continual.py [--weights FOLDER] [--text FILE] [--updates 250] [--processes 2]

The guide's figures are of karpathy's stories260K in Meta's layout and of TinyStories (docs/real-data.md); without
--weights and --text it takes the tests' own small Llama, and the text that it was trained on. Runs the commands of
recipes/clm/stories-continual.yaml (convert, prepare, train under zero2) in a temporary folder, then the same training
under zero3, and from scratch. Writes outputs/continual.svg, and the table of the guide to outputs/continual.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
BIN = Path(sys.executable).parent
RUNS = {
    "continued, zero2": ("zero2", True),
    "continued, zero3": ("zero3", True),
    "from scratch, zero2": ("zero2", False),
}
COLOURS = ("#08519c", "#969696")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a Llama in Meta's layout; with none, the tests' own")
    parser.add_argument("--text", type=Path, help="documents with a line <|endoftext|> between them")
    parser.add_argument("--updates", type=int, default=250)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs", help="folder of the picture and the table")
    args = parser.parse_args()
    if not (args.weights and args.text):
        from material import make_material

        made = make_material(ROOT / "outputs" / "material")
        args.weights, args.text = args.weights or made / "models/llama/meta", args.text or made / "text/train.txt"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(
            BIN / "zerofit",
            "convert",
            "meta-to-hf",
            "--input",
            args.weights,
            "--output",
            folder / "hf",
        )
        run(
            BIN / "zerofit",
            "prepare",
            "--input",
            args.text,
            "--output_prefix",
            folder / "stories",
            "--tokenizer",
            folder / "hf",
            "--append_eod",
            "--workers",
            "2",
        )
        curves = {label: train(folder, strategy, continued, args) for label, (strategy, continued) in RUNS.items()}
    args.output.mkdir(exist_ok=True)
    draw(curves, f"{args.weights.parent.name} on {args.text.name}", args.output / "continual.svg")
    text = "\n".join(
        [
            *table(curves),
            "",
            difference(curves),
            "",
            provenance(f"{args.processes} processes", "torch", "accelerate", "deepspeed", "transformers"),
        ]
    )
    (args.output / "continual.md").write_text(text + "\n")
    print(text)


def run(*command) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


def train(folder: Path, strategy: str, continued: bool, args) -> list[dict]:
    """metrics.jsonl of one run."""
    output = folder / f"{strategy}-{'continued' if continued else 'scratch'}"
    start = ["--model_name_or_path", folder / "hf"]
    if not continued:
        start = ["--model_name_or_path", "null", "--config_name", folder / "hf", "--tokenizer_name", folder / "hf"]
    run(
        BIN / "accelerate",
        "launch",
        "--config_file",
        f"accelerate_configs/{strategy}.yaml",
        "--num_processes",
        args.processes,
        "--main_process_port",
        "0",
        "train/clm.py",
        "--config",
        "recipes/clm/stories-continual.yaml",
        *start,
        "--data_path",
        folder / "stories_text_document",
        "--max_train_steps",
        args.updates,
        "--output_dir",
        output,
    )
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def table(curves: dict[str, list[dict]]) -> list[str]:
    evaluated = [line["update"] for line in next(iter(curves.values())) if "eval_loss" in line]
    lines = [
        "| held-out loss after update | " + " | ".join(map(str, evaluated)) + " |",
        "|---|" + "---|" * len(evaluated),
    ]
    for label, lines_of in curves.items():
        held = [f"{line['eval_loss']:.4f}" for line in lines_of if "eval_loss" in line]
        lines.append(f"| {label} | " + " | ".join(held) + " |")
    return lines


def difference(curves: dict[str, list[dict]]) -> str:
    """How far apart the two strategies are."""
    ours, theirs = ([line["loss"] for line in curves[label] if "loss" in line] for label in list(RUNS)[:2])
    largest = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    return f"zero2 and zero3: the losses of {len(ours)} updates differ by at most {largest:.1e} (relative)."


def draw(curves: dict[str, list[dict]], title: str, file: Path) -> None:
    """Both curves on the left, the continued one alone on the right; zero3's would lie on zero2's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    shown = {label.split(",")[0]: lines for label, lines in curves.items() if not label.endswith("zero3")}
    for axes, labels in zip(figure.subplots(1, 2), (list(shown), list(shown)[:1])):
        for label, colour in zip(labels, COLOURS):
            trained = [line for line in shown[label] if "loss" in line]
            held = [line for line in shown[label] if "eval_loss" in line]
            axes.plot(
                [line["update"] for line in trained],
                [line["loss"] for line in trained],
                color=colour,
                alpha=0.4,
                linewidth=1,
            )
            axes.plot(
                [line["update"] for line in held],
                [line["eval_loss"] for line in held],
                "o-",
                color=colour,
                markersize=4,
                label=f"{label}, held out",
            )
        axes.set(xlabel="update", ylabel="loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(file)


if __name__ == "__main__":
    main()
