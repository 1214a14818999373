"""How long a run is, and what is due after which update."""

from dataclasses import dataclass

from zerofit.data.order import samples_of_run
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.words import counted
from zerofit.record.terminal import rounded
from zerofit.strategy.batches import BatchSizes


@dataclass(frozen=True)
class RunLength:
    """Counts are samples and updates."""

    num_samples: int  # in the training set
    total_samples: int  # seen over the whole run
    num_updates: int
    batches: BatchSizes

    def consumed(self, updates: int) -> int:
        """Samples seen after this many updates."""
        return min(self.batches.consumed(updates), self.total_samples)

    def epoch(self, updates: int) -> float:
        """Epochs done after this many updates."""
        return self.consumed(updates) / self.num_samples

    def ends_an_epoch(self, update: int) -> bool:
        """Whether some epoch was completed by this update (counted from 1)."""
        return self.consumed(update) // self.num_samples > self.consumed(update - 1) // self.num_samples

    @property
    def describe(self) -> str:
        """For the log."""
        epochs = counted(rounded(self.epoch(self.num_updates)), "epoch")
        return f"{counted(self.num_updates, 'update')}, {epochs}"

    def is_last(self, update: int) -> bool:
        return update == self.num_updates

    def is_due(self, strategy: str | None, steps: int | None, update: int) -> bool:
        """Whether what happens at the end of each epoch (`strategy` is epoch), or every `steps` updates, happens
        after this one."""
        if strategy == "epoch":
            return self.ends_an_epoch(update)
        return update % steps == 0 if steps else False


def run_length(recipe: TrainingRecipe, num_samples: int, batches: BatchSizes) -> RunLength:
    """The length of the run in samples and updates."""
    total = samples_of_run(recipe.num_train_epochs, recipe.max_train_steps, num_samples, batches.consumed)
    return RunLength(num_samples, total, batches.num_updates(total), batches)
