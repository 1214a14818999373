"""The Megatron programs that a script starts: which, with which arguments, on how many processes."""

import re
from dataclasses import dataclass, field

from train.recipe.errors import UserError
from train.tools.convert.megatron_args.expressions import UNKNOWN, unknown_in
from train.tools.convert.megatron_args.shell import Shell

PREPARATION = ("preprocess_data.py", "merge_datasets.py")
SEARCH = "llmacc.pretrain"  # a module that chooses the degrees itself, and then starts pretrain_gpt.py
PROGRAM = re.compile(
    rf"(pretrain_\w+\.py|finetune_llama\.py|{'|'.join(map(re.escape, (*PREPARATION, SEARCH)))})(?=\s|$)"
)
PRINTS = ("echo", "printf", "ls", "cat", "cp", "rm", "sed", "grep", "tee")
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_gpus", "gpus-per-node", "ntasks-per-node")
MACHINES = ("nnodes", "num_nodes", "nodes")


@dataclass
class Call:
    """A program that is started.

    Args:
        launcher: the words before the program's name.
        files: what the script writes to files, by name.
        reasons: {variable: why it has no value}.
    """

    program: str
    arguments: list[str]
    launcher: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def of_launcher(self, names: tuple[str, ...]) -> str | None:
        """The value of the launcher's option with one of these names."""
        for word, following in zip(self.launcher, [*self.launcher[1:], ""]):
            name, equals, value = word.lstrip("-").partition("=")
            if word.startswith("-") and name in names:
                return value if equals else following
        return None

    @property
    def processes(self) -> int | None:
        """Processes on one machine; None where the script does not say."""
        processes = self.of_launcher(PROCESSES)
        words = self.launcher
        one_process = words and not words[0].endswith("deepspeed") and not unknown_in(" ".join(words))
        return 1 if processes is None and one_process else _number(processes)

    @property
    def machines(self) -> int:
        return _number(self.of_launcher(MACHINES)) or 1


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None


def calls_in(text: str, given: dict[str, str]) -> list[Call]:
    """The Megatron programs that a script starts, in order.

    Args:
        given: {variable: value} from the command line.

    Raises:
        UserError: it starts none of them, or one with an unknown variable.
    """
    shell = Shell(given)
    shell.read(text)
    calls, unknown = [], []
    for command in shell.commands:
        started = _calls_of(command.words, shell)
        calls += started
        if not started and "--num-layers" in " ".join(command.words):
            unknown += [name for name in unknown_in(" ".join(command.words)) if name]
    if not calls:
        remedy = ""
        if unknown:
            remedy = f" as far as can be seen: {missing(unknown[0], shell.reasons)}"
        names = ", ".join(("pretrain_*.py", "finetune_llama.py", *PREPARATION, SEARCH))
        raise UserError(f"the script starts none of {names}{remedy}")
    return calls


def call_of(words: list[str]) -> Call:
    """A command line that was typed: a launcher and a program, or arguments of pretrain_gpt.py alone."""
    at = next((index for index, word in enumerate(words) if _program(word)), None)
    if at is None:
        return Call("pretrain_gpt.py", list(words))
    return Call(_program(words[at]), words[at + 1 :], words[:at])


def _program(word: str) -> str | None:
    found = None if re.search(r"\s", word) else PROGRAM.search(word)
    return found[1] if found else None


def _calls_of(words: list[str], shell: Shell) -> list[Call]:
    if words[0] in PRINTS:
        return []
    if words[0] == "eval":
        return _nested(" ".join(words[1:]), shell)
    for index, word in enumerate(words):
        if _program(word):
            arguments = words[index + 1 :]
            return [Call(_program(word), arguments, words[:index], shell.files, shell.reasons)]
        if PROGRAM.search(word):  # bash -c "torchrun ..."
            return _nested(word, shell)
    return []


def _nested(text: str, shell: Shell) -> list[Call]:
    inner = Shell(shell.given)
    inner.variables, inner.files, inner.reasons = shell.variables, shell.files, shell.reasons
    inner.read(UNKNOWN.sub(lambda found: f"${{{found[1]}}}" if found[1] else "\\?", text))
    return [call for command in inner.commands for call in _calls_of(command.words, shell)]


def missing(name: str, reasons: dict[str, str]) -> str:
    """A message for a variable without a value: its name, why, and what to type."""
    why = f" ({reasons[name]})" if name in reasons else ""
    return f"${name}{why} is not known. Add {name}=value after the script's name"
