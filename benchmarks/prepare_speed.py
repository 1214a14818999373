"""What `zerofit prepare` is worth: tokens/s and memory beside the way of Megatron-LM's tools/preprocess_data.py.

    python benchmarks/prepare_speed.py                                   # both tokenizers, 1 and 2 workers
    python benchmarks/prepare_speed.py --rounds 3 --workers 4 --megabytes 100
    python benchmarks/prepare_speed.py --text data/text/tinystories_a.txt --tokenizers data/tokenizers/gpt2
    python benchmarks/prepare_speed.py --rounds 0 --memory 10 1000       # memory alone, at 10 MB and at 1 GB of text

The text is --text, by default the docstrings that the tests read, once as it is (many words are new) and repeated to
--megabytes. A document is what stands between two lines <|endoftext|>, or one of WikiText's articles. The tokenizers
are --tokenizers, by default the tests' own two. Megatron's way is multiprocessing.Pool(workers).imap, 32 lines at a
time, `tokenizer(text)` of each, lists of ids sent back, and IndexedDatasetBuilder.add_document in the parent. Both
ways run in processes of their own, one after the other, and in the other order in every second round, on the same file
with as many workers; their .bin and .idx must be the same bytes. Two speeds are shown of each: from the first line to
the last (tokenizers loaded, workers there), and of the whole command with all that it imports. Ratios are taken within
a round, and the median is shown.

Memory is the largest resident size of the parent, and of the largest worker, as the system has it (VmHWM).
"""

import argparse
import filecmp
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
END_OF_TEXT = "<|endoftext|>"


# ------------------------------------------------------------------------------------------------------ Megatron's way


def start_encoder(name: str) -> None:
    from zerofit.tools.prepare.named_tokenizer import named_tokenizer

    start_encoder.tokenizer = named_tokenizer("tokenizer", name)


def encode_line(line: str) -> tuple[list[int], list[int], int]:
    tokenizer = start_encoder.tokenizer
    ids = tokenizer(json.loads(line)["text"])["input_ids"]
    lengths = [len(ids)] if ids else []
    if ids:
        ids.append(tokenizer.eos_token_id)
        lengths[-1] += 1
    return ids, lengths, len(line)


def megatrons_way(source: str, prefix: str, name: str, workers: int) -> None:
    """Prints the seconds from the first line to the last, and the tokens."""
    import multiprocessing

    from zerofit.data.megatron.corpus import megatron
    from zerofit.tools.prepare.named_tokenizer import named_tokenizer

    indexed = megatron().indexed
    tokenizer = named_tokenizer("tokenizer", name)
    dtype = indexed.DType.optimal_dtype(len(tokenizer))
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    tokens = 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.Pool(workers, initializer=start_encoder, initargs=(name,)) as pool:
        pool.map(_ready, range(4 * workers))
        began = time.perf_counter()
        with open(source, encoding="utf-8") as file:
            for ids, lengths, _ in pool.imap(encode_line, file, 32):
                builder.add_document(ids, lengths)
                tokens += len(ids)
        builder.finalize(f"{prefix}.idx")
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


def _ready(_: int) -> bool:
    return start_encoder.tokenizer is not None


# ---------------------------------------------------------------------------------------------------------------- ours


def our_way(source: str, prefix: str, name: str, workers: int) -> None:
    """The same, by `zerofit prepare`'s own figures."""
    from zerofit.data.megatron.corpus import read_card
    from zerofit.tools.prepare.corpora import prepare
    from zerofit.tools.prepare.prepare_options import PrepareOptions

    options = PrepareOptions(
        input=[source], output_prefix=prefix, tokenizer=name, append_eod=True, workers=workers, overwrite=True
    )
    said = "\n".join(prepare(options))
    seconds = float(said.split(" s): ")[0].rsplit("(", 1)[1])
    print(json.dumps({"seconds": seconds, "tokens": read_card(f"{prefix}_text_document").tokens}))


# ------------------------------------------------------------------------------------------------------------ measured


def run(way: str, source: Path, prefix: Path, name: str, workers: int) -> dict[str, float]:
    """One command in a process of its own: seconds, tokens, seconds in all, and the memory of parent and worker."""
    words = [sys.executable, __file__, "--run", way, str(source), str(prefix), name, str(workers)]
    began = time.perf_counter()
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    peaks: dict[int, int] = {}
    watcher = threading.Thread(target=_watch, args=(job, peaks))
    watcher.start()
    shown = job.communicate()[0]
    whole = time.perf_counter() - began
    watcher.join()
    if job.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {job.returncode}")
    parent = peaks.pop(job.pid, 0)
    return {
        **json.loads(shown.splitlines()[-1]),
        "whole": whole,
        "parent": parent,
        "worker": max(peaks.values(), default=0),
    }


def _watch(job: subprocess.Popen, peaks: dict[int, int]) -> None:
    """Look at the largest resident sizes (bytes) ten times a second."""
    while job.poll() is None:
        try:
            parent = psutil.Process(job.pid)
            for one in (parent, *parent.children(recursive=True)):
                peaks[one.pid] = max(peaks.get(one.pid, 0), _peak(one.pid))
        except (psutil.Error, OSError):
            pass
        time.sleep(0.1)


def _peak(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def documents_of(file: Path) -> list[str]:
    """What stands between marks, or WikiText's articles."""
    text = file.read_text(encoding="utf-8")
    if END_OF_TEXT in text:
        return text.split(END_OF_TEXT)
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if not found or (line.startswith(" = ") and not line.startswith(" = =")):
            found.append("")
        found[-1] += line
    return found


def write_text(path: Path, files: list[Path], megabytes: float) -> Path:
    """JSON lines: the files' documents, again and again, of about so many MB; 0: once."""
    lines = [json.dumps({"text": text}) + "\n" for file in files for text in documents_of(file)]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        while file.tell() < megabytes * 1e6:
            file.writelines(lines)
    return path


def compare_speeds(args: argparse.Namespace, sources: dict[str, Path], folder: Path) -> list[str]:
    rows = [
        "| tokenizer | text | workers | Megatron's way, tokens/s | zerofit, tokens/s | ratio | with start | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in args.tokenizers:
        for text, source in sources.items():
            for workers in args.workers:
                rows.append(_compare(args.rounds, name, text, source, workers, folder))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _compare(rounds: int, name: str, text: str, source: Path, workers: int, folder: Path) -> str:
    found: dict[str, list[dict]] = {"megatron": [], "zerofit": []}
    for number in range(rounds):
        for way in list(found)[:: -1 if number % 2 else 1]:
            found[way].append(run(way, source, folder / way, name, workers))
    for ending in (".bin", ".idx"):
        ours, theirs = folder / f"zerofit_text_document{ending}", folder / f"megatron{ending}"
        assert filecmp.cmp(ours, theirs, shallow=False), f"{ending} differs"
    cells = [Path(name).name, text, str(workers)]
    for key in ("seconds", "whole"):
        speeds = {way: [one["tokens"] / one[key] for one in ones] for way, ones in found.items()}
        ratio = statistics.median(ours / theirs for theirs, ours in zip(speeds["megatron"], speeds["zerofit"]))
        medians = [f"{statistics.median(ones):,.0f}" for ones in speeds.values()]
        cells += [*medians, f"{ratio:.1f}"] if key == "seconds" else [" / ".join(medians), f"{ratio:.1f}"]
    return f"| {' | '.join(cells)} |"


def compare_memory(args: argparse.Namespace, folder: Path) -> list[str]:
    rows = ["| tokenizer | text | parent, peak MiB | largest worker, peak MiB | tokens/s |", "|---|---|---|---|---|"]
    for name in args.tokenizers:
        for megabytes in args.memory:
            source = write_text(folder / "memory.jsonl", args.text, megabytes)
            got = run("zerofit", source, folder / "zerofit", name, max(args.workers))
            speed = got["tokens"] / got["seconds"]
            rows.append(
                f"| {Path(name).name} | {source.stat().st_size / 1e6:,.0f} MB | {got['parent'] / 2**20:,.0f} "
                f"| {got['worker'] / 2**20:,.0f} | {speed:,.0f} |"
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="plain texts")
    parser.add_argument("--megabytes", type=float, default=40, help="size of the repeated text")
    parser.add_argument("--tokenizers", nargs="+", help="folders, or names on the hub")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="0: memory alone")
    parser.add_argument("--memory", type=float, nargs="*", default=[10, 300], help="MB of text to compare memory at")
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        way, source, prefix, name, workers = args.run
        {"megatron": megatrons_way, "zerofit": our_way}[way](source, prefix, name, int(workers))
        return
    if not (args.text and args.tokenizers):
        from material import make_material

        made = make_material(ROOT / "outputs" / "material")
        args.text = args.text or [made / "text" / "train.txt"]
        args.tokenizers = args.tokenizers or [str(made / "tokenizers" / name) for name in ("gpt2", "llama")]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shown = []
        if args.rounds:
            once = write_text(folder / "once.jsonl", args.text, 0)
            repeated = write_text(folder / "repeated.jsonl", args.text, args.megabytes)
            sources = {f"once, {once.stat().st_size / 1e6:.2g} MB": once, f"repeated, {args.megabytes:g} MB": repeated}
            shown += [*compare_speeds(args, sources, folder), ""]
        if args.memory:
            shown += compare_memory(args, folder)
        print("\n".join(shown))


if __name__ == "__main__":
    main()
