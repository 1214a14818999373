"""What nobody has timed yet, in under ten minutes on one GPU or several of a machine, without a network.

    python benchmarks/on_gpu.py outputs/on-gpu             # on GPUs
    python benchmarks/on_gpu.py outputs/on-cpu --tiny      # small shapes, to see on a CPU that it works

* The head alone: hidden states x vocabulary in bf16, loss and gradients of 8,192 tokens in chunks of some rows
  (zerofit/model/loss.py): milliseconds, and the memory that is taken beside inputs and gradients.
* Updates of Llama-3.2-1B and Llama-3-8B in bf16 under zero1, fsdp2 and tp, one process a GPU: random weights, text of
  docs/. Where the memory does not hold a model, it has half of its layers, or a quarter, ...: the MFU is about that of
  the whole, the seconds are not. Beside them what `zerofit plan` predicts.

Writes on-gpu.md and on-gpu.json: figures, hardware, versions. A launch is stopped after 90 s; after 570 s none begins.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from provenance import provenance

from zerofit.model.chunked_loss import IGNORE, _Chunked, chunk_rows
from zerofit.record.environment import describe_environment
from zerofit.strategy.devices import device_name
from zerofit.strategy.gpu_table import gpu_of

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
STRATEGIES = ("zero1", "fsdp2", "tp")
NOT_COUNTED, UPDATES = 3, 10
LAUNCH_S, ALL_S = 90, 570
UNTIL = time.monotonic() + ALL_S
TINY = "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,head_dim=16"
SIZES = {  # vocabulary, hidden, tokens, chunks of the head; {model: its shape}; vocabulary, rows, length of a batch
    False: (
        (128256, 4096, 8192, (256, 512, 1024, 2048)),
        {"Llama-3.2-1B": ("llama-3.2-1b", "", 16), "Llama-3-8B": ("llama-3-8b", "", 32)},
        (128256, 4, 2048),
    ),
    True: ((1000, 64, 128, (16, 32)), {"Llama of 64": ("llama-3-8b", TINY, 2)}, (8, 2, 64)),
}


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
            loss = _Chunked.apply(states, weight, None, targets, rows, [True, True, False], None)
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


def flags_of(name: str, changes: str, layers: int, vocabulary: int, rows: int, length: int) -> list[str]:
    """The recipe of a launch, and of its prediction."""
    shape = ",".join(filter(None, [changes, f"num_hidden_layers={layers}"]))
    return [
        "--config_name",
        name,
        "--config_overrides",
        shape,
        "--make_vocab_size_divisible_by",
        str(vocabulary),
        *("--train_tokenizer_vocab_size 4096 --train_file docs/*.md --packing concatenate --block_size").split(),
        str(length),
        "--per_device_train_batch_size",
        str(rows),
        *"--precision bf16 --gradient_accumulation_steps 1".split(),
    ]


def predict(flags: list[str], strategy: str, gpus: int, where: list[str]) -> dict:
    """What `zerofit plan` says of this micro-batch; empty, with a reason, if it says nothing."""
    words = [
        sys.executable,
        *"-m zerofit.cli plan --task clm".split(),
        *flags,
        *where,
        "--num_gpus",
        str(gpus),
        "--strategies",
        strategy,
        "--batch_sizes",
        flags[flags.index("--per_device_train_batch_size") + 1],
        "--json",
        "-",
    ]
    said, reason = _run(words)
    return {"reason": reason} if reason else json.loads(said[said.index("{") :])["predictions"][0]


def train(flags: list[str], strategy: str, processes: int, output: Path) -> dict:
    """Median seconds, tokens/s, MFU and peak memory of some updates; else the reason why there are none."""
    words = [
        sys.executable,
        *"-m accelerate.commands.launch --main_process_port 0 --num_processes".split(),
        str(processes),
        "--config_file",
        f"accelerate_configs/{strategy}.yaml",
        "train/clm.py",
        *flags,
        "--max_train_steps",
        str(UPDATES),
        *(
            "--validation_split_percentage 0 --save_strategy no --report_to none --eval_on_start false "
            "--sample_tokens 0 --output_dir"
        ).split(),
        str(output),
        "--overwrite_output_dir",
        "--max_train_samples",
        "2000",
    ]
    _, reason = _run(words)
    if reason:
        return {"reason": reason}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][NOT_COUNTED:]
    figures = {
        name: statistics.median(line[name] for line in lines)
        for name in ("seconds", "tokens_per_s", "mfu")
        if name in lines[0]
    }
    return figures | {"peak_bytes": max(line["peak_memory_bytes"] for line in lines)}


def _run(words: list[str]) -> tuple[str, str]:
    """(standard output, why there is none)."""
    limit_s = min(LAUNCH_S, int(UNTIL - time.monotonic()))
    if limit_s <= 0:
        return "", f"no time was left of {ALL_S} s"
    words = [
        "timeout",
        "--kill-after",
        "20",
        str(limit_s),
        *words,
    ]  # the launcher ends its processes when it is told to
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode in (0, 124):
        return done.stdout, f"stopped after {limit_s} s" if done.returncode else ""
    errors = [line for line in done.stderr.splitlines() if "rror" in line or "out of memory" in line]
    return "", (errors or ["no message"])[0][:200].replace("|", "/")


def time_updates(
    name: str, model: tuple[str, str, int], sizes: tuple[int, int, int], gpus: int, where: list[str], output: Path
) -> list[dict]:
    """Each strategy with as many layers as fit by its prediction."""
    known, changes, layers = model
    found = []
    for strategy in STRATEGIES:
        row = {"model": name, "strategy": strategy, "processes": gpus, "layers": layers, "of_layers": layers}
        if strategy == "tp" and gpus % 2:
            found.append({**row, "reason": "tp needs an even number of GPUs"})
            continue
        while True:
            flags = flags_of(known, changes, row["layers"], *sizes)
            row["predicted"] = predict(flags, strategy, gpus, where)
            if row["predicted"].get("fits", True) or row["layers"] == 1:
                break
            row["layers"] //= 2
        found.append(row | train(flags, strategy, gpus, output / "run"))
        print(json.dumps(found[-1]), flush=True)
    return found


# -------------------------------------------------------------------------------------------------------------- report


def report(head: list[dict], updates: list[dict], about: dict) -> str:
    """Both tables in Markdown, and where they come from."""

    def shown(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value / scale, form)

    rows = ["| rows of a chunk | ms | peak, GiB |", "|--:|--:|--:|"]
    rows += [
        f"| {line['rows']:,}{' (as trained)' * line['is_default']} | {line['milliseconds']:.2f} | "
        f"{shown(line['peak_bytes'], '.3f', GIB)} |"
        for line in head
    ]
    heads = "model | strategy | layers | s | predicted | MFU | predicted | peak, GiB | predicted | tokens/s"
    rows += ["", f"| {heads} |", "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for line in updates:
        said = line.get("predicted", {})
        start = f"| {line['model']} | `{line['strategy']}` ({line['processes']}) | "
        start += f"{line['layers']} of {line['of_layers']} |"
        peak = shown(said.get("peak_allocated_bytes"), ".2f", GIB)
        seconds, mfu = shown(said.get("seconds_per_update"), ".3f"), shown(said.get("mfu"), ".1%")
        if reason := line.get("reason"):
            rows.append(f"{start} {reason} | {seconds} | | {mfu} | | {peak} | |")
        else:
            rows.append(
                f"{start} {line['seconds']:.3f} | {seconds} | {shown(line.get('mfu'), '.1%')} | {mfu} | "
                f"{line['peak_bytes'] / GIB:.2f} | {peak} | {line['tokens_per_s']:,.0f} |"
            )
    hardware = ", ".join(f"{name} {value}" for name, value in about["hardware"].items())
    source = provenance(hardware, "torch", "accelerate", "deepspeed", "transformers")
    return "\n".join([*rows, "", source, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no GPU here: use --tiny")
    options.output.mkdir(parents=True, exist_ok=True)
    head, models, sizes = SIZES[options.tiny]
    if device.type == "cpu":
        gpus, where = 2, ["--gpu", "cpu", "--gpu_memory", "8GiB"]
    else:
        gpu, total = gpu_of(device_name(device) or ""), torch.accelerator.get_memory_info()[1]
        gpus, where = torch.accelerator.device_count(), ["--gpu_memory", f"{total // 2**20}MiB"]
        where += ["--gpu", gpu.name] if gpu else []
    timed = time_head(device, *head)
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    updates = [
        line
        for name, model in models.items()
        for line in time_updates(name, model, sizes, gpus, where, options.output)
    ]
    about = describe_environment(sys.argv, device)
    (options.output / "on-gpu.json").write_text(json.dumps({"head": timed, "updates": updates, **about}, indent=1))
    text = report(timed, updates, about)
    (options.output / "on-gpu.md").write_text(text)
    print("", text, sep="\n")


if __name__ == "__main__":
    main()
