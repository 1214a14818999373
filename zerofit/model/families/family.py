"""What the code may ask about a model family. The defaults work for every model of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the head


def position_embeddings(config) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def hidden_size(config) -> int:
    return config.hidden_size


def derive_nothing(config, overrides: Mapping[str, Any]) -> None:
    pass


@dataclass(frozen=True)
class TensorPlan:
    """How tensor parallelism cuts the layers of a family: each rank has some of the attention heads, and some of the
    MLP's channels. The vocabulary is cut in every family.

    Args:
        columns: linear layers that are cut by their outputs: {last part of the name: matrices side by side in it}.
        rows: linear layers that are cut by their inputs, which are outputs of the former.
        widths: (configuration) -> what the number of ranks must divide: {name in the configuration: number}.
        own_widths: attributes of modules that hold a number of channels of this rank.
        norms: RMS norms over all outputs of a layer that is cut by them; last part of the name.
    """

    columns: Mapping[str, int]
    rows: tuple[str, ...]
    widths: Callable[[Any], Mapping[str, int]]
    own_widths: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagePlan:
    """Where the parts of a decoder are, so that the stages of a pipeline can have some of them each.

    Args:
        layers: the list of layers, an attribute of the body (`model.base_model`).
        before: attributes of the body that work on tokens, or on hidden states before the first layer.
        added: those of them whose output is added to the hidden states.
        after: attributes of the body that work on hidden states behind the last layer.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A model family, or those members of one that have the same properties.

    Args:
        model_types: the `model_type` of the configurations in transformers.
        lora_targets: the layers that get a LoRA adapter where the recipe names none.
        classifier_heads: modules at the end of a classification model; one of them has a row for each label.
        bare_tokenizer_options: options of the tokenizer's class where the folder has vocabulary files only.
        decoder_starts_with_padding: a decoder from scratch begins with the padding token, not with bos.
        overflows_fp16: activations exceed fp16's range (65,504); train/seq2seq.py then takes bf16.
        turn_separator: the text between two turns of a conversation; None: the tokenizer's separator token.
        usable_positions: (configuration) -> the longest row that the model has positions for; None: no limit.
        attention_width: (configuration) -> the number of channels in all attention heads together.
        splits_rows: sequence parallelism is proven with the family.
        derive_sizes: (configuration, overrides) sets those fields of the configuration that its class derives from
            other fields, after the overrides changed these.
        has_experts: its layers have experts and routers, whose auxiliary loss and load are counted (model/experts.py).
        tensor_plan: how tensor parallelism cuts the layers; None: it does not.
        stage_plan: how a pipeline's stages share the layers; None: they do not.
    """

    model_types: tuple[str, ...] = ()
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    classifier_heads: tuple[str, ...] = ("score", "classifier", "classifier.out_proj", "classification_head.out_proj")
    bare_tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    decoder_starts_with_padding: bool = False
    overflows_fp16: bool = False
    turn_separator: str | None = None
    usable_positions: Callable[[Any], int | None] = position_embeddings
    attention_width: Callable[[Any], int] = hidden_size
    splits_rows: bool = False
    derive_sizes: Callable[[Any, Mapping[str, Any]], None] = derive_nothing
    has_experts: bool = False
    tensor_plan: TensorPlan | None = None
    stage_plan: StagePlan | None = None
