"""An error that ends a rank, explained where something is known of it; above all, memory that ran out.

That run ends with exit code 87 (EXIT_OUT_OF_MEMORY), so that whoever starts runs can tell it from other failures.
"""

import contextlib
import errno
import os
import re
import shlex
import sys
import traceback
from typing import TYPE_CHECKING

import torch

from zerofit.estimate.remedies import ACTIVATION_PHASES, Shortage, StateBytes, find_remedies, state_setup
from zerofit.health.watchdog_process import MEMORY_ADVICE, RESUME
from zerofit.recipe.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, escape_controls, first_line, print_last
from zerofit.record.recorder import MemoryMeter
from zerofit.record.terminal import size, table
from zerofit.strategy.host_memory import GIB, host_memory, resident_bytes

if TYPE_CHECKING:
    from zerofit.training.run import Run

# What says that memory ran out. A pinned block that is refused is host memory, in the words of a device's. NCCL's
# words are those of its checks.h and alloc.h.
PINNED_ERROR = r"pin[_ ]memory.{0,400}?(?:CUDA|HIP) error: out of memory"
HOST_PATTERN = re.compile("|".join((
    PINNED_ERROR, "Failed to CUDA host alloc", "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory",
    "not enough memory: you tried to allocate", r"std::bad_alloc", "bad allocation", "unable to mmap",
    "unable to allocate shared memory")), re.DOTALL)  # fmt: skip
CUBLAS_ERROR = "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
DEVICE_PATTERN = re.compile("|".join((
    "(?:CUDA|HIP|XPU) out of memory", "(?:CUDA|HIP) error: out of memory", "MPS backend out of memory",
    "(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED", CUBLAS_ERROR, r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to CUDA [cm]alloc")))  # fmt: skip
SIZE_PATTERN = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
UNIT_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
REQUEST_PATTERN = re.compile(rf"(?:[Tt]ried|Unable) to allocate {SIZE_PATTERN}")  # torch's allocators; numpy


def find_exhausted_memory(error: BaseException) -> str | None:
    """`device` or `host` if an error, or what it came from, says that memory ran out there; else None."""
    for one in causes_of(error):
        if type(one).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return "host"
        frames = traceback.extract_tb(one.__traceback__)  # the line of the program knows of pinned memory
        text = f"{frames[-1].line if frames else ''}\n{one}"
        if isinstance(one, RuntimeError) and (where := exhausted_memory_in(text)):
            return where
    return None


def exhausted_memory_in(text: str) -> str | None:
    """`device` or `host`, if a text says that memory ran out there; else None."""
    if HOST_PATTERN.search(text):
        return "host"
    return "device" if DEVICE_PATTERN.search(text) else None


def causes_of(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it came from."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def asked_for(error: BaseException) -> int:
    """The bytes that could not be had, by the error's message; 0 where it does not say."""
    match = REQUEST_PATTERN.search("\n".join(str(one) for one in causes_of(error)))
    return round(float(match[1]) * UNIT_BYTES[match[2]]) if match else 0


LENGTH_FLAGS = ("block_size", "max_length", "max_source_length", "max_target_length")


def explain(error: BaseException, phase: str, update: int | None, run: "Run") -> str:
    """Write the report that is printed instead of a traceback. `phase`: load, prepare, forward, loss, backward,
    update, evaluate or save; of any other, only what holds for the host."""
    at = f"{phase} of update {update:,}" if update else phase
    try:
        found = measure(error, phase, run)
        launch = run.strategy.launch
        memory = "the device's memory" if found.on_host is False else "host memory"
        first = f"out of memory: rank {launch.rank} of {launch.world_size}, {at}, {memory} "
        lines = [f"{first}({run.strategy.name}, {run.strategy.precision})", *_amounts(error, found, run)]
        if helpful := find_remedies(found):
            rows = [f"  {f'about {size(each.saves)}':>12}  {each.option}  ({each.effect})" for each in helpful]
            lines += ["what would help, by what it saves:", *rows, f"with a remedy added, {RESUME}"]
        elif found.on_host:
            lines += [f"what would help: {MEMORY_ADVICE}", f"then {RESUME}"]
        world_size = launch.world_size
        total = found.total
        words = ["zerofit", "plan", "--task", run.task, *run.recipe.flags_given(), "--num_gpus", str(world_size)]
        if world_size > found.local_processes:
            words += ["--gpus_per_node", str(found.local_processes)]
        if found.on_host is None:
            words += ["--gpu", "cpu"]
            total = total and total // found.local_processes
        elif found.on_host:
            words += ["--host_memory", f"{total >> 20}MiB"] if total else []
            total = torch.accelerator.get_memory_info()[1]
        command = shlex.join([*words, "--gpu_memory", f"{total >> 20}MiB" if total else "80GiB"])
        return "\n  ".join([*lines, "what else fits, predicted:", f"  {command}"])
    except Exception as problem:  # a device that has failed may answer nothing any more, and there is no memory left
        return f"out of memory: {at}: {first_line(error)}\n  (no more can be said of it: {first_line(problem)})"


def measure(error: BaseException, phase: str, run: "Run") -> Shortage:
    """Measure what this rank holds of the memory that ran out."""
    engine = run.engine
    recipe = run.recipe
    strategy = run.strategy
    on_cpu = engine.device.type == "cpu" if engine is not None else not torch.accelerator.is_available()
    on_host = None if on_cpu else find_exhausted_memory(error) != "device"
    setup = state_setup(strategy, recipe, run.parameters, engine)
    layers = logits = 0
    tokens = run.row_tokens or sum(getattr(recipe, name, None) or 0 for name in LENGTH_FLAGS)
    if engine is None:  # resident memory before the model was loaded is not an activation
        taken = torch.accelerator.memory_allocated() if on_host is False else resident_bytes() - run.program_bytes
        held = StateBytes(max(0, min(taken, setup.held(on_host).weights)))
        rest = max(0, taken - held.weights)
    else:
        module = engine.module
        sizes = engine.held_bytes()
        config = module.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", 0)
        layers += getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", 0))
        if getattr(module, "loss_kind", None) == "full" and module.base_model is not module:
            rows = strategy.batches.micro_batch * (2 if getattr(recipe, "preference_loss", None) else 1)
            targets = getattr(recipe, "max_target_length", None) or tokens
            logits = rows * targets * config.vocab_size * (4 + (4 if strategy.precision == "fp32" else 2))
        held = StateBytes(
            sizes["parameters"] if on_host in (None, setup.offloads >= 2) else 0,
            0 if on_host else sum(each.nbytes for each in engine.gradients()),
            sizes["optimizer"] if on_host in (None, setup.offloads >= 1) else 0,
        )
        peak = resident_bytes() if on_host else MemoryMeter(engine.device).peak_bytes()
        rest = max(0, peak - (run.program_bytes if on_host is None else 0) - sum(held))
    free = total = None
    with contextlib.suppress(Exception):  # after some errors the device answers no more
        free, total = torch.accelerator.get_memory_info() if on_host is False else host_memory()
    return Shortage(
        recipe=recipe,
        strategy=strategy,
        setup=setup,
        phase=phase,
        row_tokens=tokens,
        on_host=on_host,
        held=held,
        rest=rest + asked_for(error),
        layers=layers,
        logits=logits,
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        free=free,
        total=total,
        host_free=host_memory()[0],
    )


def _amounts(error: BaseException, found: Shortage, run: "Run") -> list[str]:
    """Lines on how much was asked for and is free, and the table of what is held."""
    amounts: list[str] = []
    if asked := asked_for(error):
        amounts.append(f"asked for {size(asked)}")
    if found.free is not None and found.total:
        amounts.append(f"{size(found.free)} of {size(found.total)} free")
    tokens = found.row_tokens
    batch = f" ({run.strategy.batches.micro_batch} rows" + (f" of up to {tokens:,} tokens)" if tokens else ")")
    rows: list[tuple[str, ...]] = []
    for label, held, due in zip(("weights", "gradients", "optimizer state"), found.held, found.expected()):
        missing = f" (about {size(due - held)} to come)" if held < 0.9 * due else ""
        rows.append((label + missing, size(held)))
    rest = "the rest of the process" if found.on_host else "activations, logits and workspace"
    rows.append((f"{rest}, and the program" if found.on_host is None else rest, size(found.rest - asked)))
    lines = ["; ".join(amounts), f"held by this rank{batch if found.phase in ACTIVATION_PHASES else ''}:"]
    return [*filter(None, lines), *table(rows).splitlines()]


# What torch.distributed says where another process is gone: gloo (torch 2.13, each seen by killing one of two
# processes in all_reduce, all_gather, reduce_scatter, barrier, gather_object and broadcast_object_list), the store
# through which processes find each other, and NCCL.
GLOO_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "Application timeout caused pair closure",
)
DISTRIBUTED_ERRORS = (
    "Connection was likely closed",
    "failed to recv",
    "sendBytes failed",
    "recvValue failed",
    "wait timeout after",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "communicator was aborted",
    "collective operation timeout",
    "Timeout at NCCL work",
)


def explain_failure(error: Exception, run: "Run") -> int | None:
    """Tell of memory that ran out, and of a process that is gone. Returns the exit code; None: nothing is known."""
    phase, update = run.watchdog.at
    if find_exhausted_memory(error):
        frames = traceback.extract_tb(error.__traceback__)
        if phase == "forward" and any("cross_entropy" in frame.name for frame in frames):
            phase = "loss"
        print_last(escape_controls(f"\n{explain(error, phase, update, run)}"))
        return EXIT_OUT_OF_MEMORY
    if died_elsewhere(error):
        where = f"phase {phase} of update {update}" if update else f"phase {phase}"
        said = re.sub(r"^\[\S+\.cc:\d+\] ", "", first_line(error).split(". ")[0])  # a line of gloo's source
        cause = f"another process is gone ({said})"
        said = f"rank {run.strategy.layout.rank} leaves in {where}: {cause}"
        said = "\n  waiting  ".join([said, *run.watchdog.waits_for()])
        print(escape_controls(f"\n{said}"), file=sys.stderr, flush=True)
        return EXIT_FAILED  # whoever died first has the cause
    return None


def died_elsewhere(error: BaseException) -> bool:
    """Return True if an error, or what it came from, only tells that another process is gone, which has the cause."""
    texts = [str(each) for each in causes_of(error) if isinstance(each, RuntimeError)]
    return any(
        words in text
        for text in texts
        for words in (*DISTRIBUTED_ERRORS, *(GLOO_ERRORS if "gloo" in text.lower() else ()))
    )
