"""The recipe's optimizer: AdamW, Muon (muon.py), or one with a smaller state, and its state in checkpoints.

Adafactor is transformers': its learning rate is absolute, as AdamW's and the schedule's is. In torch's Adafactor it is
relative to the size of each weight. 8-bit AdamW is bitsandbytes' (blocks of 256 elements, each with a scale).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DummyOptim
from torch.optim.lr_scheduler import LambdaLR

from zerofit.model.parameters import decay_groups, layer_groups
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OptimizerOptions, Schedule
from zerofit.strategy.devices import has_fused_adamw
from zerofit.strategy.muon import Muon
from zerofit.strategy.state import ReadWhole, ReplicatedState

if TYPE_CHECKING:
    from zerofit.strategy.strategy import Strategy

# {optim: the tensors of its state for a parameter, besides the count of steps}. AdamW's have the parameter's shape.
STATE_TENSORS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw_8bit": ("state1", "state2", "absmax1", "absmax2"),
    "muon": ("exp_avg",),  # for matrices; for others AdamW's
    "adafactor": ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col"),
}
# Optimizers of torch and others, by name, that compute with whole matrices or with all weights at once.
UNSHARDABLE = ("Adafactor", "LAMB", "Lamb", "LARS", "LBFGS", "Muon", "Shampoo", "SOAP")
SHARDABLE = ("adamw", "muon")  # their state has the parameter's shape, so it can be sharded with it
# bitsandbytes/optim/optimizer.py: init_state, min_8bit_size
BLOCK_ELEMENTS = 256
MIN_8_BIT_ELEMENTS = 4096


def make_optimizer(
    model: torch.nn.Module, recipe: OptimizerOptions, device: torch.device, strategy: "Strategy | None" = None
) -> Any:
    """Return the optimizer that `optim` names, over the model's trainable parameters; accelerate's DummyOptim if the
    strategy's DeepSpeed JSON has an `optimizer` block, which DeepSpeed then makes; None if nothing is trained.
    `device`: where the weights will be: only some devices have a fused step."""
    if not recipe.trains:
        return None
    if recipe.optim == "muon":  # it replaces a block that names AdamW
        return Muon(model, recipe, has_fused_adamw(device))
    groups = parameter_groups(model, recipe)
    rate = recipe.learning_rate
    if strategy is not None and "optimizer" in (strategy.deepspeed or {}):
        return DummyOptim(groups, lr=rate, weight_decay=recipe.weight_decay)
    of_adam: dict[str, Any] = {"lr": rate, "betas": (recipe.adam_beta1, recipe.adam_beta2), "eps": recipe.adam_epsilon}
    if recipe.optim == "adamw":
        return torch.optim.AdamW(groups, **of_adam, fused=has_fused_adamw(device) or None)
    if recipe.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **of_adam)
    if recipe.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
    raise NotImplementedError(recipe.optim)


def parameter_groups(model: torch.nn.Module, recipe: OptimizerOptions) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers but Muon, in the same order under every strategy."""
    layer_decay = getattr(recipe, "layer_decay", 1.0)  # an option of cls
    if layer_decay == 1:
        return decay_groups(model.parameters(), recipe.weight_decay)
    return layer_groups(model, recipe.weight_decay, layer_decay)


def check_own(optimizer: Any, strategy: "Strategy") -> None:
    """Check the optimizer that a script made. Raises UserError: it is a list, or the strategy shards the matrices that
    it needs in full."""
    if isinstance(optimizer, (list, tuple)):
        raise UserError("the optimizer is several: give one over all weights, whose groups differ by their lr")
    shards = strategy.deepspeed is not None or strategy.fully_shards
    if shards and type(optimizer).__name__ in UNSHARDABLE and not isinstance(optimizer, Muon):
        raise UserError(
            f"{type(optimizer).__name__} needs each matrix in full, and {strategy.source} shards them. Use --strategy "
            "ddp, or one process; or an optimizer that works element by element, such as AdamW"
        )


def rates_of(scheduler: LambdaLR) -> Callable[[int], float]:
    """Return the learning rate of each update, counted from 0, that a scheduler of transformers' `get_scheduler` sets:
    its optimizer's `lr` times its factor."""
    if any(factor is not scheduler.lr_lambdas[0] for factor in scheduler.lr_lambdas):
        raise UserError("the schedule has a factor for each group: give one factor, and the groups an lr of their own")
    peak = float(scheduler.optimizer.defaults["lr"])
    return lambda update: peak * scheduler.lr_lambdas[0](update)


def keep_group_rates(optimizer: torch.optim.Optimizer, recipe: OptimizerOptions, schedule: Any) -> str | None:
    """Let groups with an `lr` of their own keep it in proportion (by `lr_scale`), since a schedule sets all rates.
    Returns a warning if the optimizer's own `lr` is not the rate of the recipe's schedule."""
    common = float(optimizer.defaults.get("lr", 0.0))
    peak = recipe.learning_rate
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]  # a scheduler changes lr
    base = common if common in rates else peak
    for group, rate in zip(optimizer.param_groups, rates):
        if base and rate != base:
            group.setdefault("lr_scale", rate / base)
    if base == peak or not isinstance(schedule, Schedule):
        return None
    return f"warning: the optimizer's lr = {base:g} is not used: the schedule follows learning_rate = {peak:g}"


def check_kept(optimizer: torch.optim.Optimizer | None) -> None:
    """Check, after a step, the state of an optimizer that a script has chosen. Raises UserError: it is not the two
    moments of AdamW, which checkpoints have."""
    if optimizer is None:
        return
    kept = {name for state in optimizer.state.values() for name in state} - {"step", "ema"}  # ema: of state.py
    moments = set(STATE_TENSORS["adamw"])
    name = type(optimizer).__name__
    if kept - moments or (kept != moments and "Adam" not in name):  # a rank's shard of an Adam may be empty
        raise UserError(
            f"{name} keeps {', '.join(sorted(kept)) or 'nothing'} of each weight, and checkpoints have exp_avg and "
            "exp_avg_sq: it could not be resumed. Say --save_strategy no, or choose another optimizer"
        )


def state_bytes(optim: str, shape: Sequence[int]) -> int:
    """Return the bytes of an optimizer's state for a parameter of this shape with an fp32 gradient, without constants
    and counts of steps."""
    size = math.prod(shape)
    if optim == "muon":
        return 4 * size
    if optim == "adafactor":
        return 4 * (size // shape[-1] + size // shape[-2] if len(shape) > 1 else size)
    if optim == "adamw_8bit" and size >= MIN_8_BIT_ELEMENTS:
        return 2 * (size + 4 * math.ceil(size / BLOCK_ELEMENTS))
    if optim in ("adamw", "adamw_8bit"):
        return 8 * size
    raise NotImplementedError(optim)


class ReplicatedOptimizerState(ReplicatedState):
    """The state of an optimizer that is not SHARDABLE: equal on all ranks; the first rank writes it."""

    kinds = ("weight",)

    def __init__(self, engine: Any, optim: str) -> None:
        super().__init__(engine)
        self.optim = optim

    def bytes_of_own(self) -> int:
        return super().bytes_of_own() + (self._kept_bytes() if self.engine.layout.is_main else 0)

    def bytes_of_all(self) -> int:
        return super().bytes_of_all() + self._kept_bytes()

    def _kept_bytes(self) -> int:
        return sum(state_bytes(self.optim, parameter.shape) for parameter in self.parameters.values())

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors()) if self.engine.layout.is_main else {}

    def _load_whole(self, read_whole: ReadWhole | None) -> None:
        assert read_whole is not None  # a checkpoint of such an optimizer has whole tensors
        for name, tensor in self._tensors():
            tensor.copy_(read_whole(name))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters.items():
            for kind, tensor in self.optimizer.state[parameter].items():
                if kind in STATE_TENSORS[self.optim]:
                    yield f"{kind}/{name}", tensor


def check_optimizer_installed(recipe: OptimizerOptions) -> None:
    """Check that the package of `optim` is installed. Raises UserError: it is not."""
    if recipe.optim == "adamw_8bit" and find_spec("bitsandbytes") is None:
        raise UserError(
            "optim = adamw_8bit needs bitsandbytes, which is not installed: pip install bitsandbytes, or say --optim "
            "adafactor or adamw"
        )
