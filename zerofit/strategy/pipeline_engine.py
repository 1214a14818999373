"""The engines of pipeline parallelism: each rank has some of the layers, and micro-batches pass from rank to rank."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.schedule import InferenceSchedule, OptimizerStep, TrainSchedule

from zerofit.compat.deepspeed import run_schedule, with_groups
from zerofit.data.collate import Batch
from zerofit.model.attention import packed_rows
from zerofit.model.stages import is_tied, whole_model
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import LossSum
from zerofit.strategy.engines import DeepSpeedEngine
from zerofit.strategy.layout import ParallelLayout, model_groups

EVALUATED_PER_STAGE = 8  # micro-batches per stage and pass; p stages then idle (p - 1) / (9 p - 1), about a ninth
LastStage = Callable[[torch.nn.Module, Batch], torch.Tensor]


class GradientSchedule(TrainSchedule):
    """The 1F1B schedule (Narayanan et al. 2021) and the sum of gradients over replicas, without the optimizer's step:
    that waits for the decision about the update."""

    def steps(self) -> Any:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class StageModule(PipelineModule):
    """The layers of this rank's stage. Every rank reads its replica's micro-batches itself, so stages exchange only
    hidden states.

    Attributes:
        batches: the micro-batches of the next passes, in order.
        last_stage: the forward pass of the last stage, (its model, batch) -> tensor.
        phase: called with "forward" when a forward pass begins.
    """

    batches: Iterator[Batch]
    last_stage: LastStage
    phase: Callable[[str], None]

    def __init__(self, model: torch.nn.Module, layout: ParallelLayout):
        groups = model_groups(layout)
        with with_groups(groups), contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the partition
            super().__init__(layers=[model] * layout.pipeline, topology=groups.topology(), partition_method="uniform")
        self._is_first = layout.pipeline_stage == 0
        self._is_last = layout.pipeline_stage == layout.pipeline - 1
        self._parts = getattr(model, "token_parts", None)  # TokenParts under tensor parallelism
        # The first and the last stage both hold a tied weight, and sum its gradients.
        self._tied: list[tuple[Any, Any]] = []
        stride = layout.world_size // layout.pipeline
        for first in range(stride) if is_tied(cast(Any, whole_model(model))) else ():
            ends = [first, first + (layout.pipeline - 1) * stride]
            group = torch.distributed.new_group(ends)
            if layout.rank in ends:
                weight = cast(Any, model).get_input_embeddings().weight
                weight.ds_pipe_replicated = not self._is_first  # DeepSpeed's norm then counts the weight once
                self._tied = [(weight, group)]

    def get_tied_weights_and_groups(self) -> Any:
        return self._tied

    def forward(self, incoming: torch.Tensor) -> torch.Tensor:
        """Run this stage: (B, T) token ids in the first stage, hidden states in the others -> hidden states, or in the
        last stage what `last_stage` returns. Hidden states are (B, T, H), or of this rank's tokens (TokenParts)."""
        self.phase("forward")
        model = self.forward_funcs[0]
        batch = next(self.batches).to(incoming.device)
        inputs: dict[str, Any] = dict(batch.inputs)
        if not self._is_first:
            shape = inputs.pop("input_ids").shape
            inputs["inputs_embeds"] = incoming if self._parts is None else self._parts.receive(incoming, shape)
        if self._is_last:
            return self.last_stage(model, replace(batch, inputs=inputs))
        for target in ("labels", "next_tokens"):
            inputs.pop(target, None)
        with packed_rows(batch.packed):
            hidden = model.base_model(**inputs).last_hidden_state
        return hidden if self._parts is None else self._parts.send(hidden)


class PipelineEngine(DeepSpeedEngine):
    """The engine that trains a pipeline with DeepSpeed's, and ZeRO-1 across its replicas."""

    _shapes: frozenset[torch.Size] = frozenset()  # (B, T) of the previous pass's micro-batches

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
            return loss * (scale * self.engine.gradient_accumulation_steps())  # DeepSpeed divides by it

        self._pass_through(GradientSchedule, micro_batches, scaled_loss, self.phase)
        return losses or [torch.zeros((), device=self.device) for _ in micro_batches]

    def losses(self, batches: Iterable[Batch], loss_sum: LossSum) -> Iterator[tuple[Batch, torch.Tensor]]:
        remaining = iter(batches)
        while chunk := list(islice(remaining, EVALUATED_PER_STAGE * self.layout.pipeline)):
            losses = self.evaluate(chunk, lambda model, batch: loss_sum(model, batch).float())
            yield from zip(chunk, losses or [torch.zeros((), device=self.device) for _ in chunk])

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], last_stage: LastStage) -> list[torch.Tensor]:
        """Return `last_stage`'s output for each batch, without dropout, in the last stage; in the others nothing."""
        outputs = []
        training = self.stage.training

        def keep_output(model: Any, batch: Batch) -> torch.Tensor:
            outputs.append(last_stage(model, batch))
            return outputs[-1]

        self.stage.eval()
        torch.distributed.barrier()  # DeepSpeed's eval_batch has one here, against deadlocks
        self._pass_through(InferenceSchedule, batches, keep_output, lambda phase: None)
        self.stage.train(training)
        return outputs

    def _pass_through(
        self, schedule: Any, batches: Sequence[Batch], last_stage: LastStage, phase: Callable[[str], None]
    ) -> None:
        """Run a schedule over the micro-batches. The stages exchange the shape of hidden states, for which the host
        waits, only once where all micro-batches have a new shape, and for each one where their shapes differ. All
        stages read the same micro-batches, and so decide this alike without communication."""
        engine = self.engine
        ids: list[Any] = [batch.inputs["input_ids"] for batch in batches]
        shapes = frozenset(tokens.shape for tokens in ids)
        if shapes != self._shapes:
            engine.reset_activation_shape()
        engine.dynamic_shape = len(shapes) > 1
        self._shapes = shapes
        self.stage.batches = iter(batches)
        self.stage.last_stage = last_stage
        self.stage.phase = phase
        # DeepSpeed's own copy to the device would block.
        engine.set_dataiterator((tokens.to(self.device, non_blocking=True), None) for tokens in ids)
        run_schedule(engine, schedule(len(batches), engine.num_stages, engine.stage_id))

    def _take_step(self) -> None:
        run_schedule(self.engine, None)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        # In the order of the whole model; weights are sent to the main process one at a time.
        local = {name: weight for name, weight in self.module.named_parameters() if not weight.ds_pipe_replicated}
        sends = self.layout.data_rank == 0 and self.layout.tensor_rank == 0 and not self.is_main
        senders = {
            name: rank
            for rank, names in enumerate(self.gather_objects([*local] if sends else []) or [])
            for name in names
        }
        for name, meta in self.whole.named_parameters():
            weight = self._joined(local[name]) if name in local else None
            if weight is not None and sends:
                torch.distributed.send(weight.contiguous(), 0)
            if self.is_main:
                if weight is None:
                    weight = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
                    torch.distributed.recv(weight, senders[name])
                yield name, weight.to("cpu", copy=True)
        if self.is_main:
            yield from ((name, buffer.cpu()) for name, buffer in self.stored_buffers().items())

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        raise NotImplementedError("the layers are on several ranks: generate with the exported model")


class PipelineInference(PipelineEngine):
    """The engine of a pipeline that only evaluates."""

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        model.requires_grad_(False)
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        config["zero_optimization"] = {"stage": 0}  # other stages need an optimizer
        self.stage = StageModule(model, self.layout)
        self.engine = self.accelerator.prepare(self.stage)
        return PipelinedModel(self)


class PipelinedModel:
    """The model of a pipeline, to be called without gradients. All ranks call it together with one micro-batch; each
    rank gets the loss, or the logits, of its replica's last stage."""

    def __init__(self, engine: PipelineEngine):
        self._engine = engine

    def train(self, mode: bool = True) -> "PipelinedModel":
        self._engine.stage.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        return self.train(False)

    def __call__(self, **inputs: Any) -> Any:
        def loss_or_logits(model: Any, batch: Batch) -> Any:
            output = model(**batch.inputs)
            return output if torch.is_tensor(output) else output.logits

        engine = self._engine
        grid = engine.engine.grid
        outputs = engine.evaluate([Batch(inputs, 0, 0, 0, [])], loss_or_logits)
        shared: list[Any] = [output.cpu() for output in outputs] or [None]
        last = grid.stage_to_global(engine.layout.pipeline - 1)
        torch.distributed.broadcast_object_list(shared, last, grid.get_pipe_parallel_group(), engine.device)
        output = shared[0].to(engine.device)
        return output if output.dim() == 0 else SimpleNamespace(logits=output)
