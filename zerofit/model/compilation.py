"""Faster blocks: compiled, with norms and GELU in one kernel each, or with products in float8.

Float8, through torchao, is for the products of the blocks' linear layers, forward and backward. Before each both
factors are rounded to 8 bits (e4m3; gradients e5m2), with one scale a tensor, by its largest element. Sums are in
fp32, results in bf16. Weights, gradients, the optimizer, checkpoints and exports are those of a run in bf16; so are
embeddings, norms, attention, routers and the head.

Source: Micikevicius et al. 2022, FP8 formats for deep learning; torchao.float8, recipe "tensorwise".

torch.compile is for the model, or for each block by itself. Blocks of one class share their code, and torch looks for
a graph by code: the first block is compiled, the others run its graph, so the time of compiling does not grow with
depth. A graph is made for passes with and without gradients, and again where an input changes its kind (no mask in
place of a mask) or begins to change its shape.

transformers writes the norm of Llama, and of some 140 other classes, as operations on single elements, in fp32. On
CUDA torch.nn.functional.rms_norm is one kernel forward, which keeps its input and a number for each row. On a CPU
torch computes it by the same operations in the same order: in fp32 the result and every gradient are the same to the
last bit.
"""

import importlib.util
import os
import shutil
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.nn import Linear
from torch.nn.functional import rms_norm
from transformers.activations import GELUTanh, NewGELUActivation

from zerofit.compat.torch import compute_uncompiled_after_errors, computed_as_linear
from zerofit.compat.transformers import undivided_modules
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zerofit.recipe.options import TrainingRecipe

FLOAT8_MULTIPLE = 16  # torch._scaled_mm needs widths that are multiples of it
MIN_FLOAT8_CAPABILITY = (8, 9)  # compute capability from which GPUs of NVIDIA multiply in float8
ROUTER_LAYERS = ("gate", "router")  # the names of linear layers that choose experts, or weigh them
FLOAT8_EMULATION = "ZEROFIT_EMULATES_FLOAT8"  # set by tests: round to float8, and multiply in fp32, on any device
_float8_layers: WeakSet[Linear] = WeakSet()


def is_emulated() -> bool:
    """Return whether products in float8 are emulated, for tests only: it is slow, and needs no GPU."""
    return os.environ.get(FLOAT8_EMULATION) == "1"


def check_float8(recipe: "TrainingRecipe") -> None:
    """Raises UserError where float8 is asked for and torchao is not installed."""
    if recipe.float8 and recipe.trains and importlib.util.find_spec("torchao") is None:
        raise UserError(f"float8 ({recipe.source('float8')}) needs torchao: pip install '.[float8]', or remove it")


def check_float8_device(recipe: "TrainingRecipe") -> None:
    """Raises UserError where float8 is asked for, and this process has no GPU that multiplies in float8."""
    if not (recipe.float8 and recipe.trains) or is_emulated():
        return
    needs = f"float8 ({recipe.source('float8')}) needs an NVIDIA GPU of compute capability 8.9 or more (L40S, H100)"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise UserError(f"{needs}, and there is none. Remove it")
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        if capability < MIN_FLOAT8_CAPABILITY:
            name = torch.cuda.get_device_name(number)
            raise UserError(f"{needs}, and a {name} has {capability[0]}.{capability[1]}. Remove it")


def convert_to_float8(model: "PreTrainedModel", blocks: list[torch.nn.Module]) -> str:
    """Let the linear layers of these blocks of a model multiply in float8, in place; parameters stay the same objects,
    and layers whose widths are not multiples of 16 stay in bf16. Returns a line for the log. Raises UserError where no
    layer can be converted."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inner = (each for block in blocks for each in block.named_modules())
    linear = [each for name, each in inner if type(each) is Linear and name.rpartition(".")[2] not in ROUTER_LAYERS]
    fitting = {each for each in linear if not any(width % FLOAT8_MULTIPLE for width in each.weight.shape)}
    if not fitting:
        why = f"no linear layer of its blocks has widths that divide by {FLOAT8_MULTIPLE}"
        why = why if linear else "its blocks have no torch.nn.Linear (those of GPT-2 have Conv1D)"
        raise UserError(f"float8: a {model.config.model_type} has nothing to compute in float8: {why}. Remove it")
    # Rows whose number does not divide by 16 are padded for the product that sums over them.
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=is_emulated(), pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: module in fitting)
    converted = (each for each in model.modules() if type(each).__module__.startswith("torchao."))
    _float8_layers.update(each for each in converted if isinstance(each, Linear))
    share = sum(each.weight.numel() for each in fitting) / sum(each.numel() for each in model.parameters())
    emulated = ", emulated" if is_emulated() else ""
    return f"float8 in {counted(len(fitting), 'linear layer')}, which have {share:.0%} of the weights{emulated}"


MAX_GRAPHS = 64  # graphs of the code that blocks share; beyond its limit, by default 8, torch runs code uncompiled


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
    model: "PreTrainedModel", scope: str, backend: str | Callable[..., Any] = "inductor", falls_back: bool = False
) -> None:
    """Compile a model when it is called: its "blocks", or all of it ("model"). This is done in place, so that weights
    keep their names and later hooks (FSDP2's) are called. `falls_back`: code that the compiler fails at runs
    uncompiled, with torch's warning. Raises UserError where transformers names no blocks of the model."""
    modules = [model] if scope == "model" else blocks_of(model)
    if not modules:
        kind = model.config.model_type
        raise UserError(f"torch_compile = {scope}: the code of a {kind} names no blocks. Use --torch_compile model")
    for module in modules:
        module.compile(backend=backend)
    torch.compiler.config.recompile_limit = MAX_GRAPHS
    compute_uncompiled_after_errors(falls_back)


def missing_compiler() -> str | None:
    """Return what torch's compiler lacks on this machine: Triton, or a C compiler for its launchers; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if shutil.which(os.environ.get("CC") or "cc") is None and not any(map(shutil.which, ("gcc", "clang"))):
        return "there is no C compiler (gcc)"
    return None


def failing_compiler(device: torch.device) -> str | None:
    """Return why a function of one line cannot be compiled on a device; None if it can."""
    if missing := missing_compiler():
        return missing
    try:
        torch.compile(lambda values: values * 2 + 1)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, a driver or a file system raises
        return f"torch's compiler fails ({type(error).__name__}: {' '.join(str(error).split()[:20])})"
    return None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run the passes within this context uncompiled, because a graph is not worth its time: checks before a run, and
    generation, whose lengths change. They are in bf16 where training is in float8: its one scale for all rows of a
    batch lets each row depend on the others, which hardly matters in training, and breaks a check that compares
    rows."""
    with computed_as_linear(list(_float8_layers)):
        if "torch._dynamo" not in sys.modules:  # then nothing is compiled
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's blocks, none within another: the layers that transformers can recompute one at a time, else
    the modules that it says are not to be split."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    undivided = undivided_modules(model)
    layers: dict[str, torch.nn.Module] = {}
    other_modules: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer)
        is_undivided = type(module).__name__ in undivided
        for outermost, belongs in ((layers, is_layer), (other_modules, is_undivided)):
            if belongs and module is not model and not any(name.startswith(f"{outer}.") for outer in outermost):
                outermost[name] = module
    return list((layers or other_modules).values())


def embedding_and_head_of(model: "PreTrainedModel") -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """Return ([the embedding], [the final norm, the head]) of a model that predicts tokens: the modules that are
    gathered separately from the blocks, as torchtitan does. A list is empty where other modules share a weight of it,
    such as tied embeddings."""
    blocks = blocks_of(model)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if not blocks or head is None:
        return [], []
    sharers = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    is_unshared = [all(sharers[id(each)] == 1 for each in end.parameters()) for end in (embedding, head)]
    modules = list(model.modules())
    within = set(head.modules())
    after = modules[modules.index([*blocks[-1].modules()][-1]) + 1 :]
    norms = [each for each in after if each not in within and any(True for _ in each.parameters(recurse=False))]
    first: list[torch.nn.Module] = [embedding] if is_unshared[0] and isinstance(embedding, torch.nn.Embedding) else []
    last = [*norms, head] if is_unshared[1] else []
    return first, last


NORM_DEVICES = {"cuda"}  # elsewhere torch has no kernel, and its operations keep more activations


def fuse_norms(model: torch.nn.Module) -> int:
    """Compute each RMSNorm of a model that is written as Llama's in one kernel. Returns their number. A norm with
    another forward pass is left as it is, such as Gemma's, which multiplies by 1 + weight."""
    norms = [module for module in model.modules() if is_llama_norm(module)]
    for module in norms:
        module.forward = types.MethodType(_fused_norm, module)
    return len(norms)


def is_llama_norm(module: torch.nn.Module) -> bool:
    """Return whether a module has the text of LlamaRMSNorm's forward pass, and its weight and `variance_epsilon`."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not hasattr(module, "variance_epsilon"):
        return False
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # it imports scipy, which takes a second

    code, llama = (getattr(each.forward, "__code__", None) for each in (type(module), LlamaRMSNorm))
    parts = ("co_code", "co_consts", "co_names", "co_varnames")
    return "forward" not in vars(module) and all(getattr(code, part, None) == getattr(llama, part) for part in parts)


def _fused_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The forward pass of a fused norm. The result has the dtype of transformers' norm; under autocast that of the
    products after it; each would cast it. torch's kernel needs input and weight in one dtype: the weight is
    cast as that of a product is."""
    weight = self.weight
    device = hidden_states.device.type
    epsilon = self.variance_epsilon
    is_cast = torch.is_autocast_enabled(device)
    if device not in NORM_DEVICES or (hidden_states.dtype != weight.dtype and not is_cast):
        return type(self).forward(self, hidden_states)
    if not is_cast:
        return rms_norm(hidden_states, weight.shape, weight, epsilon)
    with torch.autocast(device, enabled=False):
        normalized = rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), epsilon)
    return normalized.to(torch.get_autocast_dtype(device))


def round_embeddings(model: torch.nn.Module) -> None:
    """Round embeddings before the blocks, and with them the residual stream, to bf16 under autocast in bf16.
    Embeddings in fp32 would make every addition after them, and every sum of gradients in the backward pass, one in
    fp32. Where DeepSpeed or FSDP2 hold the weights of the passes in bf16, none of these is in fp32."""
    within = {module for block in blocks_of(model) for module in block.modules()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module not in within:
            module.register_forward_hook(_round_to_bf16)


def _round_to_bf16(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    device = output.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return output
    return output.bfloat16()
