"""The out-of-memory report: where, how much was asked for, what is free, what held the rest, and what would help."""

import contextlib
import os
import shlex
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from zerofit.estimate.remedies import (
    WORKING,
    PassSizes,
    RankStates,
    Remedy,
    Shortage,
    StateSetup,
    remedies,
    state_setup,
)
from zerofit.health.out_of_memory_errors import NO_HANDLE, figures_of, is_out_of_memory
from zerofit.health.watchdog_process import RESUME
from zerofit.recipe.errors import first_line
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.meters import MemoryMeter
from zerofit.record.terminal import size, table
from zerofit.strategy.engine import Engine
from zerofit.strategy.host_memory import host_memory, resident_bytes
from zerofit.strategy.strategy import Strategy

LENGTHS = ("block_size", "max_length", "max_source_length", "max_target_length")


@dataclass
class RunFacts:
    """What the report is made of, as far as it is known by now.

    Args:
        row_tokens: of a training row; None: what the recipe's options of length say.
        program_bytes: resident memory of the host before the model was loaded, which is no activation.
        parameters: of the whole model.
        copied: bytes of the copies that checkpoints are written from.
    """

    strategy: Strategy
    engine: Engine | None = None
    row_tokens: int | None = None
    program_bytes: int = 0
    parameters: int = 0
    copied: int = 0


def explain(
    error: BaseException, phase: str, update: int | None, task: str, recipe: TaskRecipe, facts: RunFacts
) -> str:
    """What is said instead of a traceback.

    Args:
        phase: load, prepare, forward, loss, backward, update, evaluate or save; of any other, only what holds for the
            host.
    """
    at = f"{phase} of update {update:,}" if update else phase
    try:
        return _report(error, phase, at, task, recipe, facts)
    except Exception as problem:  # a device that has failed may answer nothing any more, and there is no memory left
        said = first_line(error) if isinstance(error, Exception) else str(error)
        return f"out of memory: {at}: {said}\n  (no more can be said of it: {first_line(problem)})"


def host_advice(recipe: TaskRecipe, facts: RunFacts) -> list[str]:
    """What a rank's watchdog is to propose, should the rank be killed for host memory (Watchdog.advise)."""
    found = take_stock(MemoryError(), "backward" if facts.engine is not None else "load", recipe, facts)
    model = [f"model    {line}" for line in found.about_the_model()]
    return [*model, *(f"{remedy.option}: {remedy.what}" for remedy in found.remedies)]


@dataclass(frozen=True)
class Stock:
    """What this rank holds of the memory that ran out, in bytes.

    Args:
        held: model states that are there now.
        expected: model states once they are all there.
        rest: activations, logits, workspace: the peak without the above.
        free, total: None: not known.
    """

    shortage: Shortage
    held: RankStates
    expected: RankStates
    rest: int
    parameters: int
    free: int | None
    total: int | None
    process_limit: int | None

    @property
    def remedies(self) -> list[Remedy]:
        return remedies(self.shortage)

    @property
    def limit(self) -> int | None:
        """What this rank may have of the memory that ran out."""
        sharers = self.shortage.local_processes if self.shortage.on_host else 1
        return min(filter(None, (self.total and self.total // sharers, self.process_limit)), default=None)

    def about_the_model(self) -> list[str]:
        """The model's size against the limit."""
        if not self.parameters:
            return []
        text = (
            f"the model has {self.parameters:,} parameters: of each rank {size(self.expected.weights)} of weights, "
            f"{size(self.expected.total)} with gradients and optimizer state"
        )
        if self.limit:
            beyond = self.expected.total - self.limit
            fits = f"exceeds the limit by {size(beyond)}" if beyond > 0 else "activations come on top"
            text += f", of the {size(self.limit)} that it may have ({fits})"
        return [text]

    def rows(self, phase: str) -> list[tuple[str, str]]:
        """The table of what is held."""
        if phase == "load":
            loaded = f"weights, so far (about {size(self.expected.weights)} once loaded)"
            return [(loaded, size(self.held.weights)), ("the rest of the process", size(self.rest))]
        rows = []
        for name, label in (("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer state")):
            held, due = getattr(self.held, name), getattr(self.expected, name)
            rows.append((label if held or not due else f"{label} (none now; about {size(due)} to come)", size(held)))
        rest = "the rest of the process" if self.shortage.on_host else "activations, logits and workspace"
        return [*rows, ("activations, logits, workspace, program" if self.shortage.on_cpu else rest, size(self.rest))]


def take_stock(error: BaseException, phase: str, recipe: TaskRecipe, facts: RunFacts) -> Stock:
    """Look at what there is."""
    figures, strategy, engine = figures_of(error), facts.strategy, facts.engine
    on_host = is_out_of_memory(error) != "device"
    on_cpu = engine.device.type == "cpu" if engine is not None else not torch.accelerator.is_available()
    setup = state_setup(strategy, recipe, facts.parameters, engine)
    expected = setup.states if on_cpu else setup.held(on_host)
    if engine is None:
        taken = resident_bytes() - facts.program_bytes if on_host else torch.accelerator.memory_allocated()
        held = RankStates(min(max(0, taken), expected.weights))
        rest = (taken + facts.program_bytes * on_host - held.weights) * bool(expected.weights)
    else:
        held, rest = _held(engine, setup, on_host, on_cpu, facts.program_bytes)
    free, total = _room(on_host, figures)
    shortage = Shortage(
        recipe,
        strategy,
        setup,
        phase,
        on_host,
        on_cpu,
        rest + figures.get("asked", 0),
        _pass_sizes(engine, strategy, recipe, facts.row_tokens),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        host_memory()[0],
        figures.get("unused", 0),
        facts.copied,
    )
    limit = _process_limit() if on_host else None
    return Stock(shortage, held, expected, rest, facts.parameters, free, total, limit)


def _report(error: BaseException, phase: str, at: str, task: str, recipe: TaskRecipe, facts: RunFacts) -> str:
    found, strategy, figures = take_stock(error, phase, recipe, facts), facts.strategy, figures_of(error)
    memory = "host memory" if found.shortage.on_host else "the device's memory"
    launch = strategy.launch
    lines = [
        f"out of memory: rank {launch.rank} of {launch.world_size}, {at}, {memory} "
        f"({strategy.name}, {strategy.precision})"
    ]
    if NO_HANDLE in str(error):
        lines.append("  cuBLAS could not be started: usually because memory ran out, but not always")
    lines += [f"  {line}" for line in (*_amounts(found, figures), *found.about_the_model())]
    if found.held.total + found.rest:
        held: list[tuple[str, ...]] = [*found.rows(phase)]
        rows = table(held).splitlines()
        lines += [f"  held by this rank{_of_batch(phase, recipe, facts)}:", *(f"  {line}" for line in rows)]
    if helpful := found.remedies:
        lines.append("  what would help, by what it saves:")
        shown = [f"about {size(remedy.saves)}" if remedy.saves else "unknown" for remedy in helpful]
        width = max(map(len, shown))
        lines += [f"    {saved:>{width}}  {remedy.option}  ({remedy.what})" for saved, remedy in zip(shown, helpful)]
        lines.append(f"  with a remedy added, {RESUME}")
    return "\n".join([*lines, "  what else fits, predicted:", f"    {plan_command(task, recipe, found)}"])


def plan_command(task: str, recipe: TaskRecipe, found: Stock) -> str:
    """`zerofit plan` for this run on these devices."""
    shortage, world_size = found.shortage, found.shortage.strategy.launch.world_size
    words = ["zerofit", "plan", "--task", task, *recipe.flags_given(), "--num_gpus", str(world_size)]
    if world_size > shortage.local_processes:
        words += ["--gpus_per_node", str(shortage.local_processes)]
    memory = found.limit
    if shortage.on_cpu:
        words += ["--gpu", "cpu"]
    elif shortage.on_host:
        words += ["--host_memory", f"{found.total >> 20}MiB"] if found.total else []
        memory = torch.accelerator.get_memory_info()[1]
    return shlex.join([*words, "--gpu_memory", f"{memory >> 20}MiB" if memory else "80GiB"])


def _amounts(found: Stock, figures: dict[str, int]) -> list[str]:
    parts = [f"asked for {size(figures['asked'])}"] if "asked" in figures else []
    if found.free is not None and found.total:
        parts.append(f"{size(found.free)} of {size(found.total)} free")
    if {"total", "free", "in_use"} <= figures.keys():
        others = figures["total"] - figures["free"] - figures["in_use"]
        parts += [f"other processes hold {size(others)}"] if others > 0.01 * figures["total"] else []
    if found.process_limit:
        parts.append(f"a process may have {size(found.process_limit)} here (ulimit)")
    return ["; ".join(parts)] if parts else []


def _of_batch(phase: str, recipe: TaskRecipe, facts: RunFacts) -> str:
    if phase not in WORKING:
        return ""
    tokens = _row_tokens(recipe, facts.row_tokens)
    return f" ({facts.strategy.batches.micro_batch} rows" + (f" of up to {tokens:,} tokens)" if tokens else ")")


def _row_tokens(recipe: TaskRecipe, known: int | None) -> int:
    return known or sum(getattr(recipe, name, None) or 0 for name in LENGTHS)


def _held(
    engine: Engine, setup: StateSetup, on_host: bool, on_cpu: bool, program_bytes: int
) -> tuple[RankStates, int]:
    """(model states on the memory that ran out, the peak without them)."""
    sizes, of_model = engine.held_bytes(), on_cpu or not on_host
    held = RankStates(sizes["parameters"], _gradients(engine), sizes["optimizer"])
    if not on_cpu:
        offloads = setup.offloads_optimizer, setup.offloads_weights
        held = RankStates(
            held.weights * (on_host == offloads[1]),
            held.gradients * of_model,
            held.optimizer * (on_host == offloads[0]),
        )
    peak = MemoryMeter(engine.device).peak_bytes() if of_model else resident_bytes()
    return held, max(0, peak - program_bytes * on_cpu - held.total)


def _gradients(engine: Engine) -> int:
    """Bytes of this rank's gradients. Under DDP they are views of its buckets, which are there from the beginning."""
    if isinstance(engine.model, DistributedDataParallel):
        return sum(parameter.nbytes for parameter in engine.module.parameters() if parameter.requires_grad)
    return sum(gradient.nbytes for gradient in engine.gradients())


def _room(on_host: bool, figures: dict[str, int]) -> tuple[int | None, int | None]:
    """(free, total) of the memory that ran out: the error's own words, else what the machine says now."""
    if "free" in figures:
        return figures["free"], figures.get("total")
    if on_host:
        return host_memory()
    with contextlib.suppress(Exception):  # after some errors the device answers no more
        return torch.accelerator.get_memory_info()
    return None, None


def _process_limit() -> int | None:
    with contextlib.suppress(ImportError, OSError):
        import resource  # not on Windows

        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
        return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)
    return None


def _pass_sizes(engine: Engine | None, strategy: Strategy, recipe: TaskRecipe, row_tokens: int | None) -> PassSizes:
    if engine is None:
        return PassSizes()
    config, tokens = engine.module.config.get_text_config(), _row_tokens(recipe, row_tokens)
    layers = getattr(config, "num_hidden_layers", 0)
    layers += getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", 0))
    element, rows = (4 if strategy.precision == "fp32" else 2), strategy.batches.micro_batch
    rows *= 2 if getattr(recipe, "preference_loss", None) else 1
    full = getattr(engine.module, "loss_kind", None) == "full"
    targets = getattr(recipe, "max_target_length", None) or tokens
    logits = rows * targets * config.vocab_size * (4 + element) if full else 0
    inputs = rows * tokens * config.hidden_size * element * layers
    return PassSizes(layers, inputs, logits, full and engine.module.base_model is not engine.module)
