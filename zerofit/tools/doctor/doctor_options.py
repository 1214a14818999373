"""The options of `zerofit doctor`, beside those of the recipe."""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import StrategyOptions


@dataclass
class DoctorOptions(StrategyOptions):
    """What holds, who set it, and whether it can run here; options of the training recipe are looked at as well"""

    task: str | None = option(
        None,
        "The task; by default the name of the recipe's folder.",
        choices=("clm", "cls", "seq2seq"),
        common=True,
    )
    strategy: str | None = option(
        None,
        "A name in accelerate_configs/, or a .yaml file; by default accelerate's default configuration where there is "
        "one, else ddp, or single for one process.",
        common=True,
    )
    deepspeed_config: str | None = option(None, "A DeepSpeed JSON without a YAML, as under torchrun.")
    num_processes: int | None = option(
        None,
        "Processes of all machines together; by default those of the YAML, else one for each accelerator.",
        positive=True,
        common=True,
    )
    num_machines: int | None = option(None, "Machines; by default those of the YAML, else 1.", positive=True)
