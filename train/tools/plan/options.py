"""The options of `zerofit plan`, beside those of the recipe."""

from dataclasses import dataclass

from train.recipe.fields import option
from train.tools.tool_recipe import StrategiesOptions, parse_bytes

NOT_NEEDED = ("no data:", "no tokenizer:")  # problems of a recipe that is trained, and not of one that is planned


@dataclass
class PlanOptions(StrategiesOptions):
    """What fits, predicted without a GPU; options of the training recipe change that"""

    strategies: list[str] = option(  # noqa: RUF009
        ["all"],
        "Names in accelerate_configs/, or .yaml files: zero2,zero3 or zero2 zero3; all: every pair there is.",
        common=True,
    )
    num_gpus: int = option(
        1, "GPUs of all machines together, one process each.", positive=True, aliases=("num_processes", "world_size"),
        common=True,
    )  # fmt: skip
    gpus_per_node: int = option(8, "GPUs of one machine.", positive=True, aliases=("local_world_size",), common=True)
    gpu: str | None = option(None, "A known GPU, such as h100-80gb, or cpu.", common=True)
    gpu_memory: str | None = option(
        None, "Memory of one GPU, e.g. 80GiB; by default that of --gpu. It overrides the table.", common=True
    )
    host_memory: str | None = option(
        None, "Memory of one machine, e.g. 1TiB; by default host memory is predicted and not checked.", common=True
    )
    batch_sizes: list[str] = option(  # noqa: RUF009
        ["auto"], "auto: find the largest micro-batch; or the micro-batches to predict: 1,8,40.", common=True
    )
    max_batch_size: int = option(4096, "No larger micro-batch is tried.", positive=True)
    architecture: str | None = option(
        None,
        "The model's shape by a name that is known offline, or a folder with a config.json, where the weights that "
        "the recipe names are not at hand.",
    )
    top: int = option(10, "Rows of the table.", positive=True)
    json: str | None = option(None, "Write the predictions to this file; - for standard output.")

    @property
    def sizes(self) -> list[int] | None:
        """The micro-batches that were named, in order; None: auto."""
        texts = [text for given in self.batch_sizes for text in given.split(",") if text]
        return None if texts == ["auto"] else sorted({int(text) for text in texts})

    def problems(self) -> list[str]:
        found = [problem for problem in super().problems() if not problem.startswith(NOT_NEEDED)]
        for name in ("gpu_memory", "host_memory"):
            try:
                parse_bytes(getattr(self, name) or "1GiB")
            except ValueError:
                found.append(f"{name} = {getattr(self, name)!r}: expected a size such as 80GiB, 800MiB or 24GB")
        given = " ".join(self.batch_sizes)
        try:
            is_wrong = self.sizes is not None and (not self.sizes or self.sizes[0] < 1)
        except ValueError:
            is_wrong = True
        if is_wrong:
            found.append(f"batch_sizes = {given!r}: expected auto, or sizes such as 8,16,40")
        if not self.gpu and not self.gpu_memory:
            found.append("no device: set --gpu, e.g. --gpu h100-80gb, or --gpu_memory, e.g. --gpu_memory 80GiB")
        if self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node:
            found.append(
                f"num_gpus = {self.num_gpus} is no multiple of gpus_per_node = {self.gpus_per_node}: set --num_gpus "
                f"{self.num_gpus // self.gpus_per_node * self.gpus_per_node} or another --gpus_per_node"
            )
        return found
