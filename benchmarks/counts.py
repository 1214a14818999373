"""Collectives, and what the host waits for, in an update under every strategy: counted on the simulated accelerator.

    python benchmarks/counts.py                       # every pair, four launches each, 8 minutes: the tables
                                                      # of docs/measurements/counts.md
    python benchmarks/counts.py ddp zero3             # these, on the screen

Each launch trains a small Llama (under ep a Mixtral) in bf16, with 2 or 4 layers and 2 or 4 micro-batches an update.
What is counted of the third update is a + b layers + micro-batches (c + d layers): the four launches say which.
Collectives are those of rank 0, waits those of the rank with most. Under a pipeline a layer is one of rank 0's.
"""

import argparse
import collections
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

from provenance import provenance

from zerofit.recipe.files import CONFIG_DIR

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
FOLDER = "COUNTS_FOLDER"  # set: this is a rank of a launch
PAGE, TABLES = ROOT / "docs" / "measurements" / "counts.md", "## Collectives\n"  # ours from here on
SIZES = ((2, 2), (4, 2), (2, 4), (4, 4))  # layers, micro-batches
COUNTED = 3  # the update
PROCESSES = {"single": 1, "tp_zero2": 4, "tp_zero3": 4, "3d": 4, "zero3_hpz": 4, "hsdp": 4}  # of others 2
MACHINES, STAGES = {"zero3_hpz": 2, "hsdp": 2}, {"pp": 2, "3d": 2}
ROWS, LENGTH, HIDDEN, INNER, VOCABULARY = 2, 64, 64, 192, 512
LAYER = HIDDEN * (3 * HIDDEN + 3 * INNER + 2)  # weights, norms included; half as many heads of keys as of queries
LLAMA = f"hidden_size={HIDDEN},intermediate_size={INNER},num_attention_heads=4,num_key_value_heads=2"
COMMON = (
    f"--train_tokenizer_vocab_size {VOCABULARY} --train_file docs/options.md --block_size {LENGTH} "
    f"--per_device_train_batch_size {ROWS} --precision bf16 --max_train_steps {COUNTED + 1} "
    "--validation_split_percentage 0 --save_strategy no --report_to none --eval_on_start false --max_train_samples 200"
).split()
KINDS = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}
LETTERS = {"forward": "F", "backward": "B", "update": "U", "data": "U"}
BEFORE_STEP = "before the step"  # that of the operations between the last backward pass and the optimizer's step
PER = ("per layer and micro-batch", "per layer", "other, per micro-batch", "other")
Counts = dict[tuple[str, str], list[float]]  # {(phase, what): [count, bytes]}


def launch(server, strategy: str, layers: int, micro_batches: int, *more: str) -> list[list[dict]]:
    """The events of the counted update, of each rank."""
    from helpers import environment
    from ranks import rank_environments

    model = ("--model_type", "mixtral") if strategy == "ep" else ("--config_name", "llama-2-7b")
    with tempfile.TemporaryDirectory() as folder:
        shape = ("--config_overrides", f"num_hidden_layers={layers},{LLAMA}", "--strategy", strategy)
        sizes = ("--gradient_accumulation_steps", str(micro_batches), "--output_dir", f"{folder}/run")
        words = [__file__, *model, *shape, *COMMON, *more, *sizes]
        ranks = rank_environments(
            {**environment(), FOLDER: folder}, PROCESSES.get(strategy, 2), MACHINES.get(strategy, 1)
        )
        done = server.run(words, ranks, ROOT, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{strategy}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return [json.loads(Path(folder, f"rank_{rank}.json").read_text()) for rank in range(len(ranks))]


def collectives(events: list[dict], world: int) -> Counts:
    """Of one rank; those within groups of one rank are left out."""
    found = collections.defaultdict(lambda: [0, 0])
    for event in events:
        if len(event["ranks"]) > 1:
            name = event["event"].removeprefix("c10d::").strip("_")
            kind = next(KINDS[each] for each in sorted(KINDS, key=len, reverse=True) if name.startswith(each))
            group = f" ({', '.join(map(str, event['ranks']))})" if len(event["ranks"]) < world else ""
            counted = found[event["phase"], kind + group]
            counted[0], counted[1] = counted[0] + event["count"], counted[1] + event["bytes"]
    return found


def waits(ranks: list[list[dict]]) -> Counts:
    """Of the rank with most."""
    each = []
    for events in ranks:
        found: Counts = collections.defaultdict(lambda: [0, 0])
        for event in events:
            if event["phase"] != BEFORE_STEP and (not event["ranks"] or "barrier" in event["event"]):
                found[event["phase"], event["event"].removeprefix("aten::")][0] += event["count"]
        each.append(found)
    return max(each, key=lambda found: sum(count for count, _ in found.values()))


def split(counts: dict[tuple[int, int], Counts], stages: int = 1) -> list[Counts]:
    """Counts by (layers, micro-batches) -> those of each of PER."""
    layers, batches = (SIZES[0][0] / stages, SIZES[3][0] / stages), (SIZES[0][1], SIZES[3][1])
    parts = [{} for _ in PER]
    for key in sorted({key for found in counts.values() for key in found}):
        values = [[counts[size].get(key, (0, 0))[which] for size in SIZES] for which in (0, 1)]
        for which, (few, deeper, longer, both) in enumerate(values):
            more_layers, more_batches = layers[1] - layers[0], batches[1] - batches[0]
            of_both = (both - deeper - longer + few) / (more_layers * more_batches)
            of_layer = (deeper - few) / more_layers - of_both * batches[0]
            of_batch = (longer - few) / more_batches - of_both * layers[0]
            rest = few - layers[0] * of_layer - batches[0] * of_batch - layers[0] * batches[0] * of_both
            for part, value in zip(parts, (of_both, of_layer, of_batch, rest)):
                part.setdefault(key, [0, 0])[which] = value
    return parts


def cell(counts: Counts) -> str:
    """What there is, by phase: "F 2 all-reduce 32 KiB; B 2 all-reduce 32 KiB"."""
    phases = {}
    for (phase, what), (count, size) in counts.items():
        shown = [f"{count:.4g}"] * (abs(count) > 0.005) + [what] + [f"{size / 1024:,.1f} KiB"] * (abs(size) >= 512)
        if len(shown) > 1:
            phases.setdefault(LETTERS[phase], []).append(" ".join(shown))
    return "; ".join(f"{letter} {', '.join(phases[letter])}" for letter in "FBU" if letter in phases)


def reason_of(error: RuntimeError) -> str:
    """Why a launch has no figures, as a cell."""
    print(error, file=sys.stderr)
    lines = [line for line in str(error).splitlines() if "rror: " in line] or str(error).strip().splitlines()
    return "none: " + lines[0].partition("rror: ")[2].replace("|", "/").split(". ")[0]


def rank_server():
    """What ranks are forked from: a process that has imported the libraries, with four simulated devices."""
    from helpers import environment
    from ranks import RankServer

    from zerofit.tools.simulate import build

    devices = {**build.environment(build.build_device()), "SIMGPU_MEMORY": ",".join(["4294967296"] * 4)}
    return RankServer({**environment(), **devices})


def tables(strategies: list[str]) -> str:
    """Launch every strategy and write the tables, in Markdown."""
    server = rank_server()
    heads = [f"| pair (processes) | {' | '.join(PER)} |", "|---" * 5 + "|"]
    exchanged, waited = list(heads), list(heads)
    dispatched = ["| pair (processes) | operations per layer | other operations |", "|---|--:|--:|"]
    for strategy in strategies:
        name = f"`{strategy}` ({PROCESSES.get(strategy, 2)})"
        try:
            runs = {size: launch(server, strategy, *size) for size in SIZES}
        except RuntimeError as error:
            exchanged.append(f"| {name} | {reason_of(error)} | | | |")
            continue
        stages = STAGES.get(strategy, 1)
        of_rank = {size: collectives(ranks[0], len(ranks)) for size, ranks in runs.items()}
        exchanged.append(f"| {name} | {' | '.join(map(cell, split(of_rank, stages)))} |")
        parts = split({size: waits(ranks) for size, ranks in runs.items()}, stages)
        waited.append(f"| {name} | {' | '.join(map(cell, parts))} |")
        found = [next(e for e in runs[size][0] if e["phase"] == BEFORE_STEP)["count"] for size in SIZES[:2]]
        of_layer = (found[1] - found[0]) / (SIZES[1][0] - SIZES[0][0]) * stages
        dispatched.append(f"| {name} | {of_layer:g} | {found[0] - of_layer * SIZES[0][0] / stages:g} |")
        print(exchanged[-1], waited[-1], dispatched[-1], sep="\n", flush=True)
    sizes = (
        f"A layer has {LAYER:,} weights ({2 * LAYER / 1024:g} KiB in bf16), embedding and head "
        f"{VOCABULARY * HIDDEN:,} each ({2 * VOCABULARY * HIDDEN / 1024:g} KiB), the hidden states of a micro-batch "
        f"{2 * ROWS * LENGTH * HIDDEN / 1024:g} KiB."
    )
    about = provenance("simulated accelerator", "torch", "accelerate", "deepspeed", "transformers")
    return "\n".join(
        [
            TABLES,
            sizes,
            "",
            *exchanged,
            "",
            "## Waits of the host",
            "",
            *waited,
            "",
            "## Operations between the last backward pass and the optimizer",
            "",
            *dispatched,
            "",
            about,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", help="pairs; all of them, if none is named")
    parser.add_argument("--output", type=Path, help="a page; what it has before the first table stays")
    options = parser.parse_args()
    written = tables(options.strategies or sorted(file.stem for file in (ROOT / CONFIG_DIR).glob("*.yaml")))
    output = options.output or (None if options.strategies else PAGE)
    print("", written, sep="\n")
    if output:
        before = output.read_text().split(TABLES)[0] if output.is_file() else ""
        output.write_text(before + written)


# ------------------------------------------------------------------------------------------------------------- a rank


def count_and_run() -> None:
    """A rank of a launch: the task itself, and a file of what its update COUNTED did until the next began."""
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils._python_dispatch import TorchDispatchMode

    from zerofit.training.run import Run

    if simgpu := sys.modules.get("simgpu"):  # its current device is that of the process that ranks are forked from
        simgpu.set_device(int(os.environ["LOCAL_RANK"]))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"simgpu:{os.environ['LOCAL_RANK']}"
    counts, now, modes = collections.defaultdict(lambda: [0, 0]), {"phase": "update", "update": 0}, []
    updates, within = Run.updates, Run.enter_part

    def note(event: str, size: int, group: str) -> None:
        is_backward = now["phase"] == "backward" or torch._C._current_graph_task_id() >= 0
        ranks = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group)) if group else []
        found = counts["backward" if is_backward else now["phase"], event, tuple(ranks)]
        found[0], found[1] = found[0] + 1, found[1] + size

    class Operations(TorchDispatchMode):
        """Counts those outside autograd, from the last backward pass until an optimizer steps."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[BEFORE_STEP, "operations", ()][0] += torch._C._current_graph_task_id() < 0
            return func(*args, **(kwargs or {}))

    def enter(phase: str) -> None:
        now["phase"] = phase
        if phase == "backward" and now["update"] == COUNTED - 1:  # a mode would let the device see calls twice
            counts[BEFORE_STEP, "operations", ()][0] = 0
            modes or modes.append(Operations().__enter__())

    def begins(update: int) -> None:
        now["update"] = update
        if simgpu:
            simgpu.observe(note if update == COUNTED else None)
        if update == COUNTED + 1:
            names = ("phase", "event", "ranks", "count", "bytes")
            events = [dict(zip(names, (*key, *found))) for key, found in counts.items()]
            Path(os.environ[FOLDER], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(events))

    def counted(self, *args, **kwargs):
        for update in updates(self, *args, **kwargs):
            begins(update.number)
            yield update

    Run.updates = counted
    Run.enter_part = lambda self, phase: (enter(phase), within(self, phase))[1]
    register_optimizer_step_pre_hook(lambda *_: modes.pop().__exit__(None, None, None) if modes else None)
    sys.argv[0] = str(ROOT / "train" / "clm.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    count_and_run() if os.environ.get(FOLDER) else main()
