"""Where the parts of a script begin and end: blocks, branches, functions, commands."""

from train.tools.convert.megatron_args.lexer import Operator, Word

ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac"}
SEPARATORS = ("\n", ";", "&&", "||", "|", "&", "(", ")")


def operator_of(token) -> str:
    return token.text if isinstance(token, Operator) else ""


def bare(token) -> str | None:
    return token.bare if isinstance(token, Word) else None


def inside_test(tokens: list) -> bool:
    words = [bare(token) for token in tokens]
    return words.count("[[") > words.count("]]")


def _begins_command(tokens: list, at: int) -> bool:
    before = tokens[at - 1] if at else None
    return before is None or operator_of(before) in SEPARATORS or bare(before) in ("then", "do", "else", "{", "!")


def block(tokens: list, at: int) -> int:
    """One past the end of the `if`, `for`, `while` or `case` that begins here."""
    depth = 0
    for index in range(at, len(tokens)):
        word = bare(tokens[index])
        if word in ENDS and _begins_command(tokens, index):
            depth += 1
        elif word in ENDS.values() and _begins_command(tokens, index):
            depth -= 1
            if not depth:
                return index + 1
    return len(tokens)


def until(tokens: list, at: int, word: str) -> tuple[list, int]:
    end = next((i for i in range(at, len(tokens)) if bare(tokens[i]) == word and _begins_command(tokens, i)),
               len(tokens))  # fmt: skip
    return tokens[at:end], end


def next_branch(tokens: list, at: int, end: int) -> int:
    """The place of the next `elif`, `else` or `fi` of this `if`."""
    while at < end - 1:
        word = bare(tokens[at])
        if word in ENDS and _begins_command(tokens, at):
            at = block(tokens, at)
        elif word in ("elif", "else") and _begins_command(tokens, at):
            return at
        else:
            at += 1
    return end - 1


def is_function(tokens: list, at: int) -> bool:
    return bare(tokens[at]) == "function" or [operator_of(one) for one in tokens[at + 1 : at + 3]] == ["(", ")"]


def closing(tokens: list, at: int) -> int:
    depth = 0
    for index in range(at, len(tokens)):
        depth += {"{": 1, "}": -1}.get(bare(tokens[index]), 0)
        if not depth and bare(tokens[index]) == "}":
            return index + 1
    return len(tokens)


def end_of_command(tokens: list, at: int) -> int:
    start = at
    while at < len(tokens) and not (operator_of(tokens[at]) in SEPARATORS and not inside_test(tokens[start:at])):
        at += 1
    return at
