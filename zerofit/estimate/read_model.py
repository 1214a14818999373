"""From a recipe to the model of a plan: its configuration and rows, without a weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from zerofit.data.collate import multiple_for, round_up
from zerofit.estimate.planned_model import PlannedModel, add_planned_lora, make_model
from zerofit.estimate.planned_rows import LONGEST_BLOCK, OF_WORDS, TASKS, PlannedHead, Rows
from zerofit.model.adapter_folder import open_adapter, recorded_base, trained_on_configuration
from zerofit.model.chunked_loss import terms_of
from zerofit.model.configuration import known_architectures, load_configuration, read_config, similar_architecture
from zerofit.model.folders import is_adapter
from zerofit.model.recomputation import check_recomputation
from zerofit.model.tokenizer import check_vocabulary, load_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.paths import is_missing_folder

NO_LIMIT = 2**20  # positions


def read_planned_model(recipe: Any, task: str, on_gpu: bool) -> PlannedModel:
    """The configuration and the full model on "meta".

    Raises:
        UserError: the configuration is out of reach, or makes no model.
    """
    auto_class, adapter = getattr(transformers, TASKS[task]), None
    recipe = recipe.draft()
    if not _architecture(recipe) and is_adapter(recipe.model_name_or_path or ""):
        adapter = open_adapter(recipe.model_name_or_path, "model_name_or_path")
        recipe.stand_in("model_name_or_path", recorded_base(adapter))
    has_weights = bool(recipe.model_name_or_path)
    try:
        config = load_configuration(_shape_only(recipe), auto_class)
    except UserError as error:
        if not has_weights or _architecture(recipe):
            raise
        similar = similar_architecture(recipe.model_name_or_path)
        shape = f"add --architecture with a folder that has a config.json, or with a known name such as {similar}"
        raise UserError(f"{problem.partition('; ')[0]}; {shape}" for problem in error.problems) from None
    if adapter is not None:
        config, _ = trained_on_configuration(adapter, config, recipe)
    if task == "cls":
        num_tags = getattr(recipe, "num_tags", None)  # an option of `zerofit plan`
        config.num_labels = num_tags or max(1, getattr(config, "num_labels", 2))
        if num_tags or any(".conll" in Path(name).suffixes for name in recipe.train_file or ()):
            config.architectures = [OF_WORDS]
        config.pad_token_id = config.pad_token_id if config.pad_token_id is not None else 0
    if not has_weights or recipe.resize_embeddings:
        _set_vocabulary(config, recipe)
    if task == "seq2seq" and config.decoder_start_token_id is None:
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        full = make_model(config, task, torch.float32, None, traced=False)
    add_planned_lora(full, recipe, task)
    if recipe.gradient_checkpointing:
        check_recomputation(full, recipe.gradient_checkpointing)
    rows, teacher = longest_rows(recipe, task, config, full, on_gpu), _teacher_of(recipe)
    if teacher is not None:
        assert rows.terms.distillation is not None, "the recipe names a divergence"
        head = PlannedHead(teacher.config.get_text_config().hidden_size, teacher.config.get_text_config().vocab_size)
        distillation = rows.terms.distillation._replace(head=head)
        rows = replace(rows, terms=rows.terms._replace(distillation=distillation))
    return PlannedModel(recipe, task, config, full, rows, on_gpu, teacher=teacher)


def _teacher_of(recipe: Any) -> Any:
    """The teacher on "meta" that each process holds beside the student; None without one."""
    if not getattr(recipe, "teacher", None):
        return None
    config = read_config("teacher", recipe.teacher, recipe.trust_remote_code)
    with torch.device("meta"):
        return make_model(config, "clm", torch.float32, None, traced=False)


def _shape_only(recipe: Any) -> Any:
    """The recipe for reading the model's shape: attention kernels need not be installed here, and weights that are
    elsewhere give way to a known architecture.

    Raises:
        UserError: there are neither the weights nor a shape of that name.
    """
    recipe, name = recipe.draft(), recipe.model_name_or_path
    recipe.reset_option("attn_implementation")
    architecture = _architecture(recipe)
    shape = architecture or (name if name and not Path(name).is_dir() else None)
    if not shape or not (architecture or shape.lower() in known_architectures()):
        if name and is_missing_folder(name):
            raise UserError(f"model_name_or_path = {name!r}: there is no such folder")
        return recipe
    for other in ("model_name_or_path", "model_type"):
        recipe.reset_option(other)
    recipe.adopt("config_name", shape, "--architecture" if architecture else "model_name_or_path")
    return recipe


def _architecture(recipe: Any) -> str | None:
    """An option of `zerofit plan`, which a run's recipe does not have."""
    return getattr(recipe, "architecture", None)


def _set_vocabulary(config: Any, recipe: Any) -> None:
    """Set the size of the vocabulary of a model from scratch, or of one that is resized: the vocabulary of the
    tokenizer, which will be trained or is in a folder, and its padding. That of the hub is taken for the shape's
    own."""
    trained_size = recipe.train_tokenizer_vocab_size
    named = getattr(recipe, "vocab_file", None) or recipe.tokenizer_name or recipe.model_name_or_path
    if named and Path(named).exists() and not trained_size:
        check_vocabulary(config, load_tokenizer(recipe, config), recipe)
    size = trained_size or config.vocab_size
    multiple = getattr(recipe, "make_vocab_size_divisible_by", None) or 1
    config.vocab_size = -(-size // multiple) * multiple


def longest_rows(recipe: Any, task: str, config: Any, full: Any, on_gpu: bool) -> Rows:
    """Return the longest rows that a recipe trains on, as wide as a batch of different lengths pads them."""
    fixed = getattr(recipe, "pad_to_max_length", False)
    multiple = multiple_for(torch.device("cuda" if on_gpu and not fixed else "cpu"), config)
    if task == "cls":
        return Rows(task, round_up(recipe.max_length, multiple))
    head = full.get_output_embeddings()
    whole = recipe.loss == "full" or full.base_model is full or hasattr(head, "lora_A")
    kind, terms = "full" if whole else "chunked", terms_of(recipe)
    if task == "seq2seq":
        source, target = (round_up(each, multiple) for each in (recipe.max_source_length, recipe.max_target_length))
        return Rows(task, source, target, loss_kind=kind, terms=terms)
    positions = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    length = recipe.block_size or min(positions, LONGEST_BLOCK)
    if recipe.preference_loss:
        return Rows(task, round_up(length, multiple), loss_kind=kind, per_sample=2)
    masked = recipe.packing == "documents" and not recipe.data_path
    length = round_up(length, multiple) if recipe.packing == "none" and not recipe.data_path else length
    return Rows(task, length, masked=masked, loss_kind=kind, terms=terms)
