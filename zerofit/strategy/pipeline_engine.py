"""A pipeline: each rank has some of the layers, and an update's micro-batches pass through all of them."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule

from zerofit.compat.deepspeed import run_schedule, with_groups
from zerofit.data.collate import Batch
from zerofit.model.attention import packed_rows
from zerofit.model.stages import is_tied, whole_model
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import LossSum
from zerofit.strategy.engines import DeepSpeedEngine
from zerofit.strategy.layout import ParallelLayout, model_groups

EVALUATED_PER_STAGE = 8  # micro-batches a stage: of these it waits for p - 1 in (8 p + p - 1), about a ninth
LastStage = Callable[[torch.nn.Module, Batch], torch.Tensor]


class GradientSchedule(TrainSchedule):
    """Forward and backward passes in turn (1F1B, Narayanan et al. 2021), and the sum of gradients over replicas; the
    optimizer's step waits for the decision about the update."""

    def steps(self) -> Any:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class StageModule(PipelineModule):
    """The layers of this rank's stage. Each rank has the micro-batches of its replica, so nothing but hidden states
    goes from stage to stage.

    Attributes:
        batches: the micro-batches that the next passes read, one after another.
        last_stage: (the last stage's model, batch) -> what its forward pass returns.
        phase: is told "forward" as each pass begins.
    """

    batches: Iterator[Batch]
    last_stage: LastStage
    phase: Callable[[str], None]

    def __init__(self, model: torch.nn.Module, layout: ParallelLayout):
        groups = model_groups(layout)
        with with_groups(groups), contextlib.redirect_stdout(io.StringIO()):  # it prints the partition
            super().__init__(layers=[model] * layout.pipeline, topology=groups.topology(), partition_method="uniform")
        self._is_first = layout.pipeline_stage == 0
        self._is_last = layout.pipeline_stage == layout.pipeline - 1
        self._parts = getattr(model, "token_parts", None)  # under tensor parallelism
        # The first stage and the last add up the gradients of a tied weight, which both of them hold.
        self._tied: list[tuple[Any, Any]] = []
        stride = layout.world_size // layout.pipeline
        for first in range(stride) if is_tied(cast(Any, whole_model(model))) else ():
            ends = [first, first + (layout.pipeline - 1) * stride]
            group = torch.distributed.new_group(ends)
            if layout.rank in ends:
                weight = cast(Any, model).get_input_embeddings().weight
                weight.ds_pipe_replicated = not self._is_first  # DeepSpeed's mark: its norm counts the weight once
                self._tied = [(weight, group)]

    def get_tied_weights_and_groups(self) -> Any:
        return self._tied

    def forward(self, incoming: torch.Tensor) -> torch.Tensor:
        """Run this stage: (B, T) token ids in the first stage, hidden states in others -> hidden states, or of the
        last stage what `last_stage` finds. Hidden states are (B, T, H), or this rank's tokens of them (TokenParts)."""
        self.phase("forward")
        model = self.forward_funcs[0]
        batch = next(self.batches).to(incoming.device)
        inputs: dict[str, Any] = dict(batch.inputs)
        if not self._is_first:
            shape = inputs.pop("input_ids").shape
            inputs["inputs_embeds"] = incoming if self._parts is None else self._parts.receive(incoming, shape)
        if self._is_last:
            return self.last_stage(model, replace(batch, inputs=inputs))
        for targets in ("labels", "next_tokens"):
            inputs.pop(targets, None)
        with packed_rows(batch.packed):
            hidden = model.base_model(**inputs).last_hidden_state
        return hidden if self._parts is None else self._parts.send(hidden)


class PipelineEngine(DeepSpeedEngine):
    """ZeRO-1 across the replicas of a pipeline, through DeepSpeed's engine."""

    _shapes: frozenset[torch.Size] = frozenset()  # (B, T) of the micro-batches that passed through last

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        self.stage = StageModule(model, self.layout)
        super()._prepare(self.stage, recipe, optimizer)
        return PipelinedModel(self)

    def forward_backward(self, micro_batches: Sequence[Batch], loss_sum: LossSum, scale: float) -> list[torch.Tensor]:
        self._expect_gradients(micro_batches)
        losses: list[torch.Tensor] = []
        if not micro_batches:
            return losses

        def scaled_loss(model: Any, batch: Batch) -> torch.Tensor:
            loss = loss_sum(model, batch)
            losses.append(loss.detach().float())
            return loss * (scale * self.engine.gradient_accumulation_steps())  # which DeepSpeed divides by

        self._pass_through(GradientSchedule, micro_batches, scaled_loss, self.phase)
        return losses or [torch.zeros((), device=self.device) for _ in micro_batches]

    def losses(self, batches: Iterable[Batch], loss_sum: LossSum) -> Iterator[tuple[Batch, torch.Tensor]]:
        remaining = iter(batches)
        most = EVALUATED_PER_STAGE * self.layout.pipeline
        while chunk := list(islice(remaining, most)):
            found = self.evaluate(chunk, lambda model, batch: loss_sum(model, batch).float())
            yield from zip(chunk, found or [torch.zeros((), device=self.device) for _ in chunk])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], last_stage: LastStage) -> list[torch.Tensor]:
        """Return what the last stage finds for each batch, without dropout; nothing on the others."""
        from deepspeed.runtime.pipe.schedule import InferenceSchedule

        found = []
        training = self.stage.training

        def noted(model: Any, batch: Batch) -> torch.Tensor:
            found.append(last_stage(model, batch))
            return found[-1]

        self.stage.eval()
        torch.distributed.barrier()  # DeepSpeed's eval_batch has one here, against deadlocks
        self._pass_through(InferenceSchedule, batches, noted, lambda phase: None)
        self.stage.train(training)
        return found

    def _pass_through(
        self, schedule: Any, batches: Sequence[Batch], last_stage: LastStage, phase: Callable[[str], None]
    ) -> None:
        """All stages have the same micro-batches. So they agree, without a word, on when to exchange shapes, for which
        the host waits: before the first one where all have a new shape in common, before each where they differ."""
        engine = self.engine
        ids: list[Any] = [batch.inputs["input_ids"] for batch in batches]
        shapes = frozenset(each.shape for each in ids)
        if shapes != self._shapes:
            engine.reset_activation_shape()
        engine.dynamic_shape = len(shapes) > 1
        self._shapes = shapes
        self.stage.batches = iter(batches)
        self.stage.last_stage = last_stage
        self.stage.phase = phase
        # DeepSpeed would wait for them to be copied.
        engine.set_dataiterator((each.to(self.device, non_blocking=True), None) for each in ids)
        run_schedule(engine, schedule(len(batches), engine.num_stages, engine.stage_id))

    def _take_step(self) -> None:
        run_schedule(self.engine, None)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        # In the order of the whole model; each goes to the main process by itself.
        own = {name: each for name, each in self.module.named_parameters() if not each.ds_pipe_replicated}
        sends = self.layout.data_rank == 0 and self.layout.tensor_rank == 0 and not self.is_main
        senders = {
            name: rank
            for rank, names in enumerate(self.gather_objects([*own] if sends else []) or [])
            for name in names
        }
        for name, shape_of in self.whole.named_parameters():
            weight = self._joined(own[name]) if name in own else None
            if weight is not None and sends:
                torch.distributed.send(weight.contiguous(), 0)
            if self.is_main:
                if weight is None:
                    weight = torch.empty(shape_of.shape, dtype=shape_of.dtype, device=self.device)
                    torch.distributed.recv(weight, senders[name])
                yield name, weight.to("cpu", copy=True)
        if self.is_main:
            yield from ((name, buffer.cpu()) for name, buffer in self.stored_buffers().items())

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        raise NotImplementedError("the layers are on several ranks: generate with the exported model")


class PipelineInference(PipelineEngine):
    """Engine of a pipeline that only evaluates."""

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        model.requires_grad_(False)
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        config["zero_optimization"] = {"stage": 0}  # other stages need an optimizer
        self.stage = StageModule(model, self.layout)
        self.engine = self.accelerator.prepare(self.stage)
        return PipelinedModel(self)


class PipelinedModel:
    """The model of a pipeline: called with one micro-batch on all ranks together, without gradients; each rank of a
    replica gets the loss, or the logits, that its last stage has found."""

    def __init__(self, engine: PipelineEngine):
        self._engine = engine

    def train(self, mode: bool = True) -> "PipelinedModel":
        self._engine.stage.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        return self.train(False)

    def __call__(self, **inputs: Any) -> Any:
        def found(model: Any, batch: Batch) -> Any:
            output = model(**batch.inputs)
            return output if torch.is_tensor(output) else output.logits

        engine = self._engine
        grid = self._engine.engine.grid
        held: list[Any] = [each.cpu() for each in engine.evaluate([Batch(inputs, 0, 0, 0, [])], found)] or [None]
        last = grid.stage_to_global(engine.layout.pipeline - 1)
        torch.distributed.broadcast_object_list(held, last, grid.get_pipe_parallel_group(), engine.device)
        output = held[0].to(engine.device)
        return output if output.dim() == 0 else SimpleNamespace(logits=output)
