"""The model of `zerofit generate`: found and checked without its weights first, then loaded onto its device."""

from dataclasses import dataclass
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zerofit.model.adapter_folder import AdapterFolder, find_base, open_adapter
from zerofit.model.adapter_loading import load_with_adapter
from zerofit.model.configuration import has_model, read_config
from zerofit.model.folders import is_adapter, model_folder
from zerofit.model.pretrained_io import read_model, read_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import log_to_stderr
from zerofit.strategy.devices import accelerator

NOT_WRITERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
)
NAMED_WITH = "--model BASE --adapter FOLDER"


@dataclass(frozen=True)
class ModelSource:
    """Says where the model comes from: its folder or hub name, or that of its base, and its adapter."""

    name: str
    adapter: AdapterFolder | None
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase


def find_model(options: Any) -> ModelSource:
    """Find the model, its adapter and its tokenizer; the weights are not loaded. `options`: those of generating or
    evaluating. Raises UserError: they cannot be loaded, or the model does not write texts."""
    name, trust = model_folder(options.model), options.trust_remote_code
    if not (is_adapter(name) or options.adapter):
        config = read_config("model", name, trust)
        _auto_class(config, name)
        return ModelSource(name, None, config, read_tokenizer("model", name, config, trust))
    names_adapter = is_adapter(name)
    if names_adapter and options.adapter:
        raise UserError(f"model = {name!r} is an adapter, and adapter = {options.adapter!r} too: name one")
    adapter = open_adapter(options.adapter or name, "adapter" if options.adapter else "model")
    option, base, config = find_base(adapter, None if names_adapter else name, "model", NAMED_WITH, trust)
    if adapter.classifies:
        raise UserError(f"{str(adapter.path)!r} is the adapter of a classifier, which writes no text")
    _auto_class(config, base)
    where = ("adapter", str(adapter.path)) if adapter.has_tokenizer else (option, base)
    return ModelSource(base, adapter, config, read_tokenizer(*where, config, trust))


def load(source: ModelSource, options: Any) -> PreTrainedModel:
    """The model on its device, with its adapter if there is one. Raises UserError: its weights cannot be loaded, are
    incomplete, or do not fit the adapter."""
    device, trust = accelerator(), options.trust_remote_code
    precision = options.precision or ("fp32" if device.type == "cpu" else None)
    if source.adapter:
        adapted = load_with_adapter(
            source.adapter,
            source.name if options.adapter else None,
            base_option="model",
            named_with=NAMED_WITH,
            quantised="keep",
            precision=precision,
            trust_remote_code=trust,
        )
        for note in adapted.notes:
            log_to_stderr(note)
        model = adapted.model.get_base_model()
        if (source.adapter.path / "generation_config.json").is_file():  # its settings for generation
            model.generation_config = GenerationConfig.from_pretrained(source.adapter.path)
    else:
        auto_class = _auto_class(source.config, source.name)
        model, missing = read_model(
            auto_class, "model", source.name, source.config, precision=precision, trust_remote_code=trust
        )
        if missing:
            raise UserError(f"model = {source.name!r} lacks {len(missing)} weights, such as {missing[0]}")
    if getattr(model, "hf_quantizer", None) is None:  # quantised weights are on their device already
        model.to(device)
    adapter = f" with the adapter {source.adapter.path}" if source.adapter else ""
    log_to_stderr(f"model {source.name}{adapter} in {str(model.dtype).removeprefix('torch.')} on {model.device}")
    return model


def _auto_class(config: PreTrainedConfig, name: str) -> Any:
    """The transformers class for a model that writes. Raises UserError if this one does not."""
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    non_writers = [kind for kind in config.architectures or () if kind.endswith(NOT_WRITERS)]
    if non_writers or not has_model(auto_class, config):
        kind = non_writers[0] if non_writers else config.model_type
        raise UserError(f"model = {name!r} is a {kind}, which writes no text. Name one for CAUSAL_LM or SEQ_2_SEQ_LM")
    return auto_class
