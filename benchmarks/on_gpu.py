"""Speed and memory on real GPUs, beside what `zerofit plan` predicts. No network: real shapes, random weights, docs/.

    python benchmarks/on_gpu.py outputs/on-gpu             # on the GPUs of a machine: about 15 minutes
    python benchmarks/on_gpu.py outputs/on-gpu --predict   # anywhere: the predictions beside what was measured
    python benchmarks/on_gpu.py outputs/on-cpu --tiny      # small shapes, to see on a CPU that it works

* The head alone: hidden states x vocabulary in bf16, loss and gradients of 8,192 tokens in chunks of some rows
  (zerofit/model/chunked_loss.py): milliseconds, and the memory that is taken beside inputs and gradients.
* Updates of three models in bf16 under several strategies (ROWS), one process a GPU.

Writes on-gpu.json, and with --predict on-gpu.md: figures, hardware, versions. Predictions take the processor, so they
are made by themselves. A launch is stopped after 90 s. A measurement that was stopped goes on with the same command.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from zerofit.model.chunked_loss import IGNORE, PLAIN, _Chunked, chunk_rows
from zerofit.record.environment import describe_environment
from zerofit.strategy.devices import device_name
from zerofit.strategy.gpu_table import gpu_of

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
NOT_COUNTED, UPDATES = 4, 16
LAUNCH_S = 90
HEAD = (128256, 4096, 8192, (256, 512, 1024, 2048))  # vocabulary, hidden, tokens, rows of a chunk
MODELS = {  # name, changes, vocabulary, length
    "GPT-2": ("gpt2", "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0", 50304, 1024),
    "Llama-3.2-1B": ("llama-3.2-1b", "", 128256, 2048),
    "8 layers of Llama-3-8B": ("llama-3-8b", "num_hidden_layers=8", 128256, 2048),
}
ROWS = [  # model, strategy, micro-batch, further options
    ("Llama-3.2-1B", "single", 4, ""),
    ("Llama-3.2-1B", "single", 8, ""),
    ("Llama-3.2-1B", "single", 8, "--packing documents"),
    ("Llama-3.2-1B", "single", 8, "--torch_compile"),
    ("Llama-3.2-1B", "single", 16, "--gradient_checkpointing full"),
    ("Llama-3.2-1B", "single", 16, "--gradient_checkpointing selective"),
    ("Llama-3.2-1B", "zero1", 8, ""),
    ("Llama-3.2-1B", "zero2", 8, ""),
    ("Llama-3.2-1B", "zero3", 8, ""),
    ("Llama-3.2-1B", "fsdp2", 8, ""),
    ("Llama-3.2-1B", "zero2_offload", 8, ""),
    ("Llama-3.2-1B", "zero3_offload", 8, ""),
    ("GPT-2", "single", 16, ""),
    ("GPT-2", "single", 32, "--torch_compile"),
    ("GPT-2", "zero2", 16, ""),
    ("8 layers of Llama-3-8B", "single", 2, ""),
    ("8 layers of Llama-3-8B", "fsdp2", 4, "--gradient_checkpointing full"),
]
TINY = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,num_hidden_layers=2"
TINY_HEAD = (1000, 64, 128, (16, 32))
TINY_MODELS = {"Llama of 64": ("llama-3-8b", TINY, 8, 64)}
TINY_ROWS = [("Llama of 64", "zero1", 2, ""), ("Llama of 64", "fsdp2", 2, "--gradient_checkpointing full")]


# ------------------------------------------------------------------------------------------------------------ the head


def time_head(device: torch.device, vocabulary: int, hidden: int, tokens: int, chunks: tuple[int, ...]) -> list[dict]:
    """Forward and backward of the chunked loss, with each number of rows."""
    states = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)
    targets[::64] = IGNORE
    found, chosen = [], chunk_rows(vocabulary, device.type != "cpu")
    for rows in chunks:
        times = []
        for _ in range(NOT_COUNTED + UPDATES):
            before = _restart_peak(device)
            _wait(device)
            began = time.perf_counter()
            loss = _Chunked.apply(states, weight, None, targets, rows, [True, True, False], None, PLAIN, None)
            torch.autograd.grad(loss, (states, weight))
            _wait(device)
            times.append(time.perf_counter() - began)
        peak = torch.accelerator.max_memory_allocated() - before if device.type != "cpu" else None
        found.append(
            {
                "rows": rows,
                "milliseconds": 1000 * statistics.median(times[NOT_COUNTED:]),
                "peak_bytes": peak,
                "is_default": rows == chosen,
            }
        )
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _restart_peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats()
    return torch.accelerator.memory_allocated()


# ------------------------------------------------------------------------------------------------------------- updates


def flags_of(model: tuple[str, str, int, int], rows: int, further: str) -> list[str]:
    """The recipe of a launch, and of its prediction."""
    name, changes, vocabulary, length = model
    return [
        *("--config_name", name),
        *(("--config_overrides", changes) if changes else ()),
        *("--make_vocab_size_divisible_by", str(vocabulary), "--train_tokenizer_vocab_size", "4096"),
        *("--train_file", "docs/*.md", "--block_size", str(length), "--per_device_train_batch_size", str(rows)),
        *("--packing concatenate --precision bf16 --gradient_accumulation_steps 1".split()),
        *further.split(),
    ]


def predict(row: dict, hardware: list[str]) -> dict:
    """What `zerofit plan` says of this micro-batch; a reason, if it says nothing."""
    layout = ["--num_gpus", str(row["processes"]), "--strategies", row["strategy"], "--batch_sizes", str(row["rows"])]
    plan = [sys.executable, *"-m zerofit.cli plan --task clm --json -".split()]
    said, reason = run([*plan, *row["flags"], *hardware, *layout], 600)
    return {"reason": reason} if reason else json.loads(said[said.index("{") :])["predictions"][0]


def train(row: dict, output: Path) -> dict:
    """Median seconds, tokens/s, MFU and peak memory of some updates; else the reason why there are none."""
    launcher = "-m accelerate.commands.launch --main_process_port 0 --num_processes".split()
    shown = "--validation_split_percentage 0 --save_strategy no --report_to none --eval_on_start false".split()
    words = [
        *(sys.executable, *launcher, str(row["processes"])),
        *("--config_file", f"accelerate_configs/{row['strategy']}.yaml", "train/clm.py", *row["flags"], *shown),
        *("--sample_tokens", "0", "--max_train_steps", str(UPDATES), "--output_dir", str(output)),
        "--overwrite_output_dir",
    ]
    _, reason = run(words, LAUNCH_S)
    if reason:
        return {"reason": reason}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][NOT_COUNTED:]
    environment = json.loads((output / "environment.json").read_text())
    figures = {
        name: statistics.median(line[name] for line in lines)
        for name in ("seconds", "tokens_per_s", "mfu")
        if name in lines[0]
    }
    figures["to_first_update"] = environment["seconds_to_first_update"]
    return figures | {"peak_bytes": max(line["peak_memory_bytes"] for line in lines)}


def run(words: list[str], limit_s: int) -> tuple[str, str]:
    """(standard output, why there is none)."""
    stopped = ["timeout", "--kill-after", "20", str(limit_s)]  # the launcher ends its processes when it is told to
    done = subprocess.run([*stopped, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode in (0, 124):
        return done.stdout, f"stopped after {limit_s} s" if done.returncode else ""
    errors = [line.strip() for line in done.stderr.splitlines() if "rror" in line or "out of memory" in line]
    return "", (errors or ["no message"])[-1][:200].replace("|", "/")


# -------------------------------------------------------------------------------------------------------------- report


def report(found: dict) -> str:
    """Both tables in Markdown, and where they come from."""

    def shown(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value / scale, form)

    rows = ["| rows of a chunk | ms | peak, GiB |", "|--:|--:|--:|"]
    rows += [
        f"| {line['rows']:,}{' (as trained)' * line['is_default']} | {line['milliseconds']:.2f} | "
        f"{shown(line['peak_bytes'], '.3f', GIB)} |"
        for line in found["head"]
    ]
    heads = "model | strategy | rows | options | s | predicted | MFU | predicted | peak, GiB | predicted | tokens/s"
    rows += ["", f"| {heads} |", "|---|---|--:|---|--:|--:|--:|--:|--:|--:|--:|"]
    for line in found["updates"]:
        said = line.get("predicted", {})
        start = f"| {line['model']} | `{line['strategy']}` ({line['processes']}) | {line['rows']} | "
        start += f"{line['options'] and '`' + line['options'] + '`'} |"
        peak = shown(said.get("peak_allocated_bytes"), ".2f", GIB)
        seconds, mfu = shown(said.get("seconds_per_update"), ".3f"), shown(said.get("mfu"), ".1%")
        if reason := line.get("reason"):
            rows.append(f"{start} {reason} | {seconds} | | {mfu} | | {peak} | |")
        else:
            rows.append(
                f"{start} {line['seconds']:.3f} | {seconds} | {shown(line.get('mfu'), '.1%')} | {mfu} | "
                f"{line['peak_bytes'] / GIB:.2f} | {peak} | {line['tokens_per_s']:,.0f} |"
            )
    hardware = ", ".join(f"{name} {value}" for name, value in found["hardware"].items())
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in ("torch", "accelerate", "deepspeed"))
    return "\n".join([*rows, "", f"{hardware}; {packages}", ""])


def measure(output: Path, tiny: bool, device: torch.device) -> None:
    """Head and updates; on-gpu.json grows with each launch, and launches that it has are not repeated."""
    head, models, rows = (TINY_HEAD, TINY_MODELS, TINY_ROWS) if tiny else (HEAD, MODELS, ROWS)
    processes, file = 2 if device.type == "cpu" else torch.accelerator.device_count(), output / "on-gpu.json"
    if file.exists():
        found = json.loads(file.read_text())
    else:
        found = {"head": time_head(device, *head), "updates": [], **describe_environment(sys.argv, device)}
        found["plan"] = ["--gpu", "cpu", "--gpu_memory", "8GiB"]
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            gpu, total = gpu_of(device_name(device) or ""), torch.accelerator.get_memory_info()[1]
            found["plan"] = ["--gpu_memory", f"{total // 2**20}MiB", *(["--gpu", gpu.name] if gpu else [])]
    known = [{name: row[name] for name in ("model", "strategy", "rows", "options")} for row in found["updates"]]
    for model, strategy, micro_batch, further in rows:
        if processes > 1 and strategy == "single":
            strategy = "ddp"
        row = {"model": model, "strategy": strategy, "rows": micro_batch, "options": further}
        if row in known:
            continue
        row |= {"processes": processes, "flags": flags_of(models[model], micro_batch, further)}
        row |= train(row, output / "run")
        found["updates"].append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "flags"}), flush=True)
        file.write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--predict", action="store_true", help="of what is measured already")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu" and not (options.tiny or options.predict):
        parser.error("there is no GPU here: use --tiny")
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.predict:
        measure(options.output, options.tiny, device)
    if not (options.predict or options.tiny):
        return
    found = json.loads((options.output / "on-gpu.json").read_text())
    for row in found["updates"]:
        row["predicted"] = predict(row, found["plan"])
        print(row["model"], row["strategy"], row["rows"], row["options"], flush=True)
    (options.output / "on-gpu.json").write_text(json.dumps(found, indent=1))
    (options.output / "on-gpu.md").write_text(report(found))
    print("", report(found), sep="\n")


if __name__ == "__main__":
    main()
