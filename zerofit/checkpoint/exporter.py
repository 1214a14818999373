"""The exporter, which writes the trained model to a folder, and the push of that folder to the Hugging Face hub.
huggingface_hub pushes in a thread of its own, so that a hub which does not answer cannot block the run."""

import contextlib
import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from transformers import PreTrainedTokenizerBase

from zerofit.checkpoint.mirror import error_reason
from zerofit.model.configuration import TRAINED_WITH, work_offline_without_network
from zerofit.model.export import NamedWeights, export_model, review_export, write_model_card, write_other_files
from zerofit.recipe.errors import UserError, first_line
from zerofit.record.model_card import model_card
from zerofit.strategy.strategy import without_sharding

if TYPE_CHECKING:
    from zerofit.training.run import Run


class ModelExporter:
    """The writer of model/ of a run and of its checkpoints: the whole model, or the adapter if the run trains one."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self.writes_all = run.adapter is None  # the whole model, and not only the trained weights
        run.data.tokenizer.init_kwargs[TRAINED_WITH] = run.recipe.inputs

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """Return a copy of the tokenizer: a thread writes checkpoints while training uses the tokenizer itself."""
        return copy.deepcopy(self._run.data.tokenizer)

    def weights(self) -> NamedWeights:
        """Yield the exported tensors, unsharded, on the main process; nothing on the other ranks. All ranks must read
        it to its end."""
        return self._run.engine.weights() if self.writes_all else self._run.engine.trained_weights()

    def write(self, weights: NamedWeights, held_out: dict[str, float], folder: Path) -> list[str]:
        """Write the folder, on the main process. The weights are first: a failure of another file must not lose them.
        Returns the other files that could not be written, with the reasons. Raises Exception: the weights could not be
        written."""
        module = self._run.engine.whole
        adapter = self._run.adapter
        if adapter is not None:
            failed = adapter.save(module, dict(weights), self._tokenizer, folder)
        else:
            failed = export_model(module, weights, self._tokenizer, folder)

        def write_card() -> None:
            described = self._run.task, self._run.recipe, held_out, self._run.environment, adapter is not None
            base = adapter.base if adapter is not None else None
            write_model_card(folder, model_card(*described, model_class=type(module).__name__, base=base))

        failed |= write_other_files({"README.md": write_card})
        return [f"{name} ({first_line(error)})" for name, error in failed.items()]

    def review(self, folder: Path) -> list[str]:
        """Load a folder back, without its weights. Returns lines for the log: what was read, and what other programs
        may reject. Raises RuntimeError: weights are missing, or have another shape."""
        with without_sharding() if self._run.engine.strategy.shards_parameters else contextlib.nullcontext():
            return review_export(folder, type(self._run.engine.whole))


PUSH_TIMEOUT_S = 4 * 3600.0  # 100 GB at 60 Mbit/s


class HubRepository:
    """A repository of the hub to which the main process of a run pushes. A private one is created if it is missing.
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
                f"push_to_hub = {name!r}: nothing can be pushed there ({error_reason(error)}). Log in with "
                "`hf auth login`, or train without it, and push the run's model/ later with `hf upload`"
            ) from None

    def finish(self, folder: Path) -> list[str]:
        """Push the run's model/. Returns lines for the log. Never fails."""
        pushed = self._api.upload_folder(
            repo_id=self.name, folder_path=folder, commit_message="trained", run_as_future=True
        )
        try:
            pushed.result(PUSH_TIMEOUT_S)
        except Exception as error:  # of the connection or the hub, or a timeout; none may end the training
            warning = f"warning   {self.name} cannot be pushed to ({error_reason(error)})"
            return [warning, f"hub         not pushed. Later: `hf upload {self.name} {folder}`"]
        return [f"hub         {self._api.endpoint}/{self.name}"]
