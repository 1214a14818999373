"""A job whose program chooses the strategy itself (`-m llmacc.pretrain`): a recipe, and the line of `zerofit plan`."""

import os
import shlex
from pathlib import Path

from zerofit.tools.convert.megatron_args.ledger import Call, FlagLedger
from zerofit.tools.convert.megatron_args.pair import DEGREES, Layout, read_machines
from zerofit.tools.convert.megatron_args.script_schedule import ConvertedScript, carry
from zerofit.tools.plan.plan_options import MEMORY_VARIABLE

CHOSEN = (*DEGREES, "data_parallel_size", "sequence_parallel", "use_distributed_optimizer", "zero_stage")
EXAMPLE = "a100-80gb"  # where nobody names the GPU


def read_job(flags: FlagLedger, call: Call, processes: int | None) -> Layout:
    """Processes and machines; --world-size and --local-world-size name those of a job that is not started yet."""
    total = flags.number("world_size")
    layout = read_machines(flags, call, processes or total)
    flags.carried("world_size", f"zerofit plan --num_gpus {total}")
    local = flags.number("local_world_size")
    flags.carried("local_world_size", f"zerofit plan --gpus_per_node {local}")
    if local and layout.world % local == 0:
        layout.machines = layout.world // local
    for name in CHOSEN:
        flags.none(name, "zerofit plan tries degrees and stages, and chooses")
    kind = flags.text("task_type", "GPT")
    if kind.endswith("GPT"):
        flags.satisfied("task_type", "the models of its flags are converted")
    else:
        flags.wrong("task_type", "only llmacc.megatron.GPT is converted")
    return layout


def read_batches(done: ConvertedScript) -> None:
    """The global batch, or the largest one that is allowed."""
    flags = done.flags
    name = flags.first("global_batch_size", "max_global_batch_size")
    done.batch = flags.number(name, default=1) if name else 1
    if name is None:
        flags.wrong("", "there is neither --max-global-batch-size nor --global-batch-size")
    elif name == "global_batch_size":
        carry(done, name, name, done.batch)
    else:
        flags.carried(name, f"zerofit plan --max_global_batch_size {done.batch}")
        counted = [unit for unit in flags.flags if unit.endswith(("_samples", "_tokens"))]
        if counted:
            done.notes.append(f"updates of --{counted[0].replace('_', '-')} have {done.batch} samples each")
    flags.none("micro_batch_size", "zerofit plan chooses it")


def plan_lines(done: ConvertedScript, folder: Path) -> list[str]:
    """The command lines: the search, which writes the best strategy and its script; the launch."""
    layout, memory, pairs = done.layout, os.environ.get(MEMORY_VARIABLE), folder / "pairs"
    gpus = ["--num_gpus", layout.world, "--gpus_per_node", layout.world // layout.machines]
    gpus += ["--gpu_memory", f"{memory}GB"] if memory else ["--gpu", EXAMPLE]
    if done.flags.has("max_global_batch_size"):
        gpus += ["--max_global_batch_size", done.batch]
    if not memory:
        done.notes.append(f"no GPU is named: replace {EXAMPLE}, or set {MEMORY_VARIABLE}=40 before")
    words = [*"zerofit plan --task clm --config".split(), folder / "recipe.yaml", *gpus, "--top", 1, "--write", pairs]
    rendezvous = f"MACHINE_RANK={layout.rank} MAIN_PROCESS_IP={layout.address} MAIN_PROCESS_PORT={layout.port} "
    launch = f"{rendezvous if layout.machines > 1 else ''}sh {shlex.quote(str(pairs))}/*.sh"
    return [shlex.join(map(str, words)), launch]
