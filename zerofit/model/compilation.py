"""Compile a model's blocks: torch.compile of the model, or of each block by itself; and GELU as one kernel.

Blocks of one class share their code, and torch looks for a graph by code: the first block is compiled, the others run
its graph, so the time of compiling does not grow with depth. A graph is made for passes with and without gradients,
and again where an input changes its kind (no mask in place of a mask) or begins to change its shape.
"""

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.activations import GELUTanh, NewGELUActivation

from zerofit.compat.torch import compute_uncompiled_after_errors
from zerofit.compat.transformers import undivided_modules
from zerofit.model.float8 import without_float8
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GRAPHS = 64  # of the code that blocks share; torch computes without its compiler beyond its limit, which is 8


def fuse_gelu(model: Any) -> Any:
    """Compute a model's GELU in its tanh form ("gelu_new", of GPT-2 and its kin) in one kernel. Returns the model.
    transformers computes it in eight operations that keep five tensors of the widest layer for the backward pass.
    torch.nn.functional.gelu(approximate="tanh") is the same function (Hendrycks and Gimpel 2016), keeps its input
    alone, and differs by rounding."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, GELUTanh())
    return model


def compile_model(
    model: "PreTrainedModel", what: str, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False
) -> None:
    """Compile a model when it is called: its "blocks", or all of it ("model"). In place, so that weights keep their
    names and hooks that come later (FSDP2's) are called. `falls_back`: code that the compiler fails at is computed as
    it is, with torch's warning. Raises UserError where transformers knows of no blocks."""
    modules = [model] if what == "model" else blocks_of(model)
    if not modules:
        kind = model.config.model_type
        raise UserError(f"torch_compile = {what}: the code of a {kind} names no blocks. Use --torch_compile model")
    for module in modules:
        module.compile(backend=backend)
    torch.compiler.config.recompile_limit = GRAPHS
    compute_uncompiled_after_errors(falls_back)


def missing_compiler() -> str | None:
    """Return what torch's compiler lacks on this machine: Triton, or a C compiler for its launchers; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if shutil.which(os.environ.get("CC") or "cc") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler (gcc)"
    return None


def failing_compiler(device: torch.device, backend: str = "inductor") -> str | None:
    """Return why a function of one line cannot be compiled on a device; None if it can."""
    if missing := missing_compiler():
        return missing
    try:
        torch.compile(lambda values: values * 2 + 1, backend=backend)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, a driver or a file system raises
        return f"torch's compiler fails ({type(error).__name__}: {' '.join(str(error).split()[:20])})"
    return None


@contextmanager
def uncompiled() -> Iterator[None]:
    """The context of passes that are not worth a graph: checks before a run, and generation, whose lengths change.
    They are in bf16 where training is in float8."""
    with without_float8():
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's blocks: what transformers can recompute one at a time, else what it says is not to be split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    named = undivided_modules(model)
    return _outermost(model, lambda module: isinstance(module, GradientCheckpointingLayer)) or _outermost(
        model, lambda module: type(module).__name__ in named
    )


def _outermost(model: torch.nn.Module, is_one: Callable[[torch.nn.Module], bool]) -> list[torch.nn.Module]:
    """The modules below the model that are such ones, and are in no other."""
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if module is not model and is_one(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return list(found.values())


def ends_of(model: "PreTrainedModel") -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return ([the embedding], [the final norm, the head]) of a model that predicts tokens: what is gathered for
    itself, as torchtitan does, beside the blocks; empty where other modules share a weight of it, as tied ends do."""
    blocks, embedding, head = blocks_of(model), model.get_input_embeddings(), model.get_output_embeddings()
    if not blocks or head is None:
        return [], []
    sharers = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    own = [all(sharers[id(each)] == 1 for each in end.parameters()) for end in (embedding, head)]
    modules, within = list(model.modules()), set(head.modules())
    after = modules[modules.index([*blocks[-1].modules()][-1]) + 1 :]
    norms = [each for each in after if each not in within and any(True for _ in each.parameters(recurse=False))]
    first: list[torch.nn.Module] = [embedding] if own[0] and isinstance(embedding, torch.nn.Embedding) else []
    last = [*norms, head] if own[1] else []
    return first, last
