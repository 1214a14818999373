"""Pushes a run's model/ to a repository of the Hugging Face hub, at its end or with each checkpoint.

huggingface_hub does it, in a thread of the main process. Training does not wait for it, and goes on if it fails.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from zerofit.checkpoint.mirror import reason
from zerofit.model.configuration import work_offline_without_network
from zerofit.recipe.errors import UserError

FINISH_S = 4 * 3600.0  # at the end of a run: 100 GB at 60 Mbit/s


class HubRepository:
    """A repository that can be written, on the main process of a run.

    Args:
        name: owner/name.
    """

    def __init__(self, name: str, api: HfApi):
        self.name, self._api = name, api
        self._thread: threading.Thread | None = None
        self._is_failing = False
        self._messages: list[str] = []

    @classmethod
    def open(cls, name: str) -> "HubRepository":
        """See that there is such a repository, or make a private one, and that it can be written.

        Raises:
            UserError: there is no connection, or no right to write.
        """
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

    def messages(self) -> list[str]:
        """Lines for the log since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def finish(self, folder: Path) -> list[str]:
        """Push the run's model/. Returns lines for the log. Never fails."""
        is_done = self._is_idle(FINISH_S)
        if is_done:
            self._is_failing = False
            self._start(self._push, folder, "trained")
            is_done = self._is_idle(FINISH_S)
        if self._is_failing or not is_done:
            return [*self.messages(), f"hub         not pushed. Later: `hf upload {self.name} {folder}`"]
        return [*self.messages(), f"hub         {self._api.endpoint}/{self.name}"]

    def _is_idle(self, wait_s: float = 0.0) -> bool:
        """Return True if nothing is being pushed, or nothing more within so long."""
        if self._thread is None:
            return True
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._thread = threading.Thread(target=target, args=args, name="hub", daemon=True)
        self._thread.start()

    def _push(self, folder: Path, message: str) -> None:
        try:
            self._api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except Exception as error:  # of the connection or the hub; none may end the training
            if not self._is_failing:
                self._messages.append(f"warning   {self.name} cannot be pushed to ({reason(error)})")
            self._is_failing = True
        else:
            self._is_failing = False
