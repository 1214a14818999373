"""The options of `zerofit compare`."""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.tools.compare.search_variable import BATCHES, LENGTHS, SearchVariable
from zerofit.tools.lengths_option import length_problems, read_lengths
from zerofit.tools.tool_recipe import LaunchedStrategiesOptions, parse_bytes


@dataclass
class CompareOptions(LaunchedStrategiesOptions):
    """The largest batch of each strategy; zero2:lora=true, say, is zero2 with an option of the recipe of its own"""

    memory_limit: str | None = option(
        None,
        "Memory of one process' device, e.g. 24GiB; by default what the device has (of a CPU: a share of its memory).",
        common=True,
    )
    simulate: str | None = option(
        None,
        "Without a GPU: on simulated devices of this size (24GiB) or of a known GPU's (a100-80gb). The launches are "
        "real, and tensors hold no data. With --steps, updates are timed on this machine after that.",
        common=True,
    )
    host_memory_limit: str | None = option(None, "Host memory of all processes together; by default what there is.")
    batch_sizes: list[str] = option(  # noqa: RUF009
        ["auto"], "auto: find the largest; or the sizes to try, of one process: 8,16,40.", common=True
    )
    lengths: list[str] | None = option(  # noqa: RUF009
        None,
        "Find the longest of these rows that each strategy holds, instead of its largest batch: 8k,16k,32k. The "
        "micro-batch is per_device_train_batch_size of the recipe, or else 1.",
        common=True,
    )
    granularity: int = option(1, "The largest batch is found as a multiple of this, up to 4096.", positive=True)
    steps: int = option(5, "Timed updates of each batch size, after one or two that warm up.", minimum=2)
    trial_minutes: float = option(20.0, "A launch that shows nothing new for this long has timed out.", positive=True)
    finish: bool = option(
        False,
        "Then train each strategy at its best batch, as the recipe says, and compare times and held-out figures.",
        common=True,
    )
    output: str | None = option(None, "Folder of the comparison; by default outputs/compare-RECIPE.")

    @property
    def times_simulated(self) -> bool:
        """Whether updates are timed on this machine, and sizes found on simulated devices."""
        return bool(self.simulate and self.source("steps"))

    @property
    def variable(self) -> SearchVariable:
        return LENGTHS if self.lengths else BATCHES

    @property
    def sizes(self) -> list[int] | None:
        """The batch sizes or lengths that were named, in order; None: auto."""
        if self.lengths:
            return read_lengths(self.lengths)
        texts = [text for given in self.batch_sizes for text in given.split(",") if text]
        return None if texts == ["auto"] else sorted({int(text) for text in texts})

    def problems(self) -> list[str]:
        problems = super().problems()
        for name in ("memory_limit", "host_memory_limit"):
            try:
                parse_bytes(getattr(self, name) or "1GiB")
            except ValueError:
                problems.append(f"{name} = {getattr(self, name)!r}: expected a size such as 24GiB, 800MiB or 24GB")
        if self.simulate:
            without_use = ("finish", "host_memory_limit", *(["steps"] if self.lengths else []))
            without_use = [name for name in without_use if self.source(name)]
            problems += [f"{name}: no effect with simulate = {self.simulate}. Remove it" for name in without_use]
        if self.lengths:
            without_use = ("batch_sizes", "granularity", "finish")
            return problems + length_problems(self, automatic=False, without_use=without_use)
        try:
            wrong = self.sizes is not None and (not self.sizes or self.sizes[0] < 1)
        except ValueError:
            wrong = True
        given = " ".join(self.batch_sizes)
        if wrong:
            problems.append(f"batch_sizes = {given!r}: expected auto, or sizes such as 8,16,40")
        elif self.sizes and self.source("granularity"):
            problems.append(f"granularity = {self.granularity} has no effect with batch_sizes = {given}. Remove it")
        return problems
