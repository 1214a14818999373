"""Model families: all that is special about one is in the table here; the rest of the code asks family_of(config).

A new family is an entry of FAMILIES; a model of no listed family has the defaults of `Family`, which work for every
model of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the head


@dataclass(frozen=True)
class TensorPlan:
    """Names the layers of a family that tensor parallelism cuts, and how: each rank has some of the attention heads,
    and some of the MLP's channels. The vocabulary is cut in every family."""

    # linear layers that are cut by their outputs: {last part of the name: matrices side by side in it}
    columns: Mapping[str, int]
    rows: tuple[str, ...]  # linear layers that are cut by their inputs, which are outputs of the former
    widths: tuple[str, ...]  # names in the configuration of what the number of ranks must divide
    own_widths: tuple[str, ...] = ()  # attributes of modules that hold a number of channels of this rank
    norms: tuple[str, ...] = ()  # RMS norms over all outputs of a layer that is cut by them; last part of the name


@dataclass(frozen=True)
class StagePlan:
    """Names the places of the parts of a decoder, so that the stages of a pipeline can have some of them each."""

    layers: str  # the list of layers, an attribute of the body (`model.base_model`)
    before: tuple[str, ...]  # attributes of the body that work on tokens, or on hidden states before the first layer
    after: tuple[str, ...]  # attributes of the body that work on hidden states after the last layer
    added: tuple[str, ...] = ()  # the ones whose output is added to the hidden states


def _width_of_heads(config: "PretrainedConfig") -> int:
    """Return the channels of all heads together: `head_dim` need not divide hidden_size (Qwen3, Gemma)."""
    head = getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    is_compressed = hasattr(config, "qk_rope_head_dim")  # DeepSeek's, whose head_dim is that of the positions alone
    return config.hidden_size if not head or not heads or is_compressed else head * heads


@dataclass(frozen=True)
class Family:
    """A model family, or those members of one that have the same properties."""

    model_types: tuple[str, ...] = ()  # the `model_type` of the configurations in transformers
    # The layers that get a LoRA adapter where the recipe names none. Of Llama and its kin these are all linear layers
    # of a block, which Dettmers et al. 2023 (QLoRA) found to reach full training. Of others they are those of peft's
    # table, and the attention's key and output layers, where peft has query and value alone.
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    # options of the tokenizer's class where the folder has vocabulary files only
    bare_tokenizer_options: Mapping[str, Any] = field(default_factory=dict)
    decoder_starts_with_padding: bool = False  # a decoder from scratch begins with the padding token, not with bos
    overflows_fp16: bool = False  # activations exceed fp16's range (65,504); the run then takes bf16
    # the text between two turns of a conversation; None: the tokenizer's separator token
    turn_separator: str | None = None
    # (configuration) -> the longest row that the model has positions for; None: no limit
    usable_positions: Callable[["PretrainedConfig"], int | None] = lambda config: getattr(
        config, "max_position_embeddings", None
    )
    # (configuration) -> the number of channels in all attention heads together
    attention_width: Callable[["PretrainedConfig"], int] = _width_of_heads
    splits_rows: bool = False  # sequence parallelism is proven with the family
    # True: layers have experts and routers, whose auxiliary loss and load are counted (model/experts.py)
    has_experts: bool = False
    tensor_plan: TensorPlan | None = None  # how tensor parallelism cuts the layers; None: it does not
    stage_plan: StagePlan | None = None  # how a pipeline's stages share the layers; None: they do not


# --------------------------------------------------------------------------------------------------------------- GPT

GPT2 = Family(  # Radford et al. 2019
    model_types=("gpt2",),
    lora_targets=("c_attn",),
    splits_rows=True,
    tensor_plan=TensorPlan(
        columns={"c_attn": 3, "c_fc": 1},  # c_attn: query, key and value side by side
        rows=("c_proj",),
        widths=("n_head", "n_inner"),
        own_widths=("split_size",),
    ),
    stage_plan=StagePlan(layers="h", before=("wte", "wpe", "drop"), after=("ln_f",), added=("wpe",)),
)
FUSED_BY_HEADS = Family(
    model_types=("bloom", "falcon"),
    lora_targets=("query_key_value",),  # one layer; each head has its own query, key and value side by side in it
)
GPT_NEOX = replace(  # Black et al. 2022; Pythia, OpenCALM
    FUSED_BY_HEADS,
    model_types=("gpt_neox",),
    splits_rows=True,
    tensor_plan=TensorPlan(
        columns={"query_key_value": 1, "dense_h_to_4h": 1},
        rows=("dense", "dense_4h_to_h"),
        widths=("num_attention_heads", "intermediate_size"),
    ),
    stage_plan=StagePlan(layers="layers", before=("embed_in", "emb_dropout"), after=("final_layer_norm",)),
)

# ------------------------------------------------------------- Llama (Touvron et al. 2023), and what has its layers

LLAMA_LIKE = Family(  # some have norms within their attention, or factors before and after their layers
    model_types=("gemma", "gemma2", "gemma3_text", "olmo", "granite", "smollm3"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
QWEN3 = replace(LLAMA_LIKE, model_types=("qwen3",), splits_rows=True)
GATED_PLAN = TensorPlan(
    columns=dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
    rows=("o_proj", "down_proj"),
    widths=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
)
MISTRAL = replace(
    LLAMA_LIKE,
    model_types=("mistral", "qwen2"),
    splits_rows=True,
    tensor_plan=GATED_PLAN,
    stage_plan=StagePlan(layers="layers", before=("embed_tokens",), after=("norm",)),
)
# Meta's own code and published folders begin every text with the beginning-of-text token.
LLAMA = replace(MISTRAL, model_types=("llama",), bare_tokenizer_options={"add_bos_token": True})
# OLMo et al. 2025: norms after attention and MLP, and over all queries, all keys.
OLMO2 = replace(MISTRAL, model_types=("olmo2",), tensor_plan=replace(GATED_PLAN, norms=("q_norm", "k_norm")))
# Mixtral (Jiang et al. 2024), Qwen, OLMoE (Muennighoff et al. 2024): transformers keeps the experts of a layer in two
# parameters, and a router chooses for each token.
EXPERTS = Family(
    model_types=("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    has_experts=True,
)

# ---------------------------------------------------------------------- BERT (Devlin et al. 2019) and other encoders


def positions_after_padding(config: "PretrainedConfig") -> int | None:
    """Return a RoBERTa's number of positions, which begin after the padding token's id: 514 rows are 512 positions."""
    rows = getattr(config, "max_position_embeddings", None)
    return rows - config.pad_token_id - 1 if rows else rows


def absolute_positions(config: "PretrainedConfig") -> int | None:
    """Return the number of positions of a DeBERTa; None without absolute ones, where max_position_embeddings is the
    range of the relative ones' buckets."""
    return getattr(config, "max_position_embeddings", None) if getattr(config, "position_biased_input", True) else None


BERT = Family(model_types=("bert", "electra"), lora_targets=("query", "key", "value"))
ROBERTA = replace(  # Liu et al. 2019
    BERT, model_types=("roberta", "xlm-roberta", "camembert"), usable_positions=positions_after_padding
)
POSITIONS_OF_ROBERTA = replace(
    ROBERTA,
    model_types=(
        "longformer",
        "mpnet",
        "data2vec-text",
        "ibert",
        "lilt",
        "luke",
        "markuplm",
        "roberta-prelayernorm",
        "xlm-roberta-xl",
        "xmod",
    ),
    lora_targets=(ALL_LINEAR,),
)
DEBERTA = Family(  # He et al. 2021
    model_types=("deberta",),
    lora_targets=("in_proj",),  # query, key and value in one layer
    usable_positions=absolute_positions,
)
DEBERTA_V2 = replace(DEBERTA, model_types=("deberta-v2",), lora_targets=("query_proj", "key_proj", "value_proj"))

# ------------------------------------------------------------------------------------------------- encoder-decoders


BART = Family(  # Lewis et al. 2020
    model_types=("bart", "mbart", "m2m_100"),
    lora_targets=("q_proj", "k_proj", "v_proj", "out_proj"),
)
PEGASUS = replace(BART, model_types=("pegasus",), decoder_starts_with_padding=True)
BLENDERBOT = Family(  # Roller et al. 2020: trained by ParlAI, whose delimiter of turns is two spaces
    model_types=("blenderbot", "blenderbot-small"), lora_targets=BART.lora_targets, turn_separator="  "
)
OPT = Family(  # Zhang et al. 2022: a decoder with BART's layers
    model_types=("opt",), lora_targets=BART.lora_targets
)
SWITCH = Family(
    model_types=("switch_transformers",),
    overflows_fp16=True,
    attention_width=lambda config: config.num_heads * config.d_kv,  # the heads' width is their own
)
T5 = replace(  # Raffel et al. 2020: trained in bf16; the larger sizes exceed fp16's range
    SWITCH,
    model_types=("t5", "mt5", "umt5", "longt5"),
    lora_targets=("q", "k", "v", "o"),
    decoder_starts_with_padding=True,
)

FAMILIES = (
    GPT2,
    FUSED_BY_HEADS,
    GPT_NEOX,
    LLAMA_LIKE,
    QWEN3,
    MISTRAL,
    LLAMA,
    OLMO2,
    EXPERTS,
    BERT,
    ROBERTA,
    POSITIONS_OF_ROBERTA,
    DEBERTA,
    DEBERTA_V2,
    BART,
    PEGASUS,
    BLENDERBOT,
    OPT,
    SWITCH,
    T5,
)
FAMILY_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
DEFAULT_FAMILY = Family()
Plan = TypeVar("Plan", TensorPlan, StagePlan)


def family_of(config: "PretrainedConfig") -> Family:
    """Return the family of a model with this configuration of transformers; the default one if it is not listed."""
    return FAMILY_BY_MODEL_TYPE.get(config.model_type, DEFAULT_FAMILY)


def require_plan(plan: Plan | None) -> Plan:
    """Return the plan of a family, which check_split or check_stages has found to have one."""
    assert plan is not None
    return plan
