"""Tokens/s of `zerofit generate` over a file: in one process, in two, and in two that share each layer.

    python benchmarks/generate_file.py --rounds 3

The ways take turns. The model is a Llama with random weights; each answer has 64 tokens. Prints the table of
docs/measurements/generation.md.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
WAYS = {
    "one process, one prompt at a time": ["--batch_size", "1"],
    "one process": [],
    "`--num_processes 2`": ["--num_processes", "2"],
    "`--tensor_parallel 2`": ["--tensor_parallel", "2"],
}


def main() -> None:
    from folders import save_base, small_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--hidden_size", type=int, default=512)
    options, rates = parser.parse_args(), {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = {"hidden_size": options.hidden_size, "intermediate_size": 3 * options.hidden_size}
        shape = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "eos_token_id": None}
        model = save_base(folder / "model", small_tokenizer(folder), max_position_embeddings=256, **size, **shape)
        lines = [json.dumps({"prompt": f"{'word ' * (number % 16)}{number}"}) for number in range(options.prompts)]
        (folder / "asked.jsonl").write_text("\n".join(lines))
        first = None
        for _ in range(options.rounds):
            for way, flags in WAYS.items():
                rate, answers = measured(folder, flags)
                rates[way].append(rate)
                first = first or answers
                same = sum(one == other for one, other in zip(answers, first))
                print(f"{way}: {rate:,.0f} tokens/s, {same} of {len(first)} answers as at first", flush=True)
    print(f"{model.num_parameters() / 1e6:.0f} M parameters")
    print("| | tokens/s, median (each round) | ratio to one process, each round |\n|---|---|---|")
    for way, each in rates.items():
        ratios = ", ".join(f"{rate / base:.2f}" for rate, base in zip(each, rates["one process"]))
        shown = ", ".join(f"{rate:,.0f}" for rate in each)
        print(f"| {way} | {statistics.median(each):,.0f} ({shown}) | {ratios} |")


def measured(folder: Path, flags: list[str]) -> tuple[float, list[str]]:
    """(tokens/s since the model is loaded, the answers)."""
    output = folder / "answers.jsonl"
    command = [
        sys.executable,
        *"-m zerofit.cli generate --model".split(),
        str(folder / "model"),
        "--prompt_file",
        str(folder / "asked.jsonl"),
        "--output",
        str(output),
        "--max_new_tokens",
        "64",
        *flags,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    rate = re.search(r"\(([\d,]+) tokens/s\)", done.stderr)[1]
    return float(rate.replace(",", "")), output.read_text().splitlines()


if __name__ == "__main__":
    main()
