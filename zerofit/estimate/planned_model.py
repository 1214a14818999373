"""The model of a plan: its configuration, its parameters, and how a traced copy of it is built."""

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transformers

from zerofit.estimate.pipeline_stages import WHOLE, Stage, stages_of, steps_of_stage, weights_of_stage
from zerofit.estimate.planned_rows import OF_WORDS, TASKS, Rows
from zerofit.estimate.traced_shares import divide_experts, split_layers
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.tracer import ATTENTION, Tracer, TraceSettings, outer_lists, reduced_configuration
from zerofit.estimate.weights import MASTER_BYTES, Weight, Weights
from zerofit.model.compilation import ends_of, fuse_gelu
from zerofit.model.configuration import has_head
from zerofit.model.families import family_of
from zerofit.model.lora import inject_lora
from zerofit.model.norms import fuse_norms, round_embeddings
from zerofit.model.parameters import hidden_matrices
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.optimizers import parameter_groups

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class PlannedModel:
    """The model that a plan is made for, with its rows.

    Args:
        recipe: the training recipe.
        full: the model with its adapter, on "meta".
        cpu_kernels, own_kernels: see TraceSettings.
        teacher: of transformers, on "meta": what each process holds beside the student; None without one.
    """

    recipe: Any
    task: str
    config: Any
    full: Any  # of transformers
    rows: Rows
    on_gpu: bool
    cpu_kernels: bool = False
    own_kernels: bool = True
    teacher: Any = None

    def __post_init__(self) -> None:
        self._tracers: dict[tuple[Any, ...], Any] = {}
        self._shares: dict[tuple[int, Stage], Weights] = {}

    def with_options(self, recipe: Any, rows: Rows) -> "PlannedModel":
        """Return a copy with other options that change its passes alone; tracers are shared."""
        other = replace(self, recipe=recipe, rows=rows)
        other._shares, other._tracers = self._shares, self._tracers
        return other

    @property
    def teacher_weights(self) -> int:
        """The number of the teacher's weights; 0 without one."""
        return sum(each.numel() for each in self.teacher.parameters()) if self.teacher is not None else 0

    def weights_of(self, layout: ParallelLayout, stage: Stage | None = None) -> Weights:
        """Return the weights of the rank that has most, or of a stage; before ZeRO shards them."""
        if stage is None:
            several = [self.weights_of(layout, one) for one in self.stages(layout)]
            return max(several, key=lambda weights: weights.trained)
        key = layout.tensor, stage
        if key in self._shares:
            return self._shares[key]
        if layout.pipeline > 1:
            plan, body = family_of(self.config).stage_plan, self.full.base_model_prefix
            assert plan is not None  # check_layout has refused other families
            found = weights_of_stage(self.weights_of(replace(layout, pipeline=1), WHOLE), stage, plan, body)
        else:
            found = self.weights if layout.tensor == 1 else self.weights.shared(self._share_sizes(layout.tensor))
        self._shares[key] = found
        return found

    def stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return the stages of a pipeline that may need most; without a pipeline one that stands for the model."""
        return stages_of(layout, self.full)

    @property
    def num_layers(self) -> int:
        return getattr(self.config.get_text_config(), "num_hidden_layers", 0)

    def hidden_bytes(self, precision: str, layout: ParallelLayout, micro_batch: int) -> int:
        """Bytes of the hidden states between two layers; each rank that shares these has a part of the tokens."""
        tokens = -(-micro_batch * self.rows.per_sample * self.rows.length // layout.tensor)
        return tokens * self.config.get_text_config().hidden_size * DTYPES[precision].itemsize

    def steps(
        self,
        precision: str,
        sharding: Any,
        layout: ParallelLayout,
        stage: Stage,
        batch_size: int,
        *,
        evaluated: bool = False,
        rows: Rows | None = None,
    ) -> list[TracedStep]:
        """The passes of a batch through the model, or through a stage of it.

        Args:
            sharding: DeepSpeed's own DeepSpeedZeroConfig, or FullyShards; None without either.
        """
        tracer = self.tracer(precision, sharding, layout, evaluated, rows)
        if layout.pipeline == 1:
            return tracer.steps(batch_size)
        weights, hidden = self.weights_of(layout, stage), self.hidden_bytes(precision, layout, batch_size)
        width = self.dtypes(precision, sharding is not None)[0].itemsize
        embedded = hidden * layout.tensor if layout.tensor > 1 and not evaluated else 0
        return steps_of_stage(tracer.steps(batch_size, stage.layers), stage, weights, hidden, width, embedded=embedded)

    def _share_sizes(self, tensor: int) -> dict[str, int]:
        """{name of a parameter: elements of a rank's share}, of the model with few layers."""
        with torch.device("meta"):
            model = make_model(reduced_configuration(self.config), self.task, torch.float32, None, traced=False)
        split_layers(model, tensor)
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    @cached_property
    def weights(self) -> Weights:
        muon = hidden_matrices(self.full) if self.recipe.optim == "muon" else {}
        groups = enumerate(parameter_groups(self.full, self.recipe))
        numbers = {id(parameter): number for number, group in groups for parameter in group["params"]}
        every = tuple(
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
        embeddings, outputs = self.full.get_input_embeddings(), self.full.get_output_embeddings()
        untied = outputs is not None and outputs.weight is not embeddings.weight
        heads = [name for name, one in self.full.named_parameters() if untied and one is outputs.weight]
        ends = {
            id(one): number
            for number, end in enumerate(ends_of(self.full))
            for module in end
            for one in module.parameters()
        }
        gathered = {name: ends[id(one)] for name, one in self.full.named_parameters() if id(one) in ends}
        linear = [each for each in self.full.modules() if isinstance(each, torch.nn.Linear) and each is not outputs]
        frozen = [each.weight.numel() for each in linear if not each.weight.requires_grad]
        quantised = sum(frozen) if self.recipe.quantised else 0
        return Weights(every, stacks, "".join(heads), gathered, quantised)

    @property
    def checkpoint_bytes(self) -> int:
        return MASTER_BYTES * self.weights.trained + self.weights.state_bytes(self.recipe.optim)

    @property
    def keeps_layers(self) -> bool:
        """True if ZeRO-3 keeps layers between their forward and their backward pass: not where a loss in chunks is
        checked by forward passes before training (zero3_weights.py)."""
        return self.task == "cls" or self.rows.loss_kind == "full"

    def dtypes(self, precision: str, computes_in_half: bool) -> tuple[torch.dtype, torch.dtype]:
        """Return (of what is trained, of what is frozen) in the passes: DeepSpeed and FSDP2 compute with weights in
        half precision; without them those that are trained stay in fp32."""
        half = DTYPES[precision]
        return (half if computes_in_half else torch.float32), half

    def trace_settings(
        self, precision: str, sharding: Any, layout: ParallelLayout, evaluated: bool = False
    ) -> TraceSettings:
        """Return the settings of a trace under a strategy: passes that compute alike share their traces."""
        trained, frozen = self.dtypes(precision, sharding is not None)
        is_third_stage = int(getattr(sharding, "stage", 0)) == 3
        autocast = None if sharding is not None or precision == "fp32" else torch.bfloat16
        return TraceSettings(
            dtype=frozen if self.recipe.lora else trained,
            autocast=autocast,
            on_gpu=self.on_gpu,
            cpu_kernels=self.cpu_kernels,
            own_kernels=self.own_kernels,
            loss=self.rows.loss_kind,
            evaluated=evaluated,
            tensor=layout.tensor,
            sequence=layout.sequence,
            keeps_inputs=is_third_stage and sharding.memory_efficient_linear,
            watched=is_third_stage,
            offloaded=self.recipe.activation_offload and self.on_gpu and not evaluated,
            experts=layout.data_size if getattr(sharding, "divided", ()) else 0,
            compiled=bool(self.recipe.compiles),
            float8=self.recipe.float8,
        )

    def tracer(
        self,
        precision: str,
        sharding: Any,
        layout: ParallelLayout,
        evaluated: bool = False,
        rows: Rows | None = None,
    ) -> Tracer:
        """A tracer of the passes as they run under a strategy, on the recipe's rows or on others."""
        settings = self.trace_settings(precision, sharding, layout, evaluated)
        trained, _ = self.dtypes(precision, sharding is not None)
        recomputed = not evaluated and self.recipe.gradient_checkpointing
        key = settings, rows = replace(settings, recomputed=recomputed), self._rows(rows or self.rows, precision)
        if key not in self._tracers:
            build = self._build(settings, trained, rows)
            self._tracers[key] = Tracer(self.config, self.full, build, rows, settings)
        return self._tracers[key]

    def _rows(self, rows: Rows, precision: str) -> Rows:
        """Packed documents take a mask under sdpa; the flash kernels of a GPU, in half precision, take lengths."""
        dropped = any(getattr(self.config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
        named = self.recipe.attn_implementation
        on_gpu = self.on_gpu and not self.cpu_kernels
        flash = on_gpu and precision != "fp32" and (named not in ("sdpa", "eager") if named else not dropped)
        return replace(rows, masked=rows.masked and not flash)

    def _build(self, settings: TraceSettings, trained: torch.dtype, rows: Rows) -> Callable[[Any], torch.nn.Module]:
        def build(config: Any) -> torch.nn.Module:
            model = make_model(config, self.task, settings.dtype, self.recipe.attn_implementation, traced=True)
            add_planned_lora(model, self.recipe, self.task)
            split_layers(model, settings.tensor)
            divide_experts(model, settings.experts, settings.dtype)
            for parameter in model.parameters():
                if self.recipe.lora and parameter.requires_grad:
                    parameter.data = parameter.data.to(trained)
            fuse_norms(model)
            if not self.recipe.residual_in_fp32:
                round_embeddings(model)
            rows.install(model)
            return model

        return build


def make_model(
    config: Any, task: str, dtype: torch.dtype, attention: str | None, traced: bool
) -> transformers.PreTrainedModel:
    """A model with random weights, on the default device."""
    name = OF_WORDS if task == "cls" and has_head(config, "TokenClassification") else TASKS[task]
    auto_class = getattr(transformers, name)

    def build(attention: str | None) -> Any:
        return fuse_gelu(auto_class.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention))

    if attention == "eager":
        return build("eager")
    if traced:
        with contextlib.suppress(ValueError):  # a model without sdpa
            return build(ATTENTION)
    return build(None)


def add_planned_lora(model: Any, recipe: Any, task: str) -> None:
    """Put the recipe's adapter into the model, without reading a weight (zerofit/model/lora.py reads some)."""
    if not recipe.lora:
        return
    named = recipe.lora_target_modules or []
    is_pattern = len(named) == 1 and not re.fullmatch(r"[\w.,-]+", named[0])
    inject_lora(model, recipe, named[0] if is_pattern else None)
    trained = [name for text in recipe.lora_modules_to_save or () for name in text.split(",") if name]
    trained += ["classifier", "score"] if task == "cls" else []
    resized = [model.get_input_embeddings(), model.get_output_embeddings()] if recipe.resize_embeddings else []
    for name, module in model.named_modules():
        if any(module is each for each in resized) or name.rpartition(".")[2] in trained:
            module.requires_grad_(True)
