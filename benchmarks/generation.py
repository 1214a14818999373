"""BLEU and ROUGE of the same weights under several strategies: they must be equal, to the last text.

    python benchmarks/generation.py --model outputs/dialogue-small/model --data data/blended_skill_talk_val.json

Each strategy is a real launch of train/seq2seq.py at a learning rate of 0, with 2 CPU processes (one for `single`).
The held-out examples are the first ones of a file of conversations, a number that 2 does not divide. Writes
the table of docs/measurements/generation.md, whose figures are of BlendedSkillTalk, to outputs/generation.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "zero3_offload": 2}
FIGURES = ("loss", "bleu", "rouge1", "rouge2", "rougeL")


def main() -> None:
    from helpers import launch

    options = parse()
    rows, reference = [], None
    for strategy in options.strategies:
        processes = STRATEGIES[strategy]
        with tempfile.TemporaryDirectory() as folder:
            output, begun = Path(folder) / "run", time.perf_counter()
            lines = launch(
                output,
                "--model_name_or_path",
                options.model,
                "--train_file",
                options.data,
                "--validation_file",
                options.data,
                "--max_eval_samples",
                options.examples,
                "--max_train_samples",
                "16",
                "--max_train_steps",
                "1",
                "--learning_rate",
                "0",
                "--eval_on_start",
                "false",
                "--save_best",
                "false",
                "--num_beams",
                options.num_beams,
                "--per_device_eval_batch_size",
                options.batch,
                "--max_source_length",
                "64",
                "--val_max_target_length",
                "24",
                "--precision",
                "fp32",
                strategy=strategy,
                processes=processes,
                task="seq2seq",
                timeout=3000,
            )
            seconds = time.perf_counter() - begun
            texts = [json.loads(row)["prediction"] for row in (output / "predictions.jsonl").read_text().splitlines()]
        assert len(texts) == options.examples
        reference = reference or texts
        differing = sum(text != other for text, other in zip(texts, reference))
        figures = [f"{lines[-1][f'eval_{name}']:.6f}" for name in FIGURES]
        rows.append(f"| {strategy} | {processes} | {' | '.join(figures)} | {differing} | {seconds:.0f} |")
        print(rows[-1], flush=True)
    write(rows, options)


def write(rows: list[str], options: argparse.Namespace) -> None:
    """The report."""
    import torch

    from zerofit.record.environment import describe_environment

    about = describe_environment(sys.argv, torch.device("cpu"))
    packages = ", ".join(
        f"{name} {about['packages'][name]}" for name in ("torch", "accelerate", "deepspeed", "transformers")
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    text = f"""# Evaluation by generation under every strategy

The same weights (a BlenderBot from scratch, `recipes/seq2seq/dialogue-small.yaml`), {options.examples} examples
of {options.data.name}, batches of {options.batch} a process, beam search with {options.num_beams} beams, fp32. Two
processes do not divide the number of examples: the last batches are filled up with rows that do not count.
*Differing*: generated texts that are not those of one process. *Seconds*: of the whole launch, start-up included.

| strategy | processes | loss | BLEU | ROUGE-1 | ROUGE-2 | ROUGE-L | differing | seconds |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

{about["hardware"]["cores"]} cores of {about["hardware"]["cpu"]}, {packages}; commit {commit.strip()}.

Command: `python {" ".join(sys.argv)}`
"""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="a file of conversations")
    parser.add_argument("--examples", type=int, default=101)
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "generation.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
