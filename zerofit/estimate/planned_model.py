"""The model of a plan, built from a recipe: its configuration, its weights, and the copies that are traced."""

import contextlib
import copy
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from zerofit.data.collate import multiple_for, round_up
from zerofit.estimate.planned_rows import MAX_LENGTH, PLANNED_CLASSES, TOKEN_CLASSIFIER, PlannedHead, PlannedRows
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.traced_steps import (
    WHOLE_MODEL,
    Stage,
    TracedStep,
    divide_experts,
    split_layers,
    steps_of_stage,
    weights_of_stage,
)
from zerofit.estimate.tracer import TRACED_ATTENTION, Tracer, TraceSettings, outer_lists, reduced_configuration
from zerofit.estimate.weights import MASTER_BYTES, Weight, Weights
from zerofit.model.adapter_folder import open_adapter, recorded_base, trained_config
from zerofit.model.chunked_loss import token_loss_of
from zerofit.model.compilation import embedding_and_head_of, fuse_gelu, fuse_norms, round_embeddings
from zerofit.model.configuration import (
    has_head,
    is_adapter,
    known_architectures,
    load_configuration,
    read_config,
)
from zerofit.model.families import family_of
from zerofit.model.lora import inject_lora
from zerofit.model.parameters import hidden_matrices
from zerofit.model.recomputation import check_recomputation
from zerofit.model.stages import cut_layers
from zerofit.model.tokenizer import check_vocabulary, load_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.paths import is_missing_folder
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.optimizers import parameter_groups

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class PlannedModel:
    """The model that a plan is made for, with its rows."""

    recipe: Any  # the training recipe
    task: str
    config: Any
    full: Any  # the full transformers model, with its adapter, on "meta"
    rows: PlannedRows
    on_gpu: bool
    cpu_kernels: bool = False  # see TraceSettings
    own_kernels: bool = True  # see TraceSettings
    teacher: Any = None  # a transformers model on "meta", which each process holds in addition to the student

    def __post_init__(self) -> None:
        self._tracers: dict[tuple[Any, ...], Any] = {}
        self._shares: dict[tuple[int, Stage], Weights] = {}

    def with_options(self, recipe: Any, rows: PlannedRows) -> "PlannedModel":
        """Return a copy with other options, which may change only its passes; tracers are shared."""
        changed = replace(self, recipe=recipe, rows=rows)
        changed._shares = self._shares
        changed._tracers = self._tracers
        return changed

    @property
    def teacher_weights(self) -> int:
        """The number of the teacher's weights; 0 without a teacher."""
        return sum(weight.numel() for weight in self.teacher.parameters()) if self.teacher is not None else 0

    def weights_of(self, layout: ParallelLayout, stage: Stage | None = None) -> Weights:
        """Return the weights of a stage, or of the rank that has the most, before ZeRO shards them."""
        if stage is None:
            stage_weights = [self.weights_of(layout, stage) for stage in self.stages(layout)]
            return max(stage_weights, key=lambda weights: weights.trained)
        key = layout.tensor, stage
        if key in self._shares:
            return self._shares[key]
        if layout.pipeline > 1:
            plan = family_of(self.config).stage_plan
            body = self.full.base_model_prefix
            assert plan is not None  # check_layout has refused other families
            weights = weights_of_stage(self.weights_of(replace(layout, pipeline=1), WHOLE_MODEL), stage, plan, body)
        else:
            weights = self.weights
            if layout.tensor > 1:
                with torch.device("meta"):
                    reduced = reduced_configuration(self.config)
                    small = make_model(reduced, self.task, torch.float32, None, traced=False)
                split_layers(small, layout.tensor)
                weights = weights.shared({name: parameter.numel() for name, parameter in small.named_parameters()})
        self._shares[key] = weights
        return weights

    def stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return the stages of a pipeline that may need the most memory: the first, the last, and the first of those
        with the most layers; without a pipeline one stage that stands for the whole model."""
        if layout.pipeline == 1:
            return [WHOLE_MODEL]
        cut = cut_layers(self.full, layout.pipeline)
        stages = [Stage(number, layout.pipeline, len(layers)) for number, layers in enumerate(cut)]
        longest = max(stages, key=lambda stage: stage.layers)
        return list(dict.fromkeys((stages[0], longest, stages[-1])))

    @property
    def num_layers(self) -> int:
        return getattr(self.config.get_text_config(), "num_hidden_layers", 0)

    def hidden_bytes(self, strategy: PlannedStrategy, micro_batch: int) -> int:
        """Return the bytes of a rank's hidden states between two layers: each tensor-parallel rank has some tokens."""
        tokens = -(-micro_batch * self.rows.per_sample * self.rows.length // strategy.layout.tensor)
        return tokens * self.config.get_text_config().hidden_size * DTYPES[strategy.precision].itemsize

    def steps(
        self,
        strategy: PlannedStrategy,
        stage: Stage,
        batch_size: int,
        *,
        evaluated: bool = False,
        rows: PlannedRows | None = None,
    ) -> list[TracedStep]:
        """Return the traced steps of a batch's passes through the model, or through a stage of it."""
        tracer = self.tracer(strategy, evaluated, rows)
        layout = strategy.layout
        if layout.pipeline == 1:
            return tracer.steps(batch_size)
        weights = self.weights_of(layout, stage)
        hidden = self.hidden_bytes(strategy, batch_size)
        width = self.dtypes(strategy)[0].itemsize
        embedded = hidden * layout.tensor if layout.tensor > 1 and not evaluated else 0
        return steps_of_stage(tracer.steps(batch_size, stage.layers), stage, weights, hidden, width, embedded=embedded)

    @cached_property
    def weights(self) -> Weights:
        muon = hidden_matrices(self.full) if self.recipe.optim == "muon" else {}
        groups = enumerate(parameter_groups(self.full, self.recipe))
        numbers = {id(parameter): number for number, group in groups for parameter in group["params"]}
        all_weights = tuple(
            Weight(
                name,
                parameter.numel(),
                parameter.requires_grad,
                -1 if name in muon else numbers.get(id(parameter), 0),
                len(parameter) if parameter.dim() else 1,
                tuple(parameter.shape),
                name in muon,
                self.recipe.ema_decay > 0,
            )
            for name, parameter in self.full.named_parameters()
        )
        stacks = tuple(name for name, length in outer_lists(self.full).items() if length > 1)
        embeddings = self.full.get_input_embeddings()
        outputs = self.full.get_output_embeddings()
        untied = outputs is not None and outputs.weight is not embeddings.weight
        named = dict(self.full.named_parameters())
        heads = [name for name, weight in named.items() if untied and weight is outputs.weight]
        end_modules = [(place, module) for place, end in enumerate(embedding_and_head_of(self.full)) for module in end]
        ends = {id(weight): number for number, module in end_modules for weight in module.parameters()}
        gathered = {name: ends[id(weight)] for name, weight in named.items() if id(weight) in ends}
        linear = [
            layer for layer in self.full.modules() if isinstance(layer, torch.nn.Linear) and layer is not outputs
        ]
        frozen = [layer.weight.numel() for layer in linear if not layer.weight.requires_grad]
        quantised = sum(frozen) if self.recipe.quantised else 0
        return Weights(all_weights, stacks, "".join(heads), gathered, quantised)

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint: fp32 weights and the optimizer's state."""
        return MASTER_BYTES * self.weights.trained + self.weights.state_bytes(self.recipe.optim)

    @property
    def keeps_layers(self) -> bool:
        """True if ZeRO-3 keeps layers between their forward and their backward pass: it does not if a loss in chunks
        is checked by forward passes before training (`GatheredWeights`)."""
        return self.task == "cls" or self.rows.loss_kind == "full"

    def dtypes(self, strategy: PlannedStrategy) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of (trained, frozen) weights in the passes: DeepSpeed and FSDP2 compute with weights in
        half precision; without them trained weights stay in fp32."""
        half = DTYPES[strategy.precision]
        return (torch.float32 if strategy.sharding is None else half), half

    def trace_settings(self, strategy: PlannedStrategy, evaluated: bool = False) -> TraceSettings:
        """Return the settings of a trace under a strategy. Strategies with equal settings share their traces."""
        trained, frozen = self.dtypes(strategy)
        computes_as_stored = strategy.sharding is not None or strategy.precision == "fp32"
        return TraceSettings(
            dtype=frozen if self.recipe.lora else trained,
            autocast=None if computes_as_stored else torch.bfloat16,
            on_gpu=self.on_gpu,
            cpu_kernels=self.cpu_kernels,
            own_kernels=self.own_kernels,
            loss=self.rows.loss_kind,
            evaluated=evaluated,
            tensor=strategy.layout.tensor,
            sequence=strategy.layout.sequence,
            keeps_inputs=strategy.shards_parameters and strategy.zero.memory_efficient_linear,
            watched=strategy.shards_parameters,
            offloaded=self.recipe.activation_offload and self.on_gpu and not evaluated,
            experts=strategy.layout.data_size if strategy.divides_experts else 0,
            compiled=bool(self.recipe.compiles),
            float8=self.recipe.float8,
        )

    def tracer(self, strategy: PlannedStrategy, evaluated: bool = False, rows: PlannedRows | None = None) -> Tracer:
        """Return a tracer of the passes as they run under a strategy, on the recipe's rows or on the given ones."""
        recomputed = not evaluated and self.recipe.gradient_checkpointing
        settings = replace(self.trace_settings(strategy, evaluated), recomputed=recomputed)
        # Packed documents need a mask under sdpa; the flash kernels of a GPU, in half precision, take lengths instead.
        dropped = any(getattr(self.config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
        implementation = self.recipe.attn_implementation
        in_half = settings.gpu_kernels and strategy.precision != "fp32"
        flash = in_half and (implementation not in ("sdpa", "eager") if implementation else not dropped)
        rows = rows or self.rows
        traced_rows = replace(rows, masked=rows.masked and not flash)
        key = settings, traced_rows
        if key in self._tracers:
            return self._tracers[key]
        trained = self.dtypes(strategy)[0]

        def build(config: Any) -> torch.nn.Module:
            model = make_model(config, self.task, settings.dtype, implementation, traced=True)
            add_planned_lora(model, self.recipe, self.task)
            split_layers(model, settings.tensor)
            divide_experts(model, settings.experts, settings.dtype)
            for parameter in model.parameters():
                if self.recipe.lora and parameter.requires_grad:
                    parameter.data = parameter.data.to(trained)
            fuse_norms(model)
            if not self.recipe.residual_in_fp32:
                round_embeddings(model)
            traced_rows.install(model)
            return model

        self._tracers[key] = Tracer(self.config, self.full, build, traced_rows, settings)
        return self._tracers[key]


def make_model(
    config: Any, task: str, dtype: torch.dtype, attention: str | None, traced: bool
) -> transformers.PreTrainedModel:
    """Return a model with random weights, on the default device. `traced`: use the attention that can be traced."""
    name = TOKEN_CLASSIFIER if task == "cls" and has_head(config, "TokenClassification") else PLANNED_CLASSES[task]
    auto_class = getattr(transformers, name)

    def build(attention: str | None) -> Any:
        return fuse_gelu(auto_class.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention))

    if attention == "eager":
        return build("eager")
    if traced:
        with contextlib.suppress(ValueError):  # a model without sdpa
            return build(TRACED_ATTENTION)
    return build(None)


def add_planned_lora(model: Any, recipe: Any, task: str) -> None:
    """Put the recipe's adapter into the model, without reading a weight (zerofit/model/lora.py reads some)."""
    if not recipe.lora:
        return
    targets = recipe.lora_target_modules or []
    is_pattern = len(targets) == 1 and not re.fullmatch(r"[\w.,-]+", targets[0])
    inject_lora(model, recipe, targets[0] if is_pattern else None)
    trained = [name for text in recipe.lora_modules_to_save or () for name in text.split(",") if name]
    trained += ["classifier", "score"] if task == "cls" else []
    resized = [model.get_input_embeddings(), model.get_output_embeddings()] if recipe.resize_embeddings else []
    for name, module in model.named_modules():
        if any(module is embedding for embedding in resized) or name.rpartition(".")[2] in trained:
            module.requires_grad_(True)


MAX_POSITIONS = 2**20  # for a model without a limit


def read_planned_model(recipe: Any, task: str, on_gpu: bool) -> PlannedModel:
    """Return the model of a recipe, with its configuration and the full model on "meta".

    Raises:
        UserError: the configuration cannot be read, or no model can be made from it.
    """
    auto_class = getattr(transformers, PLANNED_CLASSES[task])
    adapter = None
    architecture = getattr(recipe, "architecture", None)
    recipe = recipe.draft()
    if not architecture and is_adapter(recipe.model_name_or_path or ""):
        adapter = open_adapter(recipe.model_name_or_path, "model_name_or_path")
        recipe.stand_in("model_name_or_path", recorded_base(adapter))
    has_weights = bool(recipe.model_name_or_path)
    try:
        config = load_configuration(_shape_only(recipe), auto_class)
    except UserError as error:
        if not has_weights or architecture:
            raise
        shape = "add --architecture with a folder that has a config.json, or with a known name such as llama-3.1-8b"
        raise UserError(f"{problem.partition('; ')[0]}; {shape}" for problem in error.problems) from None
    if adapter is not None:
        config = trained_config(adapter, config, recipe.config_overrides)
    if task == "cls":
        num_tags = getattr(recipe, "num_tags", None)  # an option of `zerofit plan`
        config.num_labels = num_tags or max(1, getattr(config, "num_labels", 2))
        if num_tags or any(".conll" in Path(name).suffixes for name in recipe.train_file or ()):
            config.architectures = [TOKEN_CLASSIFIER]
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
    rows = longest_rows(recipe, task, config, full, on_gpu)
    teacher = None
    if getattr(recipe, "teacher", None):  # each process holds it in addition to the student
        assert rows.terms.distillation is not None, "the recipe names a divergence"
        teacher_config = read_config("teacher", recipe.teacher, recipe.trust_remote_code)
        with torch.device("meta"):
            teacher = make_model(teacher_config, "clm", torch.float32, None, traced=False)
        head = PlannedHead(teacher_config.get_text_config().hidden_size, teacher_config.get_text_config().vocab_size)
        distillation = rows.terms.distillation._replace(head=head)
        rows = replace(rows, terms=rows.terms._replace(distillation=distillation))
    return PlannedModel(recipe, task, config, full, rows, on_gpu, teacher=teacher)


def _shape_only(recipe: Any) -> Any:
    """Return a recipe to read only the model's shape: attention kernels need not be installed here, and a known
    architecture replaces weights that are not on this machine.

    Raises:
        UserError: there are neither weights nor a known shape of that name.
    """
    name = recipe.model_name_or_path
    recipe = recipe.draft()
    recipe.reset_option("attn_implementation")
    architecture = getattr(recipe, "architecture", None)
    shape = architecture or (name if name and not Path(name).is_dir() else None)
    if not shape or not (architecture or shape.lower() in known_architectures()):
        if name and is_missing_folder(name):
            raise UserError(f"model_name_or_path = {name!r}: there is no such folder")
        return recipe
    for option in ("model_name_or_path", "model_type"):
        recipe.reset_option(option)
    recipe.adopt("config_name", shape, "--architecture" if architecture else "model_name_or_path")
    return recipe


def _set_vocabulary(config: Any, recipe: Any) -> None:
    """Set the vocabulary size of a model that is trained from scratch or resized: the size of the tokenizer, which is
    in a folder or will be trained, with its padding. A tokenizer on the hub is assumed to have the size of the model's
    configuration."""
    trained_size = recipe.train_tokenizer_vocab_size
    tokenizer = getattr(recipe, "vocab_file", None) or recipe.tokenizer_name or recipe.model_name_or_path
    if tokenizer and Path(tokenizer).exists() and not trained_size:
        check_vocabulary(config, load_tokenizer(recipe, config), recipe)
    size = trained_size or config.vocab_size
    multiple = getattr(recipe, "make_vocab_size_divisible_by", None) or 1
    config.vocab_size = -(-size // multiple) * multiple


def longest_rows(recipe: Any, task: str, config: Any, full: Any, on_gpu: bool) -> PlannedRows:
    """Return the longest rows that a recipe trains on, as wide as a batch of different lengths pads them."""
    fixed = getattr(recipe, "pad_to_max_length", False)
    multiple = multiple_for(torch.device("cuda" if on_gpu and not fixed else "cpu"), config)
    if task == "cls":
        return PlannedRows(task, round_up(recipe.max_length, multiple))
    head = full.get_output_embeddings()
    is_full = recipe.loss == "full" or full.base_model is full or hasattr(head, "lora_A")
    kind = "full" if is_full else "chunked"
    terms = token_loss_of(recipe)
    if task == "seq2seq":
        source = round_up(recipe.max_source_length, multiple)
        target = round_up(recipe.max_target_length, multiple)
        return PlannedRows(task, source, target, loss_kind=kind, terms=terms)
    positions = getattr(config, "max_position_embeddings", None) or MAX_POSITIONS
    length = recipe.block_size or min(positions, MAX_LENGTH)
    if recipe.preference_loss:
        return PlannedRows(task, round_up(length, multiple), loss_kind=kind, per_sample=2)
    masked = recipe.packing == "documents" and not recipe.data_path
    length = round_up(length, multiple) if recipe.packing == "none" and not recipe.data_path else length
    return PlannedRows(task, length, masked=masked, loss_kind=kind, terms=terms)
