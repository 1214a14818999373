"""Predicted memory beside published, measured `max_memory_reserved` (and, where a source printed that, `allocated`).

    python benchmarks/published_memory.py        # half a minute

The runs of stas00/ml-engineering@744d01e1 (insights/when-to-upgrade-gpus, its benchmark.py) had DeepSpeed's own sizes
of buckets, and most of them Liger's SwiGLU, RMSNorm and RoPE. zerofit does not install these; here functions that save
what they save stand in their place while a pass is traced, so that what is compared is the engine and the allocator.
The loss is zerofit's own, in chunks, where Liger's was used, and the full one elsewhere. KempnerForge's and
torchtitan's runs were FSDP with full recomputation (torchtitan's compiled), in transformers' functions here.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from provenance import provenance
from transformers.models.llama import modeling_llama

from zerofit.cli import main as zerofit
from zerofit.compat import replaced
from zerofit.record.terminal import table

GIB = 2**30
SIZES = {  # DeepSpeed's defaults
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "allgather_bucket_size": 500_000_000,
}
ON_HOST = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
H200, RECOMPUTED = ("--gpu", "h200-141gb"), ("--gradient_checkpointing",)
FULL = ("--loss", "full")
HOST = "zero3_offload_optimizer"
ROWS = (  # what, bytes, which, strategy or the DeepSpeed section, GPUs, Liger's functions, micro-batch, tokens, flags
    ("ZeRO-3, optimizer on the host", 16.3 * GIB, "reserved", ON_HOST, 8, True, 1, 8192, RECOMPUTED),
    ("the same", 37.5 * GIB, "reserved", ON_HOST, 8, True, 1, 65536, RECOMPUTED),
    ("the same", 95.7 * GIB, "reserved", ON_HOST, 8, True, 1, 196608, RECOMPUTED),
    ("the same", 124.5 * GIB, "reserved", ON_HOST, 8, True, 1, 262144, RECOMPUTED),
    ("ZeRO-2", 80 * GIB, "reserved", {"stage": 2, "overlap_comm": True}, 8, True, 1, 8192, ()),
    ("ZeRO-2, without Liger", 99 * GIB, "reserved", {"stage": 2, "overlap_comm": True}, 8, False, 1, 8192, FULL),
    ("FSDP, KempnerForge", 61.1e9, "reserved", "fsdp2", 4, False, 4, 4096, (*RECOMPUTED, *FULL)),
    ("FSDP, torchtitan", 83.9 * GIB, "reserved", "fsdp2", 8, False, 1, 32768, (*RECOMPUTED, *FULL)),
    ("7B, ZeRO-2 (chenyaofo's gist)", 38.6e9, "allocated", "zero2", 8, False, 4, 4096, (*RECOMPUTED, *FULL)),
    ("7B, ZeRO-3", 39.1e9, "allocated", "zero3", 8, False, 8, 4096, (*RECOMPUTED, *FULL)),
    ("7B, the same on the host", 9.4e9, "allocated", HOST, 8, False, 2, 4096, (*RECOMPUTED, *FULL)),
)


class SwiGLU(torch.autograd.Function):
    """Keeps both factors; their gradients take their place."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors


class Norm(torch.autograd.Function):
    """Keeps its input and a number a row."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.zeros_like(ctx.saved_tensors[1])


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys):
        return queries.clone(), keys.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


@contextlib.contextmanager
def ligers_functions(used: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if used:
            mlp, norm = modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm
            gated = lambda self, x: self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))  # noqa: E731
            stack.enter_context(replaced(mlp, "forward", gated))
            stack.enter_context(replaced(norm, "forward", lambda self, x: Norm.apply(x, self.weight)))
            rotated = replaced(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *_, **more: Rotation.apply(q, k))
            stack.enter_context(rotated)
        yield


def pair_of(section: dict, folder: Path) -> Path:
    """An accelerate YAML, with a DeepSpeed JSON beside it."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content = {**dict.fromkeys(auto, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": {**SIZES, **section}}
    (folder / "sizes.json").write_text(json.dumps(content))
    file = folder / "sizes.yaml"
    deepspeed = {"deepspeed_config_file": str(folder / "sizes.json"), "zero3_init_flag": section["stage"] == 3}
    file.write_text(
        yaml.safe_dump(
            {"distributed_type": "DEEPSPEED", "num_processes": 8, "num_machines": 1, "deepspeed_config": deepspeed}
        )
    )
    return file


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [("run", "tokens", "measured, GiB", "predicted", "tensors alone", "error")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for what, measured, which, strategy, gpus, liger, micro_batch, length, flags in ROWS:
            shape = "llama-2-7b" if what.startswith("7B") else "llama-3-8b"
            pair = strategy if isinstance(strategy, str) else pair_of(strategy, folder)
            flags = [*flags, "--config_overrides", f"max_position_embeddings={length}", "--json", folder / "plan.json"]
            words = (
                f"--task clm --config_name {shape} --precision bf16 --gpu_memory 900GiB --num_gpus {gpus} "
                f"--block_size {length} --batch_sizes {micro_batch} --per_device_eval_batch_size 1"
            ).split()
            words += ["--strategies", pair, *H200, *flags]
            with ligers_functions(liger), contextlib.redirect_stdout(io.StringIO()):
                if zerofit(["plan", *map(str, words)]):
                    raise SystemExit(f"{what}: no plan")
            (found,) = json.loads((folder / "plan.json").read_text())["predictions"]
            predicted, tensors = found[f"peak_{which}_bytes"], found["peak_allocated_bytes"]
            figures = (f"{size / GIB:.1f}" for size in (measured, predicted, tensors))
            rows.append(
                (f"{what}: {which}", f"{micro_batch} x {length:,}", *figures, f"{predicted / measured - 1:+.0%}")
            )
    print(table(rows))
    print(f"\n{provenance('as on the GPUs that are named', 'torch', 'deepspeed', 'transformers')}")


if __name__ == "__main__":
    main()
