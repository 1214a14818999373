"""The time of an update as `zerofit plan` predicts it, beside that of real launches on this machine's CPU.

    zerofit plan --calibrate --num_gpus 2
    python benchmarks/plan_time.py                  # 8 launches of two processes: 5 to 10 minutes on two idle cores
    python benchmarks/plan_time.py --only zero2     # those whose name contains this

What is measured is the processor time of a process in an update, and not the wall clock: other programs on the machine
lengthen the latter. The two are the same on an idle machine with a core for each process, but for waiting for one
another. The median of the updates after the third counts, of the slower process.
"""

import argparse
import functools
import io
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = "PLAN_TIMES"  # a folder: this is a process of a launch
GPT2 = tuple(
    (
        "--config_name gpt2 --config_overrides "
        "n_layer=2,n_head=12,n_embd=768,n_positions=128,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0 --block_size "
        "128"
    ).split()
)
LLAMA = tuple(
    (
        "--config_name llama-2-7b --config_overrides "
        "num_hidden_layers=4,hidden_size=512,intermediate_size=1408,num_attention_heads=8,num_key_value_heads=8 "
        "--block_size 128"
    ).split()
)
FP32, BF16 = ("--precision", "fp32"), ("--precision", "bf16")
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {  # name: (strategy, micro-batch, flags of the recipe)
    "gpt2 ddp": ("ddp", 2, (*GPT2, *FP32)),
    "gpt2 zero2": ("zero2", 2, (*GPT2, *FP32)),
    "gpt2 zero3": ("zero3", 2, (*GPT2, *FP32)),
    "gpt2 ddp recomputed": ("ddp", 2, (*GPT2, *FP32, "--gradient_checkpointing")),
    "gpt2 ddp lora": ("ddp", 2, (*GPT2, *FP32, "--lora")),
    "gpt2 zero1 bf16": ("zero1", 1, (*GPT2, *BF16)),
    "llama ddp": ("ddp", 4, (*LLAMA, *FP32)),
    "llama zero2": ("zero2", 2, (*LLAMA, *FP32)),
}
COMMON = (
    "--train_tokenizer_vocab_size",
    "4096",
    "--train_file",
    "{stdlib}/*.py",
    "--gradient_accumulation_steps",
    "2",
)
NOT_KEPT = tuple(
    (
        "--save_strategy no --report_to none --eval_on_start false --max_eval_samples 2 --sample_tokens 0 "
        "--max_train_steps 7"
    ).split()
)


def measure(strategy: str, micro_batch: int, flags: tuple[str, ...]) -> float:
    """Processor seconds of an update, of the slower process."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            *"-m accelerate.commands.launch --main_process_port 0 --num_processes 2 --config_file".split(),
            f"accelerate_configs/{strategy}.yaml",
            __file__,
            *flags,
            *COMMON,
            *NOT_KEPT,
            "--per_device_train_batch_size",
            str(micro_batch),
            "--output_dir",
            f"{folder}/run",
        ]
        environment = {**os.environ, TIMES: folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        ranks = [json.loads(file.read_text()) for file in Path(folder).glob("rank_*.json")]
        return max(statistics.median(times[3:]) for times in ranks)


def predict(strategy: str, micro_batch: int, flags: tuple[str, ...]) -> dict:
    from zerofit.cli import main as zerofit

    words = [
        "plan",
        "--task",
        "clm",
        *flags,
        *COMMON,
        *"--gpu cpu --gpu_memory 64GiB --num_gpus 2 --strategies".split(),
        strategy,
        "--batch_sizes",
        str(micro_batch),
        "--json",
        "-",
    ]
    with redirect_stdout(io.StringIO()) as said:
        if zerofit(words):
            raise SystemExit(1)
    return json.loads(said.getvalue())["predictions"][0]


def run_and_note_times() -> None:
    """A process of a launch: the task itself, and a note of the processor time of each update."""
    from zerofit.training.step import TrainStep

    times, step = [], TrainStep.__call__

    @functools.wraps(step)
    def timed(*args, **kwargs):
        began = time.process_time()
        try:
            return step(*args, **kwargs)
        finally:
            times.append(time.process_time() - began)
            Path(os.environ[TIMES], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(times))

    TrainStep.__call__ = timed
    sys.argv[0] = str(ROOT / "train" / "clm.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    print(f"{'case':24}{'predicted s':>12}{'measured s':>12}{'ratio':>8}  parts", flush=True)
    for name, case in CASES.items():
        if only not in name:
            continue
        predicted, measured = predict(*case), measure(*case)
        seconds = predicted["seconds_per_update"]
        parts = ", ".join(f"{part} {one:.3f}" for part, one in predicted["seconds"].items() if one > 0.005)
        print(f"{name:24}{seconds:12.3f}{measured:12.3f}{seconds / measured:8.2f}  {parts}", flush=True)


if __name__ == "__main__":
    run_and_note_times() if os.environ.get(TIMES) else main()
