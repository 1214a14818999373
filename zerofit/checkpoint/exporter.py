"""The trained model as a folder for others, and in a repository of the Hugging Face hub: huggingface_hub pushes it
in a thread of its own, so that a hub which does not answer cannot hold the run."""

import contextlib
import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from transformers import PreTrainedTokenizerBase

from zerofit.checkpoint.mirror import reason
from zerofit.model.configuration import TRAINED_WITH, work_offline_without_network
from zerofit.model.export import NamedWeights, export_model, review_export, write_model_card, write_other_files
from zerofit.recipe.errors import UserError, first_line
from zerofit.record.model_card import model_card
from zerofit.strategy.strategy import without_sharding

if TYPE_CHECKING:
    from zerofit.training.run import Run


class ModelExporter:
    """Writes model/ of a run and of its checkpoints: the whole model, or the adapter where the run has one."""

    def __init__(self, run: "Run") -> None:
        self._engine = run.engine
        self._adapter = run.adapter
        self._tokenizer_of_run = run.data.tokenizer
        self.writes_all = run.adapter is None  # the whole model, and not only what is trained
        self._task = run.task
        self._recipe = run.recipe
        self._environment = run.environment
        self._tokenizer_of_run.init_kwargs[TRAINED_WITH] = run.recipe.inputs

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """A copy: checkpoints are written in a thread, and training must not use the same tokenizer meanwhile."""
        return copy.deepcopy(self._tokenizer_of_run)

    def weights(self) -> NamedWeights:
        """The full tensors that are written, on the main process; nothing elsewhere. All ranks read it to its end."""
        return self._engine.weights() if self.writes_all else self._engine.trained_weights()

    def write(self, weights: NamedWeights, held_out: dict[str, float], folder: Path) -> list[str]:
        """Write the folder, on the main process: the weights first, since no other file may cost them. Returns what
        could not be written beside them, each with the reason. Raises Exception: the weights could not be written."""
        module = self._engine.whole
        is_adapter = self._adapter is not None
        if self._adapter is not None:
            failed = self._adapter.save(module, dict(weights), self._tokenizer, folder)
        else:
            failed = export_model(module, weights, self._tokenizer, folder)

        def card() -> None:
            base = self._adapter.base if self._adapter is not None else None
            name = type(module).__name__
            text = model_card(
                self._task, self._recipe, held_out, self._environment, is_adapter, model_class=name, base=base
            )
            write_model_card(folder, text)

        failed |= write_other_files({"README.md": card})
        return [f"{name} ({first_line(error)})" for name, error in failed.items()]

    def review(self, folder: Path) -> list[str]:
        """Load a folder back, without its weights. Returns lines for the log: what was read, and what others stumble
        over. Raises RuntimeError: weights are missing, or have another shape."""
        in_full = without_sharding() if self._engine.strategy.shards_parameters else contextlib.nullcontext()
        with in_full:
            return review_export(folder, type(self._engine.whole))


FINISH_S = 4 * 3600.0  # at the end of a run: 100 GB at 60 Mbit/s


class HubRepository:
    """A repository that can be written, on the main process of a run; a private one is made where there is none.
    Raises UserError: there is no connection, or no right to write."""

    def __init__(self, name: str):
        work_offline_without_network()
        disable_progress_bars()
        self._api = HfApi()
        try:
            self.name = self._api.create_repo(name, private=True, exist_ok=True).repo_id
            self._api.auth_check(self.name, write=True)
        except Exception as error:  # of the connection, the hub, or the name
            raise UserError(
                f"push_to_hub = {name!r}: nothing can be pushed there ({reason(error)}). Log in with `hf auth login`, "
                "or train without it, and push the run's model/ later with `hf upload`"
            ) from None

    def finish(self, folder: Path) -> list[str]:
        """Push the run's model/. Returns lines for the log. Never fails."""
        pushed = self._api.upload_folder(
            repo_id=self.name, folder_path=folder, commit_message="trained", run_as_future=True
        )
        try:
            pushed.result(FINISH_S)
        except Exception as error:  # of the connection or the hub, or it took too long; none may end the training
            said = f"warning   {self.name} cannot be pushed to ({reason(error)})"
            return [said, f"hub         not pushed. Later: `hf upload {self.name} {folder}`"]
        return [f"hub         {self._api.endpoint}/{self.name}"]
