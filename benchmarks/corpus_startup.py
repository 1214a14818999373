"""Seconds to the first update, and memory, on corpora of a million to many billion tokens.

    python benchmarks/corpus_startup.py [--tokens 1e6 1e8 2e10] [--strategy ddp] [--processes 2]

Each row is a real launch of train/clm.py on a corpus of documents of 1,000 tokens: first with no index of the samples,
then with the one that the first launch has made. Ids are random; beyond 1e9 tokens the file is sparse, so that a
corpus larger than memory needs no room on the disk. `data` is the time from the end of the imports until the samples
are laid out, `own` the most memory that a rank has to itself, `mapped` the most that it shares with files (the most
of it libraries; the system takes such pages back when it needs them). Writes outputs/corpus-startup.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
LENGTH, SPARSE_FROM, BLOCK, IDS = 1000, 1e9, 512, 500
UPDATES = 4
MODEL = [
    "--config_name",
    "gpt2",
    "--config_overrides",
    f"n_layer=2,n_head=2,n_embd=64,n_positions={BLOCK}",
    "--block_size",
    str(BLOCK),
    *"--per_device_train_batch_size 4 --max_eval_samples 16 --max_train_steps".split(),
    str(UPDATES),
    "--report_to",
    "none",
]
HEAD = ("tokens", "documents", "index", "data, s", "to the first update, s", "own, MB", "mapped, MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e6, 1e8, 2e10])
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "corpus-startup.md")
    args = parser.parse_args()
    rows = [HEAD]
    for tokens in map(int, args.tokens):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            tokenizer, prefix = make_corpus(Path(folder), tokens)
            for index in ("made", "there"):
                figures = measured(Path(folder), tokenizer, prefix, args)
                rows.append((f"{tokens:,}", f"{tokens // LENGTH:,}", index, *figures))
                print("  ".join(rows[-1]), flush=True)
    how = f"{args.strategy}, {args.processes} processes, {UPDATES} updates"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(HEAD))
    text = "\n".join([*lines, "", provenance(how, "torch", "accelerate", "transformers", "megatron-core")])
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(text + "\n")
    print(text)


def make_corpus(folder: Path, tokens: int) -> tuple[Path, str]:
    """(tokenizer's folder, prefix of a corpus of so many tokens)."""
    from zerofit.data.megatron.corpus import Card, megatron, tokenizer_fingerprint
    from zerofit.model.tokenizer import train_tokenizer

    tokenizer = train_tokenizer((file.read_text() for file in (ROOT / "docs").glob("*.md")), IDS, "docs", folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    prefix, count = str(folder / "corpus"), tokens // LENGTH
    builder = megatron().indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.sequence_lengths, builder.document_indices = [LENGTH] * count, range(count + 1)
    if tokens >= SPARSE_FROM:
        builder.data_file.truncate(2 * tokens)
    else:
        rng = np.random.default_rng(0)
        for _ in range(count):
            builder.data_file.write(rng.integers(1, IDS, LENGTH, dtype=np.uint16).tobytes())
    builder.finalize(f"{prefix}.idx")
    Card("docs", tokenizer_fingerprint(tokenizer), IDS, 0, count, tokens, IDS - 1, [], "corpus_startup").write(
        Path(f"{prefix}.json")
    )
    return folder / "tokenizer", prefix


def measured(folder: Path, tokenizer: Path, prefix: str, args) -> tuple[str, ...]:
    """One launch: its figures, as text."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = [
        str(Path(sys.executable).parent / "accelerate"),
        "launch",
        "--config_file",
        f"accelerate_configs/{args.strategy}.yaml",
        "--num_processes",
        str(args.processes),
        "--main_process_port",
        "0",
        "train/clm.py",
        *MODEL,
        "--tokenizer_name",
        str(tokenizer),
        "--data_path",
        prefix,
        "--output_dir",
        str(run),
    ]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        own = mapped = 0
        while process.poll() is None:
            for rank in psutil.Process(process.pid).children(recursive=True):
                try:
                    memory = rank.memory_info()
                except psutil.Error:
                    continue
                own, mapped = max(own, memory.rss - memory.shared), max(mapped, memory.shared)
            time.sleep(0.1)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read()[-3000:])
    seconds = json.loads((run / "environment.json").read_text())["seconds_to_first_update"]
    return (f"{seconds['data']:.1f}", f"{sum(seconds.values()):.1f}", f"{own / 1e6:,.0f}", f"{mapped / 1e6:,.0f}")


if __name__ == "__main__":
    main()
