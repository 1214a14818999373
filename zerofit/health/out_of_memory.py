"""The explanation of an error that ends a rank: memory that ran out, or another process that is gone.

A run out of memory ends with its own exit code, 87 (EXIT_OUT_OF_MEMORY), so that a scheduler can tell it from others.
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

# Messages that say that memory ran out. A pinned block that is refused is host memory, although the message is that of
# a device. Those of NCCL are from its checks.h and alloc.h.
PINNED_ERROR = r"pin[_ ]memory.{0,400}?(?:CUDA|HIP) error: out of memory"
HOST_PATTERN = re.compile(
    f"{PINNED_ERROR}|Failed to CUDA host alloc|DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|"
    "not enough memory: you tried to allocate|std::bad_alloc|bad allocation|unable to mmap|"
    "unable to allocate shared memory",
    re.DOTALL,
)
CUBLAS_ERROR = "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
DEVICE_PATTERN = re.compile(
    "(?:CUDA|HIP|XPU) out of memory|(?:CUDA|HIP) error: out of memory|MPS backend out of memory|"
    f"(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED|{CUBLAS_ERROR}|"
    r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA [cm]alloc"
)
SIZE_PATTERN = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
UNIT_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
REQUEST_PATTERN = re.compile(rf"(?:[Tt]ried|Unable) to allocate {SIZE_PATTERN}")  # torch's allocators; numpy


def find_exhausted_memory(error: BaseException) -> str | None:
    """Return the memory that ran out by an error or its causes: `device` or `host`; None: the error is another one."""
    for cause in causes_of(error):
        if type(cause).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return "host"
        frames = traceback.extract_tb(cause.__traceback__)  # whose last line shows whether memory is pinned there
        text = f"{frames[-1].line if frames else ''}\n{cause}"
        if isinstance(cause, RuntimeError) and (memory := exhausted_memory_in(text)):
            return memory
    return None


def exhausted_memory_in(text: str) -> str | None:
    """Return the memory that ran out by a text: `device` or `host`; None: the text does not say so."""
    if HOST_PATTERN.search(text):
        return "host"
    return "device" if DEVICE_PATTERN.search(text) else None


def causes_of(error: BaseException | None) -> list[BaseException]:
    """Return an error and the chain of its causes."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def requested_bytes(error: BaseException) -> int:
    """Return the bytes of the allocation that failed, from the error's message; 0: the message does not say it."""
    match = REQUEST_PATTERN.search("\n".join(map(str, causes_of(error))))
    return round(float(match[1]) * UNIT_BYTES[match[2]]) if match else 0


LENGTH_FLAGS = ("block_size", "max_length", "max_source_length", "max_target_length")
STATE_LABELS = ("weights", "gradients", "optimizer state")  # of the fields of StateBytes


def explain(error: BaseException, phase: str, update: int | None, run: "Run") -> str:
    """Return the report that is printed instead of a traceback. `phase`: load, prepare, forward, loss, backward,
    update, evaluate or save; for any other phase the report has only what holds for the host."""
    at = f"{phase} of update {update:,}" if update else phase
    try:
        shortage = measure(error, phase, run)
        launch = run.strategy.launch
        memory = "the device's memory" if shortage.on_host is False else "host memory"
        first = f"out of memory: rank {launch.rank} of {launch.world_size}, {at}, {memory} "
        lines = [f"{first}({run.strategy.name}, {run.strategy.precision})", *_amounts(error, shortage, run)]
        if remedies := find_remedies(shortage):
            rows = [
                f"  {f'about {size(remedy.saves)}':>12}  {remedy.option}  ({remedy.effect})" for remedy in remedies
            ]
            lines += ["what would help, by what it saves:", *rows, f"with a remedy added, {RESUME}"]
        elif shortage.on_host:
            lines += [f"what would help: {MEMORY_ADVICE}", f"then {RESUME}"]
        world_size = launch.world_size
        total = shortage.total
        words = ["zerofit", "plan", "--task", run.task, *run.recipe.flags_given(), "--num_gpus", str(world_size)]
        if world_size > shortage.local_processes:
            words += ["--gpus_per_node", str(shortage.local_processes)]
        if shortage.on_host is None:
            words += ["--gpu", "cpu"]
            total = total and total // shortage.local_processes
        elif shortage.on_host:
            words += ["--host_memory", f"{total >> 20}MiB"] if total else []
            total = torch.accelerator.get_memory_info()[1]
        command = shlex.join([*words, "--gpu_memory", f"{total >> 20}MiB" if total else "80GiB"])
        return "\n  ".join([*lines, "what else fits, predicted:", f"  {command}"])
    except Exception as problem:  # a device that has failed may not answer, and no memory is left
        return f"out of memory: {at}: {first_line(error)}\n  (the full report failed: {first_line(problem)})"


def measure(error: BaseException, phase: str, run: "Run") -> Shortage:
    """Measure how much of the memory that ran out this rank uses, and for what."""
    engine = run.engine
    recipe = run.recipe
    strategy = run.strategy
    on_cpu = engine.device.type == "cpu" if engine is not None else not torch.accelerator.is_available()
    on_host = None if on_cpu else find_exhausted_memory(error) != "device"
    setup = state_setup(strategy, recipe, run.parameters, engine)
    layers = logits = 0
    tokens = run.row_tokens or sum(getattr(recipe, name, None) or 0 for name in LENGTH_FLAGS)
    if engine is None:  # resident memory before the model was loaded is not an activation
        used = torch.accelerator.memory_allocated() if on_host is False else resident_bytes() - run.program_bytes
        states = StateBytes(max(0, min(used, setup.held(on_host).weights)))
        rest = max(0, used - states.weights)
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
        states = StateBytes(
            sizes["parameters"] if on_host in (None, setup.offloads >= 2) else 0,
            0 if on_host else sum(gradient.nbytes for gradient in engine.gradients()),
            sizes["optimizer"] if on_host in (None, setup.offloads >= 1) else 0,
        )
        peak = resident_bytes() if on_host else MemoryMeter(engine.device).peak_bytes()
        rest = max(0, peak - (run.program_bytes if on_host is None else 0) - sum(states))
    free = total = None
    with contextlib.suppress(Exception):  # after some errors the device does not answer
        free, total = torch.accelerator.get_memory_info() if on_host is False else host_memory()
    return Shortage(
        recipe=recipe,
        strategy=strategy,
        setup=setup,
        phase=phase,
        row_tokens=tokens,
        on_host=on_host,
        held=states,
        rest=rest + requested_bytes(error),
        layers=layers,
        logits=logits,
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        free=free,
        total=total,
        host_free=host_memory()[0],
    )


def _amounts(error: BaseException, shortage: Shortage, run: "Run") -> list[str]:
    """Return lines on how much was asked for and is free, and the table of what this rank holds."""
    amounts: list[str] = []
    if requested := requested_bytes(error):
        amounts.append(f"asked for {size(requested)}")
    if shortage.free is not None and shortage.total:
        amounts.append(f"{size(shortage.free)} of {size(shortage.total)} free")
    tokens = shortage.row_tokens
    batch = f" ({run.strategy.batches.micro_batch} rows" + (f" of up to {tokens:,} tokens)" if tokens else ")")
    rows: list[tuple[str, ...]] = []
    for label, held_bytes, expected_bytes in zip(STATE_LABELS, shortage.held, shortage.expected()):
        missing = f" (about {size(expected_bytes - held_bytes)} to come)" if held_bytes < 0.9 * expected_bytes else ""
        rows.append((label + missing, size(held_bytes)))
    rest = "the rest of the process" if shortage.on_host else "activations, logits and workspace"
    rows.append((f"{rest}, and the program" if shortage.on_host is None else rest, size(shortage.rest - requested)))
    lines = ["; ".join(amounts), f"held by this rank{batch if shortage.phase in ACTIVATION_PHASES else ''}:"]
    return [*filter(None, lines), *table(rows).splitlines()]


# Messages of torch.distributed about another process that is gone: of gloo (torch 2.13, each seen after one of two
# processes was killed in all_reduce, all_gather, reduce_scatter, barrier, gather_object or broadcast_object_list), of
# the rendezvous store, and of NCCL.
GLOO_PATTERN = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|Timed out waiting|"
    "Application timeout caused pair closure"
)
DISTRIBUTED_PATTERN = re.compile(
    "Connection was likely closed|failed to recv|sendBytes failed|recvValue failed|wait timeout after|"
    "remote process exited or there was a network error|ncclRemoteError|communicator was aborted|"
    "collective operation timeout|Timeout at NCCL work"
)


def explain_failure(error: Exception, run: "Run") -> int | None:
    """Print why a rank ends: memory ran out, or another process is gone. Returns the exit code; None: the error is
    another one, and nothing is printed."""
    phase, update = run.watchdog.at
    if find_exhausted_memory(error):
        frames = traceback.extract_tb(error.__traceback__)
        if phase == "forward" and any("cross_entropy" in frame.name for frame in frames):
            phase = "loss"
        print_last(escape_controls(f"\n{explain(error, phase, update, run)}"))
        return EXIT_OUT_OF_MEMORY
    if died_elsewhere(error):
        where = f"phase {phase} of update {update}" if update else f"phase {phase}"
        cause = re.sub(r"^\[\S+\.cc:\d+\] ", "", first_line(error).split(". ")[0])  # without the line of gloo's source
        line = f"rank {run.strategy.layout.rank} leaves in {where}: another process is gone ({cause})"
        message = "\n  waiting  ".join([line, *run.watchdog.waits_for()])
        print(escape_controls(f"\n{message}"), file=sys.stderr, flush=True)
        return EXIT_FAILED  # the process that died first has reported the cause
    return None


def died_elsewhere(error: BaseException) -> bool:
    """Return True if an error or one of its causes only says that another process, which has the cause, is gone."""
    texts = [str(cause) for cause in causes_of(error) if isinstance(cause, RuntimeError)]
    return any(
        DISTRIBUTED_PATTERN.search(text) or ("gloo" in text.lower() and GLOO_PATTERN.search(text)) for text in texts
    )
