"""Predicted seconds of an update beside published, measured ones: zerofit/estimate/measured_rows.csv.

    python benchmarks/published_times.py                 # all rows: tables by kind, source and GPU; two minutes
    python benchmarks/published_times.py --write         # also `predicted` in the CSV, and with each row's parts
                                                         # docs/measurements/plan-times.csv
    python benchmarks/published_times.py --only internevo --parts

A row is predicted as `zerofit plan` predicts it: MPT, BLOOM and Megatron's models as transformers' GPT-2 of the same
shape, the others as Llama, both with transformers' kernels, norm and loss included. Memory is not limited. Rows marked
`set_aside` were drawn by a seed (a fifth) before constants were fitted, and `--aside` shows these alone.
"""

import argparse
import csv
import os
import statistics
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from zerofit.cli import main as zerofit  # noqa: F401 - reads the environment before torch is loaded
from zerofit.estimate.planned_model import read_planned_model
from zerofit.estimate.planned_rows import MEASURED_ROWS_FILE, MeasuredRow, measured_rows
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import table
from zerofit.tools.plan.plan import make_budget, make_timing
from zerofit.tools.plan.plan_options import Degrees, PlanOptions, read_pair, resolve_degrees
from zerofit.tools.plan.planner import Planner
from zerofit.tools.tool_recipe import read_with_recipe

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "docs" / "measurements" / "plan-times.csv"
AUTOCAST = "nanogpt"  # over weights in fp32, so that the residual stream is in fp32; the others compute with bf16 ones
FUSED = ("nanotron", "internevo")  # whose RMSNorm is one kernel (flash-attn's in Triton, apex's), as ours is
LORA_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def words_of(row: MeasuredRow) -> list[str]:
    """The words after `zerofit plan`."""
    if row.family == "gpt2":
        name, shape = "gpt2", f"n_embd={row.hidden},n_layer={row.layers},n_head={row.heads},n_inner={row.ffn},"
        shape += f"n_positions={row.length},resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    else:
        name, shape = "llama-2-7b", f"hidden_size={row.hidden},num_hidden_layers={row.layers},"
        shape += f"num_attention_heads={row.heads},num_key_value_heads={row.kv_heads},intermediate_size={row.ffn},"
        shape += f"head_dim={row.hidden // row.heads},max_position_embeddings={max(row.length, 4096)},"
        shape += f"tie_word_embeddings={'3.2' in row.model},attention_bias={'qwen' in row.model}".lower()
    words = (
        f"--task clm --config_name {name} --config_overrides {shape},vocab_size={row.vocab} --block_size {row.length} "
        f"--precision {row.precision} --gpu {row.gpu} --num_gpus {row.gpus} --gpus_per_node {row.gpus_per_node} "
        f"--gpu_memory 900GiB --strategies {row.strategy} --gradient_accumulation_steps {row.accumulation} "
        f"--residual_in_fp32 {row.id.startswith(AUTOCAST)}"
    ).split()
    if row.network:
        words += ["--network_bandwidth", row.network]
    if row.recomputed:
        words += ["--gradient_checkpointing", *[row.recomputed] * (row.recomputed != "full")]
    if row.attention:
        words += ["--attn_implementation", row.attention]
    if row.lora_r:
        words += ["--lora", "--lora_r", row.lora_r]
        words += ["--lora_target_modules", LORA_TARGETS] if row.family == "llama" else []
    words += ["--torch_compile"] * bool(row.compiled and row.strategy != "tp_zero3")  # which does not compile
    words += ["--activation_offload"] * bool(row.activation_offload and row.recomputed and not row.compiled)
    return [str(word) for word in words]


def predict(row: MeasuredRow) -> tuple[str, float, dict[str, float]]:
    """(id, seconds of an update, its parts); 0 where no pair of ours does what the row does."""
    try:
        options, _ = read_with_recipe(PlanOptions, words_of(row), prog="zerofit plan")
        budget = make_budget(options)
        model = replace(read_planned_model(options, "clm", True), own_kernels=row.id.startswith(FUSED))
        pair, degrees = read_pair(row.strategy), Degrees(row.tensor, row.pipeline)
        degrees = pair.degrees if degrees == Degrees() else degrees
        recipe = Planner(options, model, budget).recipe_for_layouts()
        resolved = resolve_degrees(
            row.strategy, pair, degrees, recipe, model, world_size=row.gpus, gpus_per_node=row.gpus_per_node
        )
        timing, _ = make_timing(options, model, budget, {row.precision != "fp32"})
        time = timing.predict(resolved, row.micro_batch, row.accumulation).time
    except UserError as error:
        print(f"{row.id}: {error.problems[0]}", file=sys.stderr)
        return row.id, 0.0, {}
    interleaved = time.parts.get("pipeline bubble", 0.0) * (1 - 1 / row.virtual_stages)  # Narayanan et al. 2021, 2.2
    return row.id, time.seconds - interleaved, time.parts


def summary(rows: list[MeasuredRow], key) -> str:
    """A table of residuals by `key`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row.ratio)
    lines = [("", "rows", "median error", "9 of 10 within", "measured / predicted: median", "least", "most")]
    for name, ratios in sorted(groups.items()):
        errors = sorted(abs(1 / ratio - 1) for ratio in ratios)
        lines.append(
            (
                name,
                str(len(ratios)),
                f"{statistics.median(errors):.1%}",
                f"{errors[int(0.9 * (len(errors) - 1))]:.0%}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
            )
        )
    return table(lines, None)


def write(rows: list[MeasuredRow], parts: dict[str, dict[str, float]]) -> None:
    predicted = {row.id: row.predicted for row in rows}
    with MEASURED_ROWS_FILE.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    with MEASURED_ROWS_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            seconds = predicted.get(line["id"], 0)
            writer.writerow({**line, "predicted": f"{seconds:.5g}" if seconds else ""})
    names = list(dict.fromkeys(name for several in parts.values() for name in several))
    with PARTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "kind", "gpu", "measured", "predicted", *names])
        for row in rows:
            several = (f"{parts[row.id].get(name, 0):.4g}" for name in names)
            writer.writerow([row.id, row.kind, row.gpu, row.seconds, f"{row.predicted:.5g}", *several])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose id contains this")
    parser.add_argument("--aside", action="store_true", help="only rows that were set aside")
    parser.add_argument("--parts", action="store_true", help="a line for each row")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen = [row for row in measured_rows() if options.only in row.id and (row.set_aside or not options.aside)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {name: (seconds, parts) for name, seconds, parts in pool.map(predict, chosen, chunksize=4)}
    rows = [MeasuredRow(**{**vars(row), "predicted": found[row.id][0]}) for row in chosen if found[row.id][0]]
    if options.parts:
        for row in sorted(rows, key=lambda row: row.ratio):
            several = sorted(found[row.id][1].items(), key=lambda item: -item[1])[:5]
            said = ", ".join(f"{name} {seconds:.3g}" for name, seconds in several)
            print(
                f"{row.id:24} {row.gpu:11} {row.strategy:8} {row.seconds:9.3f} {row.predicted:9.3f} "
                f"{row.ratio:5.2f}  {said}"
            )
    trusted = [row for row in rows if row.trust != "C"]
    for key in (
        lambda row: "one card" if row.gpus == 1 else "many cards",
        lambda row: row.kind,
        lambda row: f"{row.kind}, {row.gpu}",
        lambda row: f"{row.id.rpartition('-')[0]}, {row.gpu}, {row.kind}",
    ):
        print(summary(trusted, key), end="\n\n")
    print(summary([row for row in rows if row.trust == "C"], lambda row: f"trust C: {row.kind}"))
    if options.write:
        write(rows, {name: parts for name, (_, parts) in found.items()})


if __name__ == "__main__":
    main()
