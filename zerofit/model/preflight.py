"""Preflight checks: what a few tokens through the prepared model tell, before it trains.

Do packed documents stay apart, and is the memory-saving loss the model's loss? Both depend on the model's own code
(position ids that it ignores, logits that it caps or scales after the head), on the attention kernel and on the
installed versions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from zerofit.model.attention import MASKED_SDPA, kernel_of, set_attention, takes_lengths
from zerofit.model.chunked_loss import token_loss_of
from zerofit.model.compilation import uncompiled
from zerofit.model.families import family_of
from zerofit.model.loss import install_loss
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import ModelOptions
from zerofit.recipe.tasks import LossOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from zerofit.data.collate import CausalCollator
    from zerofit.strategy.engine import Engine
    from zerofit.strategy.strategy import Strategy

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}  # relative difference of one sum in two orders
NUM_ROWS = 2  # a model may keep documents apart in one row only
DOCUMENT_TOKENS = 8  # if the model has twice as many positions


# ---------------------------------------------------------------------------------------- before the model is prepared


def safe_precision(strategy: "Strategy", config: "PretrainedConfig") -> tuple[str, str | None]:
    """Return (the strategy's precision, or bf16 instead of fp16 if fp16 gives the model NaN; a warning in that case).
    Raises UserError where this GPU has no bf16."""
    if strategy.precision != "fp16" or not family_of(config).overflows_fp16:
        return strategy.precision, None
    if strategy.lacks_bf16:
        raise UserError(f"precision = fp16: a {config.model_type} gives NaN in it. Use --precision fp32")
    return "bf16", f"warning   bf16 instead of fp16, in which a {config.model_type} gives NaN"


def install_chosen_loss(model: Any, recipe: LossOptions) -> None:
    """Install the loss that the recipe names and the model can have."""
    install_loss(model, _choose_loss_kind(model, recipe)[0], token_loss_of(recipe))


# ----------------------------------------------------------------------------------------------- of the prepared model


@uncompiled()
def check_loss(engine: "Engine", recipe: LossOptions) -> str:
    """Check that the installed loss is this model's loss. Returns a line for the log. If the memory-saving loss
    differs (the model caps or scales its logits, say), the plain loss replaces it; one that the recipe names is
    refused."""
    config = engine.module.config
    kind, reason = _choose_loss_kind(engine.module, recipe)
    if kind != "full":
        engine.model.eval()
        tokens = random_tokens(*_check_sizes(engine), count=2)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        difference = loss_difference(engine.model, engine.module, inputs)
        engine.model.train()
        if not difference < LOSS_TOLERANCE[engine.strategy.precision]:
            problem = f"the {kind} loss is not the loss of a {config.model_type}, it differs by {difference:.1e}"
            if recipe.loss != "auto":
                raise UserError(f"loss = {recipe.loss}: {problem}. Use --loss full")
            engine.module.loss_kind = "full"
            reason = f"full: all logits are held, because {problem}"
    return f"loss      {reason}"


@uncompiled()
def check_packing(engine: "Engine", recipe: ModelOptions, collate: "CausalCollator") -> str:
    """Check that the documents of a packed row stay apart. Sets `collate.flatten` (rows are laid out for a flash
    kernel), and may switch the model's attention to sdpa. Returns a line for the log, or nothing. Raises UserError
    where a document sees the one before it."""
    kind = engine.module.config.model_type
    note = ""
    collate.flatten = takes_lengths(engine.module)
    engine.model.eval()
    leak = documents_leak(engine.model, collate, *_check_sizes(engine))
    if leak and collate.flatten and not recipe.attn_implementation:  # the recipe did not name this kernel
        set_attention(engine.module, MASKED_SDPA)
        collate.flatten = False
        note = f"attention sdpa: a {kind} does not tell its attention how long documents are"
        leak = documents_leak(engine.model, collate, *_check_sizes(engine))
    engine.model.train()
    if leak:
        attention = kernel_of(engine.module)
        sdpa = "" if attention in ("sdpa", "eager") else "--attn_implementation sdpa, or "
        raise UserError(
            f"packing = documents: attn_implementation = {attention!r} of a {kind} mixes them. Use "
            f"{sdpa}--packing none, or --packing concatenate to accept it"
        )
    return note


@uncompiled()
@torch.no_grad()
def check_split_rows(engine: "Engine", collate: "CausalCollator", packed: bool) -> None:
    """Under sequence parallelism: check that the loss of rows that ranks split is the loss of rows in full. Raises
    UserError where it differs. `packed`: rows are of documents that do not see each other."""
    if engine.layout.sequence == 1:
        return
    vocab_size, device, length = _check_sizes(engine)
    width = 2 * length - 1  # to be filled up
    ids = random_tokens(vocab_size, device, width, NUM_ROWS).view(NUM_ROWS, width).cpu().numpy()
    positions = {"position_ids": np.arange(width) % length} if packed else {}
    batch = collate([({"input_ids": row, "labels": row, **positions}, 0) for row in ids]).to(device)
    engine.model.eval()
    split = engine.model(**batch.inputs).item()
    with engine.rows_in_full():
        full = engine.model(**batch.inputs).item()
    engine.model.train()
    allowed = LOSS_TOLERANCE[engine.strategy.precision] * abs(full)
    if not abs(split - full) <= allowed:  # both are 0 on a device without data
        raise UserError(
            f"sequence_parallel_size = {engine.layout.sequence}: the loss of a {engine.module.config.model_type} with "
            f"attn_implementation = {kernel_of(engine.module)!r} differs. Use a strategy without it, such as zero3"
        )


def check_mask_support(engine: "Engine") -> None:
    """Raises UserError where the attention ignores a mask that comes with the batch."""
    attention = kernel_of(engine.module)
    if attention != "sdpa":
        raise UserError(
            "reset_position_ids or reset_attention_mask without the other needs an attention mask, which "
            f"attn_implementation = {attention!r} ignores. Use --attn_implementation sdpa, or set both"
        )


@torch.no_grad()
def documents_leak(
    call: Callable[..., Any],
    collate: "CausalCollator",
    vocab_size: int,
    device: torch.device,
    length: int = DOCUMENT_TOKENS,
) -> bool:
    """Return whether the second documents' logits change when the first documents of two packed rows are replaced.
    `call`: the model, ready to be called with what `collate` returns. `collate`: makes a batch of (sample, index)
    pairs, as in training. `length`: tokens of each document."""
    generator = torch.Generator().manual_seed(0)
    first, replacement, second = torch.randint(0, vocab_size, (3, NUM_ROWS, length), generator=generator).numpy()
    positions = np.tile(np.arange(length), 2)
    logits = []
    for documents in (first, replacement):
        rows = np.concatenate([documents, second], axis=1)
        batch = collate([({"input_ids": row, "labels": row, "position_ids": positions}, 0) for row in rows])
        inputs = {name: value for name, value in batch.to(device).inputs.items() if name != "labels"}
        logits.append(call(**inputs).logits.reshape(NUM_ROWS, 2 * length, -1)[:, length:].float())
    return not torch.allclose(logits[0], logits[1], rtol=0, atol=1e-3 * logits[0].std().item())


@torch.no_grad()
def loss_difference(call: Callable[..., Any], model: Any, inputs: dict[str, torch.Tensor]) -> float:
    """Return the relative difference between a model's loss and the plain one on `inputs`, some of them masked."""
    inputs["labels"][0, ::5] = -100
    losses = []
    for kind in ("full", model.loss_kind):
        model.loss_kind = kind
        losses.append(call(**inputs).float().item())
    return abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-12)


def random_tokens(
    vocab_size: int, device: torch.device, length: int = DOCUMENT_TOKENS, count: int = 1
) -> torch.Tensor:
    """Return (1, count * length) random ids, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (1, count * length), generator=generator).to(device)


def _choose_loss_kind(model: Any, recipe: LossOptions) -> tuple[str, str]:
    """Return (kind of loss, reason for the log)."""
    head_has_adapter = hasattr(model.get_output_embeddings(), "lora_A")
    if (head_has_adapter or model.base_model is model) and recipe.loss != "full":
        reason = f"a {model.config.model_type} returns its logits and nothing before them, so all are held"
        if head_has_adapter:
            reason = "the head has an adapter, so all logits are held"
        if recipe.loss != "auto":
            raise UserError(f"loss = {recipe.loss}: {reason}. Use --loss auto")
        return "full", f"full: {reason}"
    if recipe.loss == "full":
        return "full", "full: all logits are held, as the recipe says"
    return "chunked", "chunked: logits are never held all at once, and their sums are in fp32"


def _check_sizes(engine: "Engine") -> tuple[int, torch.device, int]:
    """Return (vocabulary, device, tokens of a document) for the checks."""
    positions = getattr(engine.module.config, "max_position_embeddings", None) or 2 * DOCUMENT_TOKENS
    vocab_size = engine.module.config.get_text_config().vocab_size
    return vocab_size, engine.device, min(DOCUMENT_TOKENS, positions // 2)
