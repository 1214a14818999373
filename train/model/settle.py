"""Questions to the prepared model before it trains, each settled by a few tokens."""

from functools import partial

import torch

from train.model.attention import choose_attention, takes_lengths, use_masks
from train.model.loss import choose_loss, has_separate_body, install_loss
from train.model.probe import LENGTH, documents_leak, losses_differ, random_tokens
from train.recipe.errors import UserError
from train.recipe.model_options import ModelOptions
from train.recipe.tasks import LossOptions

BEYOND_FP16 = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}  # two orders of the same sum, relative


def install_chosen_loss(model, recipe: LossOptions) -> None:
    """Before the model is prepared: install the loss that the recipe asks for, and this machine has."""
    install_loss(model, _chosen(model, recipe, _device())[0])


def settle_loss(engine, recipe: LossOptions) -> str:
    """See that the installed loss is this model's loss. Returns the log's line on it.

    If the memory-saving loss is another one (the model caps or scales its logits, say), the plain one takes its place,
    and the line says so.

    Raises:
        UserError: the recipe insists on a loss that is not this model's.
    """
    config = engine.module.config
    kind, why = _chosen(engine.module, recipe, engine.device)
    if kind != "full":
        engine.model.eval()
        tokens = random_tokens(*_probe(engine), count=2)
        inputs = {"input_ids": tokens, "labels": tokens.clone()}
        difference = losses_differ(engine.model, partial(setattr, engine.module, "loss_kind"), kind, inputs)
        engine.model.train()
        if not difference < TOLERANCE[engine.strategy.precision]:
            finding = f"the {kind} loss is not the loss of a {config.model_type}, it differs by {difference:.1e}"
            if recipe.loss != "auto":
                raise UserError(f"loss = {recipe.loss}: {finding}. Use --loss full")
            engine.module.loss_kind = "full"
            why = f"full: all logits are held, because {finding}"
    return f"loss      {why}"


def settle_attention(model, recipe: ModelOptions, precision: str) -> str:
    """Before the model is prepared: settle the kernel for documents packed into one block. Returns the log's line."""
    return choose_attention(model, recipe.attn_implementation, precision, _device())


def settle_packing(engine, recipe: ModelOptions, collate) -> str:
    """Let `collate`, a CausalCollator, lay packed rows out as the prepared model's attention takes them, and see that
    their documents stay apart. Returns a line for the log, or nothing.

    Raises:
        UserError: they would see each other.
    """
    config, note = engine.module.config, ""
    collate.flatten = takes_lengths(config)
    leak = _leaks(engine, collate)
    if leak and collate.flatten and not recipe.attn_implementation:  # nobody has asked for that kernel
        use_masks(engine.module)
        collate.flatten = False
        note = f"attention sdpa: a {config.model_type} does not tell its attention how long documents are"
        leak = _leaks(engine, collate)
    if leak:
        used = config._attn_implementation
        sdpa = "" if used in ("sdpa", "eager") else "--attn_implementation sdpa, or "
        raise UserError(
            f"packing = documents: with attn_implementation = {used!r} a {config.model_type} lets a document see the "
            f"one before it in its block. Use {sdpa}--packing none, or --packing concatenate to accept it"
        )
    return note


def recompute_activations(model) -> None:
    """Let the model's blocks be computed again in the backward pass; of a frozen model it lets gradients into the
    first one. Raises UserError if this model cannot."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"gradient_checkpointing: the code of a {model.config.model_type} ({type(model).__name__}) cannot compute "
            "its blocks again. Leave it out; a smaller --per_device_train_batch_size also saves activations"
        )
    model.activation_checkpointing_enable()


def _leaks(engine, collate) -> bool:
    engine.model.eval()
    leak = documents_leak(engine.model, collate, *_probe(engine))
    engine.model.train()
    return leak


def check_masks(engine) -> None:
    """Raises UserError where a batch's own mask of who sees whom would not be heeded."""
    attention = engine.module.config._attn_implementation
    if attention != "sdpa":
        raise UserError(
            "reset_position_ids or reset_attention_mask without the other takes a mask that attn_implementation = "
            f"{attention!r} does not heed. Use --attn_implementation sdpa, or set both"
        )


def safe_precision(strategy, config) -> tuple[str, str | None]:
    """The precision that was asked for, or bf16 in place of fp16 for a model that it gives NaN; and a warning then.

    T5 was trained in bf16, and its activations leave fp16's range (above 65,504) in the larger sizes.

    Raises:
        UserError: this GPU has no bf16.
    """
    if strategy.precision != "fp16" or config.model_type not in BEYOND_FP16:
        return strategy.precision, None
    if strategy.lacks_bf16:
        raise UserError(
            f"precision = fp16: a {config.model_type} gives NaN in it, and this GPU has no bf16. Use --precision fp32"
        )
    return "bf16", (
        f"warning   bf16 is used in place of fp16: a {config.model_type} was trained in bf16, and its activations "
        "leave fp16's range, which gives NaN"
    )


def settle_start_token(config, tokenizer) -> None:
    """The token with which the decoder begins, where a configuration from scratch leaves it open."""
    if config.decoder_start_token_id is None:
        known = (config.bos_token_id, tokenizer.cls_token_id, config.pad_token_id)
        config.decoder_start_token_id = next(token for token in known if token is not None)


def _chosen(model, recipe: LossOptions, device: torch.device) -> tuple[str, str]:
    adapted = hasattr(model.get_output_embeddings(), "lora_A")
    if (adapted or not has_separate_body(model)) and recipe.loss != "full":
        why = f"a {model.config.model_type} gives its logits and nothing before them, so all are held"
        if adapted:
            why = "the head has an adapter, so all logits are held"
        if recipe.loss != "auto":
            raise UserError(f"loss = {recipe.loss}: {why}. Use --loss auto")
        return "full", f"full: {why}"
    return choose_loss(recipe.loss, device)


def _device() -> torch.device:
    """What the model will be computed on."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def _probe(engine) -> tuple[int, torch.device, int]:
    """(vocabulary, device, tokens of a document) for the probes."""
    positions = getattr(engine.module.config, "max_position_embeddings", None) or 2 * LENGTH
    return engine.module.config.get_text_config().vocab_size, engine.device, min(LENGTH, positions // 2)
