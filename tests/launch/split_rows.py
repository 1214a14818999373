"""Run by test_sequence.py on two ranks: rows that the ranks of a replica split, against rows in full, for tiny
models of each family. Rank 0 writes what it found as JSON."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import numpy as np
import torch
from helpers import loss_and_gradients, refusal, tiny_model

from zerofit.compat.deepspeed import without_shared_memory
from zerofit.data.collate import CausalCollator
from zerofit.model.loss import install_loss
from zerofit.model.preflight import check_packing, check_split_rows
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.sequence import SplitRows

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "llama, one head of keys and values": ("llama", {"num_key_value_heads": 1}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "mistral": ("mistral", {**SMALL, "sliding_window": None}),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 8}),
    "llama, ring": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
    "gpt2, ring": ("gpt2", {"n_head": 3, "n_embd": 48}),
    "qwen3, ring, shared heads of keys and values": (
        "qwen3",
        {**SMALL, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    ),
    "olmo2": ("olmo2", {**SMALL, "pad_token_id": 0, "eos_token_id": 1}),
}
LENGTHS = {"padded": (13, 8), "packed": (15, 15), "mask": (15, 15)}  # 2 ranks do not divide 13 and 15


def rows_of(kind: str) -> dict:
    rng, samples = np.random.default_rng(3), []
    for length in LENGTHS[kind]:
        ids, row = rng.integers(0, 97, length), {}
        if kind == "packed":
            row["position_ids"] = np.arange(length) % 6
        if kind == "mask":
            row["documents"] = np.arange(length) // 6
        samples.append(({"input_ids": ids, "labels": np.where(ids < 20, -100, ids), **row}, 0))
    return CausalCollator(pad_id=0)(samples).inputs


def compare(model, rows: SplitRows, inputs: dict) -> dict[str, float]:
    """The largest differences between split rows and rows in full, relative to the largest value."""
    loss, gradients = loss_and_gradients(model, "chunked", inputs)
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient)
    questions = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        logits = model(**questions).logits
    with rows.in_full():
        loss_in_full, wanted = loss_and_gradients(model, "chunked", inputs)
        with torch.no_grad():
            in_full = model(**questions).logits
    seen = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    seen = seen.bool() if seen.dim() == 2 else torch.ones_like(inputs["input_ids"]).bool()
    largest = max((gradients[name] - each).abs().max().item() for name, each in wanted.items())
    return {
        "loss": abs((loss - loss_in_full) / loss_in_full).item(),
        "gradients": largest / max(each.abs().max().item() for each in wanted.values()),
        "logits": ((logits - in_full)[seen].abs().max() / in_full[seen].abs().max()).item(),
    }


def checks(model, rows: SplitRows, layout: ParallelLayout) -> dict[str, str]:
    """What the checks before a run say without the mask of packed documents; with it, they let the run pass."""
    engine = SimpleNamespace(
        module=model,
        model=model,
        device=torch.device("cpu"),
        layout=layout,
        rows_in_full=rows.in_full,
        split_rows=rows,
        strategy=SimpleNamespace(precision="fp32"),
    )
    collate, recipe = CausalCollator(pad_id=0), SimpleNamespace(attn_implementation=None)
    check_packing(engine, recipe, collate)
    check_split_rows(engine, collate, True)
    rows._mask = lambda *args: None
    said = {"isolation": refusal(check_packing, engine, recipe, collate)}
    said["loss"] = refusal(check_split_rows, engine, collate, True)
    del rows._mask
    return said


def main(output: Path) -> None:
    with without_shared_memory():
        deepspeed.init_distributed("gloo", verbose=False)
    layout = ParallelLayout(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), sequence=2)
    found = {}
    for name, (family, changes) in MODELS.items():
        model = tiny_model(family, **changes).train()
        install_loss(model, "chunked")
        rows = SplitRows(model, layout)
        masked = not rows.in_a_ring
        found[name] = {kind: compare(model, rows, rows_of(kind)) for kind in LENGTHS if masked or kind == "padded"}
        model.gradient_checkpointing_enable()
        found[name]["recomputed"] = compare(model, rows, rows_of("packed" if masked else "padded"))
        found[name]["checks"] = checks(model, rows, layout) if masked else None
    if layout.is_main:
        output.write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
