"""The trained model, or its adapter, as a folder for others."""

import contextlib
import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from zerofit.model.adapter_folder import BASE_SAMPLE, differs
from zerofit.model.export import Weights, export_model, write_beside, write_card
from zerofit.model.export_review import review_export
from zerofit.model.folders import TRAINED_WITH
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import read_record
from zerofit.record.model_card import model_card
from zerofit.strategy.strategy import without_sharding

if TYPE_CHECKING:
    from zerofit.training.run import Run


class ModelExporter:
    """Writes model/ of a run and of its checkpoints: the whole model, or the adapter where the run has one."""

    def __init__(self, run: "Run") -> None:
        self._engine, self._adapter, self._tokenizer_of_run = run.engine, run.adapter, run.data.tokenizer
        self._task, self._recipe, self._environment = run.task, run.recipe, run.environment
        self._tokenizer_of_run.init_kwargs[TRAINED_WITH] = run.recipe.inputs

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy: checkpoints are written in a thread, and training must not use the same tokenizer meanwhile."""
        return copy.deepcopy(self._tokenizer_of_run)

    @property
    def writes_all(self) -> bool:
        """True if the whole model is written, and not only what is trained."""
        return self._adapter is None

    def weights(self) -> Weights:
        """The full tensors that are written, on the main process; nothing elsewhere. All ranks read it to its end."""
        return self._engine.weights() if self.writes_all else self._engine.trained_weights()

    def check_base(self, folder: Path) -> None:
        """Raises UserError if the frozen weights are others than those that a checkpoint's adapter was trained on."""
        own = self._adapter.base_sample if self._adapter is not None else {}
        recorded = (read_record(folder / BASE_SAMPLE).get("modules") if own else None) or {}
        if self._engine.from_main([name for name in own if name in recorded and differs(recorded[name], own[name])]):
            raise UserError(
                f"model_name_or_path = {self._recipe.model_name_or_path!r} has other weights than those that the "
                f"adapter in {folder} was trained on. Bring these back, or train anew in another --output_dir"
            )

    def write(self, weights: Weights, held_out: dict[str, float], folder: Path) -> list[str]:
        """Write the folder, on the main process: the weights first, since no other file may cost them. Returns what
        could not be written beside them, each with the reason. Raises Exception: the weights could not be written."""
        module, is_adapter = self._engine.whole, self._adapter is not None
        if self._adapter is not None:
            failed = self._adapter.save(module, dict(weights), self._tokenizer, folder)
        else:
            failed = export_model(module, weights, self._tokenizer, folder)

        def card() -> None:
            base, name = self._adapter.base if self._adapter is not None else None, type(module).__name__
            text = model_card(
                self._task, self._recipe, held_out, self._environment, is_adapter, model_class=name, base=base
            )
            write_card(folder, text)

        failed |= write_beside({"README.md": card})
        return [f"{name} ({first_line(error)})" for name, error in failed.items()]

    def review(self, folder: Path) -> list[str]:
        """Load a folder back, without its weights. Returns lines for the log: what was read, and what others stumble
        over. Raises RuntimeError: weights are missing, or have another shape."""
        in_full = without_sharding() if self._engine.strategy.shards_parameters else contextlib.nullcontext()
        with in_full:
            return review_export(folder, type(self._engine.whole))
