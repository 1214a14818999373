"""What a shell script would start, found by bash itself in a sandbox where nothing exists that could be started.

Each command is written down by stubs.sh. What only the machine of the job can tell is marked as unknown:
a variable that nothing sets, the output of a command, `<Specify path>`. A message names it where its value is needed.
To bash's tests such a variable is empty, as it would be here. Folders and programs that the script names by their path
are made as bash misses them: the script is run again until it misses nothing.
"""

import os
import re
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path

from zerofit.recipe.errors import UserError
from zerofit.tools.convert.megatron_args.sandbox import HOME, SECONDS, Sandbox, Unconfined

OPEN, CLOSE = "\ue000", "\ue001"  # of the mark of a value that is not known, within texts
UNKNOWN = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")  # the variable's name; none: only a running shell has the value
STUBS = Path(__file__).with_name("stubs.sh")
BLANK = "\ue002"
ALL_RUNS = 60  # seconds
PLACEHOLDER = re.compile(r"\b(\w+)=(<[A-Za-z][^<>\n]*>[^\s;]*)")  # NAME=<Specify path>/file, as scripts are published
UNSET = re.compile(r"line \d+: \$?(\w+): (.*)")
REQUIRED = re.compile(r"\$\{(\w+):?\?")  # ${NAME:?message}
MISSING = re.compile(r"line \d+: (.*/.*): (?:No such file or directory|Is a directory)")
BROKEN = re.compile(r": line (\d+): ((?:syntax error|unexpected EOF).*)")


def unknown(name: str) -> str:
    """The mark for the unknown value of a variable."""
    return f"{OPEN}{name}{CLOSE}"


def unknown_in(text: str) -> list[str]:
    """The variables whose unknown values are marked in a text."""
    return UNKNOWN.findall(text)


def shown(text: str) -> str:
    """A text for people: unknown values are written as $NAME."""
    return UNKNOWN.sub(lambda found: f"${found[1]}", text)


@dataclass
class ShellCommand:
    """What a script starts.

    Attributes:
        words: the program and its arguments.
        outer: the launcher around it, of `srun ... bash -c "program ..."`.
    """

    line: int
    words: list[str]
    outer: list[str]


@dataclass
class Shell:
    """Runs a script.

    Args:
        given: values from the command line; they win over what the script says. Digits are its arguments.

    Attributes:
        commands: what would be started, in order.
        files: {path: text} of what the script writes; see `file`.
        reasons: {variable: why its value is not known}.
        doubts: {variable: a note on a test that needs its value}.
    """

    text: str
    given: dict[str, str]
    commands: list[ShellCommand] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.unset: list[str] = []  # variables that nothing sets, in the order in which bash missed them
        self.paths: list[str] = []  # of files and programs
        self.lines = self.text.replace("\r\n", "\n").split("\n")

    def read(self) -> "Shell":
        """Run the script. Raises UserError: it cannot be run here, or bash cannot read it."""
        script = PLACEHOLDER.sub(self._fill_in, "\n".join(self.lines))
        try:
            with Sandbox() as sandbox:
                end, again = time.monotonic() + ALL_RUNS, True
                while again and time.monotonic() < end:
                    result = self._run(sandbox, script)
                    again = result["in_time"] and self._learn(result["stderr"])
        except Unconfined as error:
            raise UserError(
                f"bash cannot be confined here ({error}). Type what it starts after --: torchrun ... pretrain_gpt.py"
            ) from None
        if again or not result["in_time"]:
            raise UserError(f"the script has not ended in {SECONDS} s. Type what it starts after --")
        if broken := BROKEN.search(result["stderr"]):
            raise UserError(f"line {broken[1]} of the script: bash says {broken[2]}")
        self.files = {path: self._named(text) for path, text in result["files"].items()}
        try:
            self._read_record(result["files"])
        except (KeyError, ValueError):
            raise UserError("the script writes into the record of commands. Type what it starts after --") from None
        return self

    def file(self, path: str) -> str | None:
        """The text of a file that the script writes, as it names it; None: a program writes it, or nothing does."""
        text = self.files.get(_absolute(path))
        return None if text is None or UNKNOWN.fullmatch(text.strip()) else text

    def line_of(self, name: str) -> int | None:
        """The first line that sets a variable."""
        sets = re.compile(rf"\b{name}\+?=")
        return next((number for number, line in enumerate(self.lines, 1) if sets.search(line)), None)

    def _read_record(self, files: dict[str, str]) -> None:
        tests = [line.split() for line in files.get("/.calls/tests", "").splitlines()]
        self.doubts = {
            name: f"line {line} of the script tests ${name}, which was not met. Say {name}=value where it matters"
            for line, name in reversed(tests)
        }
        self.commands = [self._command(files[path].split("\0")) for path in files.get("/.calls/order", "").split()]

    def _fill_in(self, found: re.Match) -> str:
        line = found.string.count("\n", 0, found.start()) + 1
        self.reasons[found[1]] = f"line {line}: {found[2]} is to be filled in"
        return f"{found[1]}={unknown(found[1])}"

    def _run(self, sandbox: Sandbox, script: str) -> dict:
        given = {"PWD": "."} | {name: value for name, value in self.given.items() if not name.isdigit()}
        arguments = {int(name): value for name, value in self.given.items() if name.isdigit()}
        arguments |= {int(name): unknown(name) for name in self.unset if name.isdigit()}
        places = [arguments.get(place, unknown(str(place))) for place in range(1, max(arguments, default=0) + 1)]
        preamble = [
            f"__open={OPEN} __close={CLOSE} __blank={BLANK} __line=0",
            STUBS.read_text(encoding="utf-8"),
            *(
                f'function {path} {{ command_not_found_handle {path} "$@"; }}'
                for path in self.paths
                if re.fullmatch(r"[\w./+-]+", path)
            ),
            f"__before() {{\n{self._before(given)}\n}}",
            "trap '__at=$LINENO; __before \"$@\"' DEBUG",
        ]
        folders = ["/.calls", *(os.path.dirname(_absolute(path)) for path in self.paths)]
        env = {"PATH": "/nowhere", "LC_ALL": "C", "BASH_ENV": "/.stubs", **given}
        files = {"/.stubs": "\n".join(preamble), f"/{HOME}/script.sh": script}
        return sandbox.run(files, folders, ["./script.sh", *places], env)

    def _before(self, given: dict[str, str]) -> str:
        """What bash does before each command: options that scripts change, the values from the command line, and
        variables that nothing sets, which are empty in a test."""
        names = [name for name in self.unset if not name.isdigit()]
        empty = [f"[[ ${{{name}-}} != {unknown(name)} ]] || {name}=" for name in names]
        marked = [f"[[ ${{{name}[*]-}} ]] || {name}={unknown(name)}" for name in names]
        return "\n".join(
            [
                "set +ex -u",
                "[[ ${BASH_SOURCE[1]-} == /.stubs ]] || __line=$__at",
                *(f"{name}={shlex.quote(value)}" for name, value in given.items()),
                "case $BASH_COMMAND in '[ '* | '[[ '* | 'test '*)",
                *marked,
                '__tests "$BASH_COMMAND" "$@"',
                *empty,
                ":;;",
                "*)",
                *marked,
                ":;; esac",
            ]
        )

    def _learn(self, stderr: str) -> bool:
        """Take note of what bash missed. Returns whether there was anything new."""
        required = REQUIRED.findall(self.text)
        unset = [
            name
            for name, why in UNSET.findall(stderr)
            if (why == "unbound variable" or name in required) and name not in self.unset
        ]
        paths = [path for path in MISSING.findall(stderr) if path not in self.paths]
        for name in dict.fromkeys(unset):
            self.unset.append(name)
            line = self.line_of(name)
            why = f"line {line}: {self.lines[line - 1].strip()[:60]}" if line else "nothing sets it"
            self.reasons.setdefault(name, "an argument of the script" if name.isdigit() else why)
        self.paths += dict.fromkeys(paths)
        return bool(unset or paths)

    def _command(self, fields: list[str]) -> ShellCommand:
        line, count, *rest = fields[:-1]
        words, outer = ([self._named(word) for word in part] for part in (rest[: int(count)], rest[int(count) :]))
        return ShellCommand(int(line), words, outer)

    def _named(self, text: str) -> str:
        """A text with the marks of commands' outputs as those of the variables that take them."""
        return UNKNOWN.sub(self._name, text)

    def _name(self, found: re.Match) -> str:
        of_command = re.match(rf"@(\d+){BLANK}", found[1])
        if not of_command:
            return found[0]
        line = self.lines[int(of_command[1]) - 1].strip() if int(of_command[1]) <= len(self.lines) else ""
        takes = re.match(r"(?:(?:export|local|declare|readonly)\s+)*(\w+)=", line)
        if not takes:
            return unknown("")
        self.reasons.setdefault(takes[1], f"line {of_command[1]}: {line[:60]}")
        return unknown(takes[1])


def _absolute(path: str) -> str:
    return os.path.normpath(os.path.join("/", HOME, path))
