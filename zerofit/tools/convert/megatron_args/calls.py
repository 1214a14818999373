"""The Megatron programs that a script starts: which, with which arguments, on how many processes."""

import re
import shlex
from dataclasses import dataclass, field

from zerofit.recipe.errors import UserError
from zerofit.tools.convert.megatron_args.shell import Shell, ShellCommand

PREPARATION = ("preprocess_data.py", "merge_datasets.py")
SEARCH = "llmacc.pretrain"  # a module that chooses the degrees itself, and then starts pretrain_gpt.py
PROGRAM = re.compile(
    rf"(pretrain_\w+\.py|finetune_llama\.py|{'|'.join(map(re.escape, (*PREPARATION, SEARCH)))})(?=\s|$)"
)
PRINTS = ("ls", "cat", "cp", "mv", "rm", "sed", "grep", "chmod", "git", "wget")
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_gpus", "gpus-per-node", "ntasks-per-node")
MACHINES = ("nnodes", "num_nodes", "nodes")
DIFF = re.compile(r'\s*[<>]\s+(--|\w+=|export |["}])')  # redirections do not begin like that
TO_FILL_IN = re.compile(r"(--[\w-]+)[ =](<[A-Za-z][^<>\n]*>)")  # to bash, < and > are redirections
SBATCH = re.compile(r"^#SBATCH\s+(--[\w-]+)[= ](\S+)", re.MULTILINE)


@dataclass
class Call:
    """A program that is started.

    Args:
        launcher: the words before the program's name; those of an outer launcher, and of #SBATCH, come last.
        line: of the script; 0 for a command line that was typed.
        shell: the script that was run; None for a command line that was typed.
    """

    program: str
    arguments: list[str]
    launcher: list[str] = field(default_factory=list)
    line: int = 0
    shell: Shell | None = None

    @property
    def reasons(self) -> dict[str, str]:
        """{variable: why it has no value}."""
        return self.shell.reasons if self.shell else {}

    @property
    def doubts(self) -> list[str]:
        """Notes on tests of the script that need a value which is not known."""
        return list(self.shell.doubts.values()) if self.shell else []

    def file(self, path: str) -> str | None:
        """The text of a file that the script writes."""
        return self.shell.file(path) if self.shell else None

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
        said = self.of_launcher(PROCESSES)
        if said is None and self.launcher and re.match(r"(.*/)?(python|torchrun)", self.launcher[0]):
            return 1
        return _number(said)

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
        UserError: it starts none of them, or lines are to be mended.
    """
    shell = Shell(text, given)
    for number, line in enumerate(shell.lines, 1):
        if found := TO_FILL_IN.search(line):
            raise UserError(f"line {number}: {found[1]} {found[2]} is to be filled in")
        if DIFF.match(line):
            raise UserError(f"line {number}: < or > at its beginning is a mark of a diff. Give the file itself")
    for command in shell.read().commands:
        if command.words[0].startswith("--"):
            raise UserError(f"line {command.line}: {command.words[0]} is a command: is a backslash missing before it?")
    calls = [call for command in shell.commands for call in _calls_of(command, shell)]
    if not calls:
        names = ", ".join(("pretrain_*.py", "finetune_llama.py", *PREPARATION, SEARCH))
        unset = "".join(f". {missing(name, shell.reasons)}" for name in shell.unset[:1])
        raise UserError(f"the script starts none of {names}{unset}")
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


def _calls_of(command: ShellCommand, shell: Shell) -> list[Call]:
    words = command.words
    if words[0] in PRINTS:
        return []
    quoted = next((word for word in words if PROGRAM.search(word) and not _program(word)), None)
    if quoted:  # ssh machine "torchrun ..."
        words = shlex.split(quoted)
    if not any(map(_program, words)):
        return []
    call = call_of(words)
    job = [word for option in SBATCH.findall(shell.text) for word in option]
    call.launcher += command.outer + job
    call.line, call.shell = command.line, shell
    return [call]


def missing(name: str, reasons: dict[str, str]) -> str:
    """A message for a variable without a value: its name, why, and what to type."""
    why = f" ({reasons[name]})" if name in reasons else ""
    return f"${name}{why} is not known. Add {name}=value after the script's name"
