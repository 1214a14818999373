"""A stage of a pipeline as DeepSpeed's engine calls it: one layer, which is all of the stage."""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import module as deepspeed_module
from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule

from zerofit.data.collate import Batch
from zerofit.model.attention import packed_rows
from zerofit.model.stages import is_tied, whole_model
from zerofit.strategy.grid import layer_groups, replaced
from zerofit.strategy.layout import ParallelLayout

AtTheEnd = Callable[[torch.nn.Module, Batch], torch.Tensor]


class GradientSchedule(TrainSchedule):
    """Forward and backward passes in turn (1F1B, Narayanan et al. 2021), and the sum of gradients over replicas; the
    optimizer's step waits for the decision about the update."""

    def steps(self) -> Any:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, OptimizerStep)]


class StageModule(PipelineModule):
    """The layers of this rank's stage.

    Each rank has the micro-batches of its replica, so nothing but hidden states goes from stage to stage.
    """

    def __init__(self, model: torch.nn.Module, layout: ParallelLayout):
        groups = layer_groups(layout)
        known = replaced(deepspeed_module, "PipelineParallelGrid", lambda **_: groups)
        with known, contextlib.redirect_stdout(io.StringIO()):  # it prints the partition
            super().__init__(layers=[model] * layout.pipeline, topology=groups.topology(), partition_method="uniform")
            self._share_tied_weight(model, layout)
        self._is_first, self._is_last = layout.stage == 0, layout.stage == layout.pipeline - 1
        self._batches: Iterator[Batch] = iter(())
        self._parts = getattr(model, "token_parts", None)  # under tensor parallelism

    def _share_tied_weight(self, model: Any, layout: ParallelLayout) -> None:
        """Let the first stage and the last add up the gradients of a weight that both of them hold."""
        self._tied = []
        if not is_tied(whole_model(model)):
            return
        stride = layout.world_size // layout.pipeline
        for first in range(stride):
            ends = [first, first + (layout.pipeline - 1) * stride]
            group = torch.distributed.new_group(ends)
            if layout.rank in ends:
                weight = model.get_input_embeddings().weight
                weight.ds_pipe_replicated = layout.stage > 0  # DeepSpeed's mark: its norm counts the weight once
                self._tied = [(weight, group)]

    def get_tied_weights_and_groups(self) -> Any:
        return self._tied

    def feed(self, batches: Iterable[Batch], at_the_end: AtTheEnd, phase: Callable[[str], None]) -> None:
        """Lay the micro-batches ready that the next passes will read, one after another.

        Args:
            at_the_end: (the last stage's model, batch) -> what it finds.
            phase: is told "forward" as each pass begins.
        """
        self._batches, self._at_the_end, self._phase = iter(batches), at_the_end, phase

    def forward(self, incoming: torch.Tensor) -> torch.Tensor:
        """(B, T) token ids in the first stage, hidden states in others -> hidden states, or of the last stage what
        `at_the_end` finds. Hidden states are (B, T, H), or this rank's tokens of them (TokenParts)."""
        self._phase("forward")
        model, batch = self.forward_funcs[0], next(self._batches).to(incoming.device)
        inputs: dict[str, Any] = dict(batch.inputs)
        if not self._is_first:
            shape = inputs.pop("input_ids").shape
            inputs["inputs_embeds"] = incoming if self._parts is None else self._parts.receive(incoming, shape)
        if self._is_last:
            return self._at_the_end(model, replace(batch, inputs=inputs))
        for targets in ("labels", "next_tokens"):
            inputs.pop(targets, None)
        with packed_rows(batch.packed):
            hidden = model.base_model(**inputs).last_hidden_state
        return hidden if self._parts is None else self._parts.send(hidden)
