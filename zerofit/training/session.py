"""One launch of a task from its first check on: what it is, who watches it, and what is known if it fails."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.checkpoint.hub import HubRepository
from zerofit.checkpoint.mirror import Mirror
from zerofit.health.failure import explain_failure
from zerofit.health.out_of_memory import RunFacts, host_advice
from zerofit.health.shutdown import ShutdownHandler
from zerofit.health.watchdog import Watchdog
from zerofit.launch.ranks import RANKS
from zerofit.model.adapter_folder import trained_on_configuration
from zerofit.recipe.errors import explain_failures_with
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import say
from zerofit.record.timeline import Timeline
from zerofit.strategy.strategy import Strategy
from zerofit.training.configuration import RunConfiguration, check_model, resolve
from zerofit.training.measurement import Measurement, measurement_from_environment

if TYPE_CHECKING:
    from zerofit.training.stored_model import StoredModel

LONG = 12.0  # times watchdog_minutes: reading, placing or writing a whole model
PATIENCE = {"save": 4.0}  # the same, of the loop's phases


@dataclass(frozen=True)
class Session:
    """A launch whose configuration is resolved.

    Args:
        stored: the model that is evaluated, or answers; None: one is trained.
        measurement: what is done in place of training; None: nothing.
        mirror: where checkpoints are copied to, on the main process; None: nowhere.
        hub: where the model is pushed to, the same.
    """

    config: RunConfiguration
    timeline: Timeline
    watchdog: Watchdog
    shutdown: ShutdownHandler
    facts: RunFacts
    stored: "StoredModel | None"
    measurement: Measurement | None
    mirror: Mirror | None = None
    hub: HubRepository | None = None

    @classmethod
    def open(
        cls,
        task: str,
        recipe: TaskRecipe,
        timeline: Timeline,
        watchdog: Watchdog,
        stored: "StoredModel | None" = None,
        mirror: Mirror | None = None,
    ) -> "Session":
        """Resolve the configuration, and see that the output folder is free.

        Raises:
            UserError: anything that can be found wrong before data is read.
        """
        config = resolve(task, recipe if stored is None else stored.recipe)
        if config.strategy.layout.is_main:
            config.folder.lock()
        hub, repository = None, config.recipe.push_to_hub
        if repository and config.recipe.trains:
            watchdog.phase("hub", patience=math.inf)
            hub = RANKS.first_on_rank_0("hub", partial(HubRepository.open, repository))
        shutdown = ShutdownHandler(config.recipe.max_hours, timeline.started, watchdog.stop_requested)
        session = cls(
            config,
            timeline,
            watchdog,
            shutdown,
            RunFacts(config.strategy),
            stored,
            measurement_from_environment() if config.recipe.trains else None,
            mirror,
            hub,
        )
        explain_failures_with(session.explain)
        watchdog.phase("data", patience=math.inf)
        timeline.mark("checks")
        return session

    @property
    def task(self) -> str:
        return self.config.task

    @property
    def recipe(self) -> TaskRecipe:
        return self.config.recipe

    @property
    def strategy(self) -> Strategy:
        return self.config.strategy

    @property
    def folder(self) -> RunFolder:
        return self.config.folder

    @property
    def is_main(self) -> bool:
        return self.strategy.layout.is_main

    def say(self, *lines: str) -> None:
        say(*lines, main=self.is_main)

    def with_strategy(self, strategy: Strategy, notes: Sequence[str] = ()) -> "Session":
        """The same with another strategy, and further notes for the log."""
        self.facts.strategy = strategy
        return replace(self, config=replace(self.config, strategy=strategy, notes=(*self.config.notes, *notes)))

    def model_configuration(self, auto_class: Any) -> Any:
        """The configuration of the model, which the task needs an `auto_class` of transformers for.

        Raises:
            UserError: there is no such model, the strategy cannot split it, or it has too few positions.
        """
        config = check_model(self.task, self.recipe, self.strategy, auto_class)
        if self.stored is not None:
            return self.stored.configuration(config)
        if (adapter := self.config.adapter) is not None:
            config, _ = trained_on_configuration(adapter, config, self.recipe)
        return config

    def phase(self, name: str, update: int) -> None:
        """Tell the watchdog where the loop is."""
        self.watchdog.phase(name, update or None, patience=PATIENCE.get(name, 1.0))

    def advise(self, copied: int | None = None) -> None:
        """Tell the watchdog what would help from here on, should this rank be killed because memory ran out.

        Args:
            copied: bytes of the copies that checkpoints are written from, where there are some from now on.
        """
        self.facts.copied = self.facts.copied if copied is None else copied
        self.watchdog.advise(host_advice(self.recipe, self.facts))

    def explain(self, error: Exception) -> int | None:
        """Tell of memory that ran out, and of a process that is gone; of any other error nothing is known here."""
        phase, _ = self.watchdog.at
        if self.measurement is not None and (code := self.measurement.explain(error, phase)) is not None:
            return code
        watchdog = self.watchdog
        return explain_failure(error, watchdog.at, RANKS.named, watchdog.waits_for, self.task, self.recipe, self.facts)
