"""What printing does to a script: lost backslashes, marks of a diff. Says what to mend."""

import re

from zerofit.recipe.errors import UserError
from zerofit.tools.convert.megatron_args.shell import ShellCommand

DIFF = re.compile(r'\s*[<>]\s+(--|\w+=|export |["}])')  # redirections do not begin like that
TO_FILL_IN = re.compile(r"(--[\w-]+)[ =](<[A-Za-z][^<>\n]*>)")  # to bash, < and > are redirections
LAUNCHERS = ("python", "python3", "torchrun", "deepspeed", "accelerate", "srun", "mpirun")


def check_text(lines: list[str]) -> None:
    """Raises UserError: lines that bash would misread."""
    problems = [
        f"line {number}: {found[1]} {found[2]} is to be filled in"
        for number, line in enumerate(lines, 1)
        for found in TO_FILL_IN.finditer(line)
    ]
    marked = [str(number) for number, line in enumerate(lines, 1) if DIFF.match(line)]
    if marked:
        problems.append(
            f"line{'s' * (len(marked) > 1)} {', '.join(marked)}: < and > at the beginning are marks of a "
            "diff. Delete the lines with <, and the mark of those with >"
        )
    if problems:
        raise UserError(problems)


def check_commands(commands: list[ShellCommand], lines: list[str], is_program) -> None:
    """Raises UserError: commands that are the rest of the one before them."""
    problems = []
    for before, command in zip([None, *commands], commands):
        first = command.words[0]
        at = _line_of(first, command.line, lines)
        bare_launcher = before and before.words[0] in LAUNCHERS and not any(map(is_program, before.words))
        if first.startswith("--") or (is_program(first) and bare_launcher and before.line < at):
            problems.append(f"line {at} begins with {first}, as a command of its own: {_remedy(at - 1, lines)}")
    if problems:
        raise UserError(problems)


def _line_of(word: str, line: int, lines: list[str]) -> int:
    """The line near `line` that begins with the word: bash gives the last line of some commands."""
    near = sorted(range(max(1, line - 3), min(len(lines), line + 3) + 1), key=lambda number: abs(number - line))
    return next((number for number in near if lines[number - 1].strip().startswith(word)), line)


def _remedy(number: int, lines: list[str]) -> str:
    before = lines[number - 1].rstrip() if number else ""
    if "#" in before:
        return f"take the comment out of line {number}, which hides the backslash at its end"
    if before.endswith("\\"):
        return f"line {number} has blanks after its backslash"
    return f"end line {number} with a backslash"
