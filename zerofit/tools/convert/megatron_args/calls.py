"""A Megatron command line: the program, its arguments, and the launcher that starts it."""

import re
from dataclasses import dataclass, field

PREPARATION = ("preprocess_data.py", "merge_datasets.py")
SEARCH = "llmacc.pretrain"  # a module that chooses the degrees itself, and then starts pretrain_gpt.py
PROGRAM = re.compile(
    rf"(pretrain_\w+\.py|finetune_llama\.py|{'|'.join(map(re.escape, (*PREPARATION, SEARCH)))})(?=\s|$)"
)
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_gpus", "gpus-per-node", "ntasks-per-node")
MACHINES = ("nnodes", "num_nodes", "nodes")


@dataclass
class Call:
    """A program that is started.

    Args:
        launcher: the words before the program's name.
    """

    program: str
    arguments: list[str]
    launcher: list[str] = field(default_factory=list)

    def of_launcher(self, names: tuple[str, ...]) -> str | None:
        """The value of the launcher's option with one of these names; empty: it has none."""
        for word, following in zip(self.launcher, [*self.launcher[1:], ""]):
            name, equals, value = word.lstrip("-").partition("=")
            if word.startswith("-") and name in names:
                return value if equals else "" if following.startswith("-") else following
        return None

    @property
    def processes(self) -> int | None:
        """Processes on one machine; None where the launcher does not say."""
        said = self.of_launcher(PROCESSES)
        if said is None and self.launcher and re.match(r"(.*/)?(python|torchrun)", self.launcher[0]):
            return 1
        return _number(said)

    @property
    def machines(self) -> int:
        return _number(self.of_launcher(MACHINES)) or 1


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None


def call_of(words: list[str]) -> Call:
    """Read a command line: a launcher and a program, or arguments of pretrain_gpt.py alone."""
    at = next((index for index, word in enumerate(words) if PROGRAM.search(word)), None)
    if at is None:
        return Call("pretrain_gpt.py", list(words))
    found = PROGRAM.search(words[at])
    return Call(found[1] if found else "", words[at + 1 :], words[:at])
