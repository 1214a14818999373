"""Pushes a run's model/ to a repository of the Hugging Face hub, at its end.

huggingface_hub does it, in a thread of its own, so that a hub which does not answer cannot hold the run.
"""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from zerofit.checkpoint.mirror import reason
from zerofit.model.configuration import work_offline_without_network
from zerofit.recipe.errors import UserError

FINISH_S = 4 * 3600.0  # at the end of a run: 100 GB at 60 Mbit/s


class HubRepository:
    """A repository that can be written, on the main process of a run."""

    def __init__(self, name: str, api: HfApi):
        self.name, self._api = name, api

    @classmethod
    def open(cls, name: str) -> "HubRepository":
        """See that there is such a repository, or make a private one, and that it can be written. Raises UserError:
        there is no connection, or no right to write."""
        work_offline_without_network()
        disable_progress_bars()
        api = HfApi()
        try:
            name = api.create_repo(name, private=True, exist_ok=True).repo_id
            api.auth_check(name, write=True)
        except Exception as error:  # of the connection, the hub, or the name
            raise UserError(
                f"push_to_hub = {name!r}: nothing can be pushed there ({reason(error)}). Log in with `hf auth login`, "
                "or train without it, and push the run's model/ later with `hf upload`"
            ) from None
        return cls(name, api)

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
