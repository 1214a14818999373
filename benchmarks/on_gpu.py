"""Speed and memory on one GPU, beside what `zerofit plan` predicts. No network: real shapes, random weights, docs/.

    python benchmarks/on_gpu.py outputs/on-gpu             # on the GPU of a machine: it ends within 23 minutes
    python benchmarks/on_gpu.py outputs/on-gpu --predict   # anywhere: predictions, and docs/measurements/gpu.md
    python benchmarks/on_gpu.py outputs/on-cpu --tiny --page PAGE    # small shapes, to see on a CPU that it works

* Launches of two models under several strategies (ROWS), float8 among them.
* Side by side in one process, in turn: zerofit and transformers' Trainer, eager and compiled, on the same shapes
  (benchmarks/loop_speed.py).
* The head alone: loss and gradients of 8,192 tokens in bf16 for several vocabularies and chunks of rows
  (zerofit/model/chunked_loss.py), in turn: milliseconds, and the memory that is taken beside inputs and gradients.
* Where an update's time goes (--profile).
* Fine-tuning on padded rows whose width is a multiple of 8 or of 64: seconds and compiled graphs.

Everything goes into on-gpu.json as soon as it is measured. The same command goes on where it was stopped, by its own
limit or otherwise. --predict takes the processor, so it is run by itself; it writes the tables of the page, between
its marks `<!-- on_gpu NAME -->` and `<!-- end -->`: what stands outside of them stays.
"""

import argparse
import gzip
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import loop_speed
import torch

from zerofit.model.chunked_loss import CROSS_ENTROPY, IGNORE, _ChunkedLoss, compiled_chunk
from zerofit.recipe import ClmRecipe
from zerofit.record.environment import describe_environment
from zerofit.strategy.devices import device_name, synchronise
from zerofit.strategy.gpu_table import gpu_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measurements" / "gpu.md"
GIB = 2**30
NOT_COUNTED, UPDATES = 4, 16
LAUNCH_S, LIMIT_S, LAST_S = 180, 23 * 60, 40  # of a launch, of all measuring; nothing begins in the last seconds
KILL_S = 20  # after a launch was asked to end
END = {"s": math.inf}  # of time.monotonic(): what runs then is ended, and measured by the next command
HEAD = ((50257, 50304, 128256), 2048, 8192, (1024, 2048, 4096))  # vocabularies, hidden, tokens, rows of a chunk
MODELS = {  # name, changes, vocabulary, length
    "GPT-2": ("gpt2", "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0", 50304, 1024),
    "Llama-3.2-1B": ("llama-3.2-1b", "", 128256, 2048),
}
SIDE_BY_SIDE = [("Llama-3.2-1B", 8), ("GPT-2", 32)]  # model, rows of a micro-batch
ROUNDS = 3
EAGER = {"torch_compile": False}
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {  # loop_speed's name, options
    "zerofit": ("zerofit", {"torch_compile": "blocks"}),
    "zerofit, eager": ("zerofit", EAGER),
    "Trainer": ("Trainer", {"torch_compile": False}),
    "Trainer, compiled": ("Trainer", {"torch_compile": True}),
}
KERNELS = {
    "attention": "flash|fmha|sdpa|attention",
    "products": "gemm|nvjet|cutlass|xmma|::mm|addmm|bmm|scaled_mm",
    "optimizer": "adam",
}
COMPILED = "--torch_compile"
ROWS = [  # model, strategy, micro-batch, options; a launch of 1B weights takes 75 s, under ZeRO 110, of GPT-2 40
    ("Llama-3.2-1B", "single", 8, COMPILED),
    ("Llama-3.2-1B", "zero2", 8, COMPILED),
    ("Llama-3.2-1B", "zero3", 8, ""),
    ("Llama-3.2-1B", "single", 8, f"{COMPILED} --float8"),
    ("GPT-2", "single", 32, COMPILED),
    ("GPT-2", "single", 64, COMPILED),
    ("Llama-3.2-1B", "single", 8, ""),
]
PADDED = ("Llama-3.2-1B", (8, 64), (COMPILED, ""), 100)  # model, multiples of a row's width, options, updates
TINY = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,num_hidden_layers=2"
TINY_SHAPES: dict[str, Any] = {
    "HEAD": ((1000,), 64, 128, (16, 32)),
    "MODELS": {"Llama of 64": ("llama-3-8b", TINY, 1024, 64)},
    "SIDE_BY_SIDE": [("Llama of 64", 2)],
    "ROUNDS": 1,
    "CANDIDATES": {name: one for name, one in CANDIDATES.items() if "compiled" not in name and name != "zerofit"},
    "ROWS": [("Llama of 64", "single", 2, ""), ("Llama of 64", "zero1", 2, "--gradient_checkpointing full")],
    "PADDED": ("Llama of 64", (8, 64), ("",), 8),
}


class OutOfTime(Exception):
    """What is left is measured by the same command, started again."""


class Results:
    """What was measured, in a file that grows.

    Args:
        limit_s: seconds after which nothing more begins.
    """

    def __init__(self, file: Path, limit_s: float, device: torch.device):
        self.file, END["s"] = file, time.monotonic() + limit_s
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        if not self.found:
            self.found = {"parts": {}, **describe_environment(sys.argv, device), "plan": plan_flags(device)}
            self.found["cudnn"] = torch.backends.cudnn.version()
            self.write()

    def add(self, part: str, row: dict, measure: Any) -> None:
        """Measure a row, unless the file has it: `measure` returns its figures.

        Raises:
            OutOfTime: there is no time left to begin with it.
        """
        rows = self.found["parts"].setdefault(part, [])
        if any(row.items() <= known.items() for known in rows):
            return
        if time.monotonic() > END["s"] - LAST_S:
            raise OutOfTime
        try:
            found = measure()
        except OutOfTime:
            raise
        except Exception as error:  # of one candidate; the others go on
            traceback.print_exc()
            found = {"reason": f"{type(error).__name__}: {error}".partition("\n")[0][:120].replace("|", "/")}
        torch.compiler.reset()
        loop_speed.forget_candidates()  # not sooner: the frames of an error hold tensors
        rows.append(row | found)
        print(part, json.dumps({name: value for name, value in rows[-1].items() if name != "flags"}), flush=True)
        self.write()

    def write(self) -> None:
        self.file.write_text(json.dumps(self.found, indent=1))


def plan_flags(device: torch.device) -> list[str]:
    """The GPU, for `zerofit plan`."""
    if device.type == "cpu":
        return ["--gpu", "cpu", "--gpu_memory", "8GiB"]
    gpu, total = gpu_of(device_name(device) or ""), torch.accelerator.get_memory_info()[1]
    return ["--gpu_memory", f"{total // 2**20}MiB", *(["--gpu", gpu.name] if gpu else [])]


# ------------------------------------------------------------------------------------------------------ in one process


def time_heads(device: torch.device, vocabulary: int, hidden: int, tokens: int, chunks: tuple[int, ...]) -> dict:
    """{rows of a chunk: (milliseconds, bytes beside)} of forward and backward of the chunked loss, in turn."""
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    targets[::64] = IGNORE
    compiled, times = compiled_chunk(device), dict[int, list[float]]({rows: [] for rows in chunks})
    peaks: dict[int, int] = {}
    for _ in range(NOT_COUNTED + UPDATES):
        for rows in chunks:
            before = _restart_peak(device)
            synchronise(device)
            began = time.perf_counter()
            loss = _ChunkedLoss.apply(
                states, weight, None, targets, rows, [True, True, False], *[None, CROSS_ENTROPY, None, compiled]
            )
            torch.autograd.grad(loss, (states, weight))
            synchronise(device)
            times[rows].append(1000 * (time.perf_counter() - began))
            peaks[rows] = torch.accelerator.max_memory_allocated() - before if device.type != "cpu" else 0
    figures = {rows: [statistics.median(several[NOT_COUNTED:]), peaks[rows]] for rows, several in times.items()}
    return {"chunks": figures}


def _restart_peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


class Shape(loop_speed.Workload):
    """A model of MODELS in bf16, with rows of random tokens; `options` of the recipe change with the candidate."""

    def __init__(self, model: tuple[str, str, int, int], rows: int, device: torch.device, folder: Path):
        self.name, self.changes, vocabulary, length = model
        self.candidate: dict[str, Any] = EAGER
        sizes = {"vocab_size": vocabulary, "block_size": length, "micro_batch": rows, "accumulation": 1}
        counted = argparse.Namespace(updates=UPDATES - NOT_COUNTED, warmup=NOT_COUNTED, **sizes)
        super().__init__(counted, device, folder)

    def recipe(self) -> ClmRecipe:
        o = self.options
        changes = ",".join(filter(None, (self.changes, f"vocab_size={o.vocab_size},bos_token_id=0,eos_token_id=0")))
        values: dict[str, Any] = {
            "config_name": self.name, "config_overrides": changes, "packing": "concatenate", "precision": "bf16",
            "block_size": o.block_size, "per_device_train_batch_size": o.micro_batch, "learning_rate": 1e-4,
            "max_train_steps": self.num_updates, "output_dir": tempfile.mkdtemp(dir=self.folder),
            "overwrite_output_dir": True, **self.candidate,
        }  # fmt: skip
        recipe = ClmRecipe(**values)
        recipe.remember_sources(dict.fromkeys(values, "on_gpu.py"))  # else the launcher's precision holds: fp32
        return recipe

    def model(self) -> torch.nn.Module:
        with self.device:
            return super().model()

    def seconds(self, name: str) -> float:
        """Of an update of a candidate."""
        how, options = CANDIDATES[name]
        self.candidate = options if how == "zerofit" else EAGER
        self.trainer = {"bf16": True, **options} if how == "Trainer" else {}
        speed = loop_speed.measure(how, self)["tokens/s"]
        return self.options.micro_batch * self.options.block_size / speed


# ------------------------------------------------------------------------------------------------------------ launches


def flags_of(model: tuple[str, str, int, int], rows: int, further: str) -> list[str]:
    """The recipe of a launch, and of its prediction."""
    name, changes, vocabulary, length = model
    return [
        *("--config_name", name),
        *(("--config_overrides", changes) if changes else ()),
        *("--make_vocab_size_divisible_by", str(vocabulary), "--train_tokenizer_vocab_size", "4096"),
        *("--train_file", "docs/*.md", "--block_size", str(length), "--per_device_train_batch_size", str(rows)),
        *([] if "--packing" in further else ["--packing", "concatenate"]),
        *([] if COMPILED in further else [COMPILED, "false"]),
        *f"--precision bf16 --gradient_accumulation_steps 1 {further}".split(),
    ]


def predict(row: dict, hardware: list[str]) -> dict:
    """What `zerofit plan` says of this micro-batch; a reason, if it says nothing."""
    layout = ["--num_gpus", "1", "--strategies", row["strategy"], "--batch_sizes", str(row["rows"])]
    plan = [sys.executable, *"-m zerofit.cli plan --task clm --json -".split()]
    said, reason = run([*plan, *row["flags"], *hardware, *layout], 600)
    found = (
        {} if reason else json.JSONDecoder().raw_decode(said[said.index("{") :])[0]
    )  # what is said on stderr follows
    return {"reason": reason} if reason else found["predictions"][0]


def words_of(row: dict, output: Path, updates: int) -> list[str]:
    """The command of a launch, without its interpreter."""
    shown = "--validation_split_percentage 0 --save_strategy no --report_to none --eval_on_start false".split()
    words = ["train/clm.py", *row["flags"], *shown, "--sample_tokens", "0", "--max_train_steps", str(updates)]
    return [*words, "--output_dir", str(output), "--overwrite_output_dir", "--strategy", row["strategy"]]


def train(row: dict, output: Path, parts: list[tuple[str, str, str]] = (), updates: int = UPDATES) -> dict:
    """Median seconds, tokens/s, MFU, peak memory and graphs of some updates; else the reason why there are none.

    Args:
        parts: (module, name, what stands there instead).
    """
    words = words_of(row, output, updates)
    text = "import runpy, sys\n"
    text += "".join(f"import {module}\n{module}.{name} = {value}\n" for module, name, value in parts)
    text += f"sys.argv = {words!r}\nsys.path.insert(0, 'train')\nrunpy.run_path('train/clm.py', run_name='__main__')\n"
    limit_s = LAUNCH_S * (2 if updates > UPDATES else 1)
    said, reason = run([sys.executable, *(("-c", text) if parts else words)], limit_s)
    if reason:
        return {"reason": reason}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    environment = json.loads((output / "environment.json").read_text())
    figures = {
        name: statistics.median(line[name] for line in lines[NOT_COUNTED:])
        for name in ("seconds", "tokens_per_s", "mfu")
        if name in lines[-1]
    }
    graphs = re.search(r"compiled +(\d+) graph", said)
    return figures | {
        "to_first_update": environment["seconds_to_first_update"],
        "all_updates": sum(line["seconds"] for line in lines),
        "graphs": int(graphs[1]) if graphs else 0,
        "peak_bytes": max(line["peak_memory_bytes"] for line in lines),
    }


def profile(row: dict, output: Path) -> dict:
    """Milliseconds of an update by kinds of kernels, and those in which the device waits."""
    found = train(row | {"flags": [*row["flags"], "--profile", "9:9"]}, output)
    if reason := found.get("reason"):
        return {"reason": reason}
    (file,) = output.glob("profile*.json*")
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    events = [event for event in json.loads(text)["traceEvents"] if "dur" in event]
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events = on_device or [event for event in events if event.get("cat") == "cpu_op"]
    kinds = dict.fromkeys(("products", "attention", "optimizer", "others"), 0.0)
    end, busy = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        name = event["name"].lower()
        kind = next((kind for kind, words in KERNELS.items() if re.search(words, name)), "others")
        kinds[kind] += event["dur"] / 1000
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    span = end - min(event["ts"] for event in events)
    named = {event["name"][:60] for event in events if re.search(KERNELS["attention"], event["name"].lower())}
    said = ", ".join(sorted(named)[:4]).replace("|", "/")
    return kinds | {"idle": (span - busy) / 1000, "span": span / 1000, "attention_kernels": said}


def run(words: list[str], limit_s: int) -> tuple[str, str]:
    """(standard output and error, why there is none).

    Raises:
        OutOfTime: the end of all measuring came first.
    """
    began = time.monotonic()
    left_s = END["s"] - began
    stopped = ["timeout", "--kill-after", str(KILL_S), str(min(limit_s, left_s))]
    done = subprocess.run([*stopped, *words], cwd=ROOT, capture_output=True, text=True)
    # Where `timeout` has to kill, it kills itself too: its code is that of a process which somebody else has killed.
    is_stopped = done.returncode != 0 and time.monotonic() - began >= min(limit_s, left_s)
    if is_stopped and left_s < limit_s:
        raise OutOfTime
    if done.returncode == 0 or is_stopped:
        return done.stdout + done.stderr, f"stopped after {limit_s} s" if done.returncode else ""
    errors = [line.strip() for line in done.stderr.splitlines() if "rror" in line or "out of memory" in line]
    return "", (errors or [f"it ended with code {done.returncode}, without a message"])[-1][:200].replace("|", "/")


# -------------------------------------------------------------------------------------------------------------- report

WORDS, NUMBER = "---", "--:"
ABOUT = [("model", "model", ""), ("rows", "rows", "d")]
TABLES: dict[str, list[tuple[str, str, str]]] = {  # mark on the page: (title, name of the value, its form)
    "side by side": [*ABOUT, ("trained by", "candidate", ""), ("s", "seconds", ".3f"), ("least", "least", ".3f"),
                     ("most", "most", ".3f"), ("", "reason", "")],
    "updates": [("model", "model", ""), ("strategy", "strategy", ""), ("rows", "rows", "d"),
                ("options", "options", ""), ("s", "seconds", ".3f"), ("plan", "seconds_per_update", ".3f"),
                ("MFU", "mfu", ".1%"), ("GiB", "peak", ".2f"), ("plan", "peak_predicted", ".2f"),
                ("tokens/s", "tokens_per_s", ",.0f"), ("", "reason", "")],
    "profile": [*ABOUT, *((f"{kind}, ms", kind, ".1f") for kind in (*KERNELS, "others", "idle")),
                ("all, ms", "span", ".1f"), ("attention's kernels", "attention_kernels", ""), ("", "reason", "")],
    "padded": [*ABOUT, ("options", "options", ""), ("width a multiple of", "multiple", "d"),
               ("updates", "updates", "d"), ("s of all", "all_updates", ".1f"), ("s, median", "seconds", ".3f"),
               ("graphs", "graphs", "d"), ("", "reason", "")],
    "head": [("vocabulary", "vocabulary", ",d"), ("rows of a chunk", "chunk", ",d"), ("ms", "ms", ".2f"),
             ("GiB", "peak", ".2f"), ("", "reason", "")],
}  # fmt: skip


def rows_of(part: str, rows: list[dict]) -> list[dict]:
    """The lines of a table: medians of rounds, a line for each chunk, bytes as GiB; below them what failed."""
    if part in ("head", "side by side"):
        failed = [{**row, "round": None} for row in rows if "reason" in row]
        failed = [row for at, row in enumerate(failed) if row not in failed[:at]]  # in each round alike
        rows = [row for row in rows if "reason" not in row]
    if part == "head":
        chunks = [(row["vocabulary"], int(chunk), *of) for row in rows for chunk, of in row["chunks"].items()]
        lines = [{"vocabulary": v, "chunk": chunk, "ms": ms, "peak": peak / GIB} for v, chunk, ms, peak in chunks]
        return lines + failed
    if part == "side by side":
        rounds: dict[tuple, list[float]] = {}
        for row in rows:
            rounds.setdefault((row["model"], row["rows"], row["candidate"]), []).append(row["seconds"])
        names = ("model", "rows", "candidate", "seconds", "least", "most")
        medians = [dict(zip(names, (*about, statistics.median(s), min(s), max(s)))) for about, s in rounds.items()]
        return medians + failed
    lines = []
    for row in rows:
        said = row.get("predicted", {})
        line = {**row, **{name: said[name] for name in ("seconds_per_update",) if said.get(name)}}
        line |= {"peak": row["peak_bytes"] / GIB} if "peak_bytes" in row else {}
        line |= {"peak_predicted": said["peak_allocated_bytes"] / GIB} if "peak_allocated_bytes" in said else {}
        lines.append(line)
    return lines


def tables(found: dict) -> dict[str, str]:
    """{mark on the page: its table, in Markdown}."""
    made = {}
    for part, columns in TABLES.items():
        rows = rows_of(part, found["parts"].get(part, []))
        kept = [column for column in columns if column[0] or any(column[1] in row for row in rows)]
        lines = [[title for title, *_ in kept], [NUMBER if form else WORDS for *_, form in kept]]
        lines += [[format(row[name], form) if name in row else "" for _, name, form in kept] for row in rows]
        made[part] = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    hardware = ", ".join(f"{name} {value}" for name, value in found["hardware"].items())
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in ("torch", "accelerate", "deepspeed"))
    commit = (found.get("zerofit_commit") or "unknown")[:8]
    made["source"] = f"{hardware}; {packages}, cuDNN {found['cudnn']}; commit {commit}."
    return made


def write_page(page: Path, made: dict[str, str]) -> None:
    """Put each table between its marks; a page that is not there begins as docs/measurements/gpu.md.

    Raises:
        RuntimeError: the page lacks the marks of one.
    """
    text = (page if page.exists() else PAGE).read_text()
    for name, content in made.items():
        text, count = re.subn(
            rf"(<!-- on_gpu {name} -->\n).*?(<!-- end -->)",
            lambda m, c=content: f"{m[1]}{c}\n{m[2]}",
            text,
            flags=re.S,
        )
        if count != 1:
            raise RuntimeError(f"{page} has {count} places for <!-- on_gpu {name} --> ... <!-- end -->")
    page.write_text(text)


def measure(results: Results, output: Path, device: torch.device) -> None:
    """Everything that is not measured yet, the most telling first.

    Raises:
        OutOfTime: something is left.
    """

    def row_of(model: str, strategy: str, rows: int, options: str) -> dict:
        row = {"model": model, "strategy": strategy, "rows": rows, "options": options}
        return row | {"flags": flags_of(MODELS[model], rows, options)}

    for each in ROWS:
        row = row_of(*each)
        results.add("updates", row, lambda row=row: train(row, output / "run"))
    for model, rows in SIDE_BY_SIDE:
        shape = Shape(MODELS[model], rows, device, output)
        for number in range(ROUNDS):
            for name in CANDIDATES:
                row = {"model": model, "rows": rows, "round": number, "candidate": name}
                results.add("side by side", row, lambda shape=shape, name=name: {"seconds": shape.seconds(name)})
    vocabularies, hidden, tokens, chunks = HEAD
    for vocabulary in vocabularies:
        row = {"vocabulary": vocabulary, "hidden": hidden}
        results.add("head", row, lambda v=vocabulary: time_heads(device, v, hidden, tokens, chunks))
    model, rows = SIDE_BY_SIDE[0]
    row = row_of(model, "single", rows, COMPILED if device.type != "cpu" else "")
    results.add("profile", row, lambda: profile(row, output / "run"))
    model, multiples, options, updates = PADDED
    for further in options:
        for multiple in multiples:
            row = row_of(model, "single", 8, f"--packing none {further}".strip())
            row |= {"options": further, "multiple": multiple, "updates": updates}
            parts = [("zerofit.data.collate", "GPU_MULTIPLE", str(multiple))]
            results.add("padded", row, lambda row=row, p=parts: train(row, output / "run", p, updates=updates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--predict", action="store_true", help="of what is measured already, and the page")
    parser.add_argument("--minutes", type=float, default=LIMIT_S / 60, help="after which nothing is running any more")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose tables are written")
    options = parser.parse_args()
    if options.tiny:
        globals().update(TINY_SHAPES)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu" and not (options.tiny or options.predict):
        parser.error("there is no GPU here: use --tiny")
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(options.output.absolute() / "on-gpu.json", 60 * options.minutes, device)
    if not options.predict:
        try:
            measure(results, options.output.absolute(), device)
        except OutOfTime:
            print("the time is over: the same command measures what is left", flush=True)
    END["s"] = math.inf
    if options.predict or options.tiny:
        for row in results.found["parts"].get("updates", []):
            row["predicted"] = predict(row, results.found["plan"])
        results.write()
        write_page(options.page, tables(results.found))


if __name__ == "__main__":
    main()
