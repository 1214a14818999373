"""Memory that ran out, explained: how much was asked for, what held the rest, and what would save how much.

The run ends with exit code 87 (EXIT_OUT_OF_MEMORY), so that whoever starts runs can tell it from other failures.
"""

import contextlib
import errno
import os
import re
import sys
import traceback

from zerofit.health.out_of_memory_message import about_the_model, report
from zerofit.health.remedies import Held, Situation, remedies
from zerofit.model.parameters import true_numel
from zerofit.recipe.errors import UserError, first_line
from zerofit.strategy.host_memory import GIB, field, host_memory, read

EXIT_OUT_OF_MEMORY = 87
# What says that memory ran out. A pinned block that is refused is host memory, in the words of a device's. NCCL's
# words are those of its checks.h and alloc.h.
PINNED = r"pin[_ ]memory.{0,400}?(?:CUDA|HIP) error: out of memory"
OF_HOST = re.compile("|".join((
    PINNED, "Failed to CUDA host alloc", "DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory",
    "not enough memory: you tried to allocate", r"std::bad_alloc", "bad allocation", "unable to mmap",
    "unable to allocate shared memory")), re.DOTALL)  # fmt: skip
NO_HANDLE = "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate"
OF_DEVICE = re.compile("|".join((
    "(?:CUDA|HIP|XPU) out of memory", "(?:CUDA|HIP) error: out of memory", "MPS backend out of memory",
    "(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED", NO_HANDLE, r"Cuda failure (?:\d+ )?'out of memory'",
    r"Failed to CUDA [cm]alloc")))  # fmt: skip
# What an optimizer keeps of a weight, in weights of fp32; Adafactor's means of rows and columns are next to nothing.
MOMENTS = {"adamw": 2, "adamw_8bit": 0.5, "adafactor": 0}
LENGTHS = ("block_size", "max_length", "max_source_length", "max_target_length")
SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB)"
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
PATTERNS = {  # torch's CUDA allocator, its CPU allocator, numpy
    "asked": (rf"[Tt]ried to allocate {SIZE}", rf"Unable to allocate {SIZE}"),
    "total": (rf"total capacity of {SIZE}",),
    "free": (rf"of which {SIZE} is free",),
    "in_use": (rf"this process has {SIZE} memory in use",),
    "unused": (rf"{SIZE} is reserved by PyTorch but unallocated",),
}


def is_out_of_memory(error: BaseException) -> str | None:
    """`device` or `host` if an error, or what it came from, says that memory ran out there; else None."""
    for one in _chain(error):
        if type(one).__name__ == "OutOfMemoryError":
            return "device"
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return "host"
        if isinstance(one, RuntimeError) and (where := memory_in(_with_its_line(one))):
            return where
    return None


def memory_in(text: str) -> str | None:
    """`device` or `host`, if a text says that memory ran out there; else None."""
    if OF_HOST.search(text):
        return "host"
    return "device" if OF_DEVICE.search(text) else None


def _with_its_line(error: BaseException) -> str:
    """The error's text, after the line of the program that it came from: that line knows of pinned memory."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line if frames else ''}\n{error}"


def _chain(error: BaseException | None) -> list[BaseException]:
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def figures_of(error: BaseException) -> dict[str, int]:
    """What the message of the error says, in bytes: asked, total, free, in_use, unused; only what is there."""
    text = "\n".join(str(one) for one in _chain(error))
    figures = {}
    for name, patterns in PATTERNS.items():
        match = next(filter(None, (re.search(pattern, text) for pattern in patterns)), None)
        if match:
            figures[name] = round(float(match[1]) * UNITS[match[2]])
    return figures


# ----------------------------------------------------------------------------------------------------------- measuring


def explain(
    error: BaseException, *, phase: str, update: int | None, recipe, strategy, engine=None,
    row_tokens: int | None = None, **more,
) -> str:  # fmt: skip
    """What is said instead of a traceback. See `take_stock` for the arguments."""
    try:
        return report(take_stock(error, phase, update, recipe, strategy, engine, row_tokens, **more))
    except Exception as problem:  # a device that has failed may answer nothing any more, and there is no memory left
        at = f"{phase} of update {update}" if update else phase
        return f"out of memory: {at}: {first_line(error)}\n  (no more can be said of it: {first_line(problem)})"


def host_advice(recipe, strategy, engine=None, row_tokens: int | None = None, **more) -> list[str]:
    """What a rank's watchdog is to propose, should the rank be killed for want of host memory (Watchdog.advise)."""
    phase = "backward" if engine is not None else "load"
    situation = take_stock(MemoryError(), phase, None, recipe, strategy, engine, row_tokens, **more)
    model = [f"model    {line}" for line in about_the_model(situation)]
    return [*model, *(f"{remedy.option}: {remedy.what}" for remedy in remedies(situation)[:5])]


def take_stock(
    error, phase, update, recipe, strategy, engine=None, row_tokens=None, program_bytes=0, parameters=0, copied=0
) -> Situation:
    """Everything that the report and its remedies are made of.

    Args:
        phase: load, prepare, forward, loss, backward, update, evaluate or save; of any other, only what holds for the
            host.
        engine: where it exists by now; without it weights and optimizer are known by the number of parameters.
        row_tokens: tokens of a training row; by default what the recipe's options of length say.
        program_bytes: resident memory of the host before the model was loaded, which is no activation.
        parameters: of the whole model, where it is known by now.
        copied: bytes of the copies that checkpoints are written from, where there are any.
    """
    figures, where = figures_of(error), is_out_of_memory(error) or "host"
    on_cpu = engine.device.type == "cpu" if engine is not None else not _has_device()
    lengths = {name: getattr(recipe, name) for name in LENGTHS if hasattr(recipe, name)}
    lengths = {name: value or row_tokens for name, value in lengths.items() if value or row_tokens}
    row_tokens = row_tokens or sum(lengths.values()) or None
    zero = (strategy.deepspeed or {}).get("zero_optimization", {})
    offloads = {part: (zero.get(f"offload_{part}") or {}).get("device", "none") != "none"
                for part in ("optimizer", "param")}  # fmt: skip
    batches, launch = strategy.batches, strategy.launch
    here = _what_is_here(where, on_cpu, offloads)
    if engine is not None:
        held, due = _held(engine, recipe.optim, here, program_bytes)
    else:
        held, due = _on_the_way(sizes_of(strategy, recipe, parameters), here, where, strategy, program_bytes)
    free, total = _room(where, figures)
    return Situation(
        where=where, phase=phase, on_cpu=on_cpu, rank=launch.rank, update=update, world_size=launch.world_size,
        local_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), asked=figures.get("asked"), free=free,
        total=total, host_free=host_memory()[0], others=_others(figures), unused=figures.get("unused"),
        process_limit=_process_limit() if where == "host" else None,
        held=held, due=due, stage=strategy.stage, offload_optimizer=offloads["optimizer"],
        offload_parameters=offloads["param"], strategy=strategy.name, precision=strategy.precision,
        micro_batch=batches.micro_batch, accumulation=batches.accumulation,
        global_batch_is_set=recipe.global_batch_size is not None, eval_batch=recipe.per_device_eval_batch_size,
        beams=getattr(recipe, "num_beams", None) or 1, generates=getattr(recipe, "predict_with_generate", False),
        row_tokens=row_tokens, lengths=lengths, gradient_checkpointing=recipe.gradient_checkpointing,
        can_offload_inputs=not (recipe.activation_offload or recipe.torch_compile),
        lora=recipe.lora, optim=recipe.optim, quantised=recipe.quantised is not None, tensor=strategy.tensor,
        sequence=strategy.layout.sequence, pipeline=strategy.layout.pipeline,
        **_can_be_shared(engine, recipe, any(offloads.values()) or strategy.layout.pipeline > 1),
        pretrained=bool(recipe.model_name_or_path) and strategy.layout.model_size == 1,
        dataloader_workers=recipe.dataloader_num_workers,
        copies=_copies(recipe, copied), parameters=parameters,
        element=_element(strategy, recipe), keeps_fp32=strategy.deepspeed is None, is_sure=NO_HANDLE not in str(error),
        **_of_model(engine, strategy, recipe, row_tokens or 0),
    )  # fmt: skip


def _has_device() -> bool:
    torch = sys.modules.get("torch")  # not imported yet: memory ran out before
    return torch is not None and torch.accelerator.is_available()


def _what_is_here(where: str, on_cpu: bool, offloads: dict[str, bool]) -> Held:
    """1 for each part that lies on the memory that ran out, else 0; `rest`: for what is computed there."""
    of_model = on_cpu or where == "device"
    weights = on_cpu or (where == "host") == offloads["param"]
    optimizer = on_cpu or (where == "host") == offloads["optimizer"]
    return Held(int(weights), int(of_model), int(optimizer), int(of_model))


def _held(engine, optim: str, here: Held, program_bytes: int) -> tuple[Held, Held]:
    """(what this rank holds on the memory that ran out, what gradients and optimizer come to after an update)."""
    from zerofit.record.meters import MemoryMeter

    sizes, (gradients_due, optimizer_due) = engine.held_bytes(), _due(engine, optim)
    gradients = here.gradients * _gradients(engine)
    weights, optimizer = here.weights * sizes["parameters"], here.optimizer * sizes["optimizer"]
    peak = MemoryMeter(engine.device).peak_bytes() if here.rest else resident_bytes()
    if engine.device.type == "cpu":  # a device's allocator knows nothing of the program
        peak -= program_bytes
    held = Held(weights, gradients, optimizer, max(0, peak - weights - gradients - optimizer))
    return held, Held(gradients=here.gradients * gradients_due, optimizer=here.optimizer * optimizer_due)


def _on_the_way(sizes: Held, here: Held, where: str, strategy, program_bytes: int) -> tuple[Held, Held]:
    """The same while the model is loaded and prepared: what is there by now is known in all only."""
    taken, before = resident_bytes(), program_bytes
    if where == "device":
        import torch

        taken, before = torch.accelerator.memory_allocated(), 0
    weights = min(max(0, taken - before), here.weights * sizes.weights)
    due = Held(here.weights * sizes.weights, here.gradients * sizes.gradients, here.optimizer * sizes.optimizer)
    return Held(weights, rest=taken - weights) if sizes.weights else Held(), due


def _element(strategy, recipe) -> int:
    """Bytes of a weight as it is loaded."""
    half = strategy.precision != "fp32" and (strategy.deepspeed is not None or recipe.lora)
    return 2 if half else 4


def sizes_of(strategy, recipe, parameters: int) -> Held:
    """Weights, gradients and optimizer state of a rank, in bytes, by the number of the model's parameters. An adapter,
    which is small, is not counted."""
    quantised = {"load_in_4bit": 0.5, "load_in_8bit": 1.0}.get(recipe.quantised)
    stage, ranks = strategy.stage, strategy.layout.shard_size
    parameters //= strategy.layout.model_size
    trained = 0 if recipe.lora else parameters
    element = _element(strategy, recipe)
    weights = int(parameters * (quantised or element)) // (ranks if stage == 3 else 1)
    gradients = trained * element // (ranks if stage > 1 else 1)
    state = MOMENTS[recipe.optim] * element if strategy.deepspeed is None else 3 * 4
    return Held(weights, gradients, int(state * trained) // (ranks if stage else 1))


def _gradients(engine) -> int:
    """Bytes of this rank's gradients. Under DDP they are views of its buckets, which are there from the beginning."""
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(engine.model, DistributedDataParallel):
        return sum(parameter.nbytes for parameter in engine.module.parameters() if parameter.requires_grad)
    return sum(gradient.nbytes for gradient in engine.gradients())


def _due(engine, optim: str) -> tuple[int, int]:
    """(gradients, optimizer state) of this rank after an update, in bytes: gradients and moments; under DeepSpeed
    moments and a copy of the weights in fp32; sharded as the stage says."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    count = sum(map(true_numel, trained)) // engine.layout.tensor
    element = max((parameter.element_size() for parameter in trained), default=0)
    strategy, ranks = engine.strategy, engine.layout.shard_size
    state = MOMENTS[optim] * element if strategy.deepspeed is None else 3 * 4
    optimizer = int(state * count) // (ranks if strategy.stage else 1)
    return count * element // (ranks if strategy.stage > 1 else 1), optimizer


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    return (field(read("/proc/self/status"), "VmRSS:", 1024)) or 0


def _room(where: str, figures: dict[str, int]) -> tuple[int | None, int | None]:
    """(free, total) of the memory that ran out: the error's own words, else what the machine says now."""
    if "free" in figures:
        return figures["free"], figures.get("total")
    if where == "device":
        with contextlib.suppress(Exception):  # after some errors the device answers no more
            import torch

            return torch.accelerator.get_memory_info()
        return None, None
    return host_memory()


def _others(figures: dict[str, int]) -> int | None:
    if not {"total", "free", "in_use"} <= figures.keys():
        return None
    return max(0, figures["total"] - figures["free"] - figures["in_use"])


def _process_limit() -> int | None:
    with contextlib.suppress(ImportError, OSError):
        import resource

        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)
    return None


def _copies(recipe, copied: int) -> dict[str, int]:
    import psutil

    copies = {"save_async": copied}
    if recipe.dataloader_num_workers:
        with contextlib.suppress(psutil.Error):
            copies["dataloader_num_workers"] = sum(child.memory_info().rss for child in psutil.Process().children())
    return {name: size for name, size in copies.items() if size}


def _can_be_shared(engine, recipe, beside: bool) -> dict[str, bool]:
    """Whether two processes can share the model's layers, and split its rows; not `beside` what is in force."""
    from zerofit.model.configuration import load_configuration
    from zerofit.model.tensor_parallel.split import check_split
    from zerofit.recipe.tasks import ClmRecipe
    from zerofit.strategy.degrees import MASKS_ONLY
    from zerofit.strategy.sequence import check_model

    if not isinstance(recipe, ClmRecipe) or recipe.lora or recipe.torch_compile or beside:
        return {}
    with contextlib.suppress(Exception):  # before there is a model, its configuration may be out of reach
        config = engine.module.config if engine is not None else load_configuration(recipe)
        return {
            "can_share_layers": recipe.loss != "liger" and _passes(check_split, config),
            "can_split_rows": recipe.attn_implementation not in MASKS_ONLY and _passes(check_model, config),
        }
    return {}


def _passes(check, config) -> bool:
    try:
        check(config.get_text_config(), 2, "")
    except UserError:
        return False
    return True


def _of_model(engine, strategy, recipe, row_tokens: int) -> dict[str, int | bool]:
    """Sizes that follow from the model's configuration."""
    if engine is None:
        return {}
    from zerofit.model.loss import has_separate_body

    config = engine.module.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    layers += getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", 0))
    element = 4 if strategy.precision == "fp32" else 2
    rows = strategy.batches.micro_batch
    full = getattr(engine.module, "loss_kind", None) == "full"
    targets = getattr(recipe, "max_target_length", None) or row_tokens
    return {
        "layers": layers,
        "layer_inputs": rows * row_tokens * config.hidden_size * element * layers,
        "logits": rows * targets * config.vocab_size * (4 + element) if full else 0,
        "can_chunk": full and has_separate_body(engine.module),
    }
