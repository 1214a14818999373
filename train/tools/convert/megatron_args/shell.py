"""A shell script read and not run: what its variables hold, the files it writes, the commands it would start.

Supported: assignments, arrays, quotes, ${NAME:-default}, $((...)), here-documents, if with tests of texts and numbers.
What only a running shell can know ($(...), loops, tests of files) is marked as unknown; a message names it where its
value is needed.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from train.tools.convert.megatron_args.blocks import (
    ENDS,
    SEPARATORS,
    bare,
    block,
    closing,
    end_of_command,
    inside_test,
    is_function,
    next_branch,
    operator_of,
    until,
)  # fmt: skip
from train.tools.convert.megatron_args.expressions import (
    UNKNOWN,
    evaluate_arithmetic,
    join_results,
    test_result,
    unknown,
    unknown_in,
)
from train.tools.convert.megatron_args.lexer import Array, Lexer, Operator, Word, end_of_dollar

DECLARES = ("export", "local", "declare", "readonly", "typeset")


@dataclass
class Command:
    line: int
    words: list[str]


class Shell:
    """Reads scripts.

    Args:
        given: values from the command line; they win over what a script says. Digits are its arguments.

    Attributes:
        files: {name: text} of here-documents that were written to files.
        commands: what would be started, expanded, in order.
        reasons: {variable: why its value is not known}.
    """

    def __init__(self, given: dict[str, str]):
        self.given = dict(given)
        self.variables: dict[str, str | list[str]] = {"PWD": ".", **given}
        self.files: dict[str, str] = {}
        self.commands: list[Command] = []
        self.reasons: dict[str, str] = {}

    def read(self, text: str, line: int = 1) -> None:
        self._run(Lexer(text, line).tokens())

    def _run(self, tokens: list) -> None:
        at, last, joint = 0, True, ""
        while at < len(tokens):
            token = tokens[at]
            if isinstance(token, Operator) and token.text in SEPARATORS:
                joint = joint if joint in ("&&", "||") and token.text == "\n" else token.text
                at += 1
                continue
            word = bare(token)
            if word == "if":
                at = self._branch(tokens, at)
            elif word in ("while", "until") and self._decide(until(tokens, at + 1, "do")[0]) is (word == "until"):
                at = block(tokens, at)
            elif word in ENDS:
                at = self._doubt(tokens, at, block(tokens, at), f"line {token.line}: set within `{word}`")
            elif is_function(tokens, at):
                at = self._doubt(tokens, at, closing(tokens, at), f"line {token.line}: set within a function")
            elif word in ("{", "}", "then", "do", "!"):
                at += 1
            else:
                end = end_of_command(tokens, at)
                if joint in ("&&", "||") and last is None:
                    self._doubt(tokens, at, end, f"line {token.line}: it depends on a test that only a shell can make")
                elif not (joint in ("&&", "||") and last is (joint == "||")):
                    last = self._simple(tokens[at:end])
                at = end
            joint = ""

    # -------------------------------------------------------------------------------------------------- control flow

    def _branch(self, tokens: list, at: int) -> int:
        """`if ...; then ... elif ... else ... fi`: reads the branch that holds, doubts all where that is not known."""
        end = block(tokens, at)
        while bare(tokens[at]) in ("if", "elif"):
            condition, then = until(tokens, at + 1, "then")
            stop = next_branch(tokens, then + 1, end)
            test_result = self._decide(condition)
            if test_result is None:
                why = f"line {tokens[at].line}: it depends on a test that only a running shell can make"
                words = [one for one in condition if isinstance(one, Word)]
                roots = [name for one in words for name in unknown_in("".join(self.expand(one, split=False)))]
                return self._doubt(tokens, at, end, why, next(filter(None, roots), None))
            if test_result:
                self._run(tokens[then + 1 : stop])
                return end
            at = stop
        if bare(tokens[at]) == "else":
            self._run(tokens[at + 1 : end - 1])
        return end

    def _decide(self, condition: list) -> bool | None:
        """Whether a condition holds: tests of texts and numbers, joined by && and ||; None: not known."""
        result, joint = None, ""
        while condition:
            end = next((i for i, one in enumerate(condition) if operator_of(one) in ("&&", "||", ";", "\n")
                        and not inside_test(condition[:i])), len(condition))  # fmt: skip
            part, after = condition[:end], operator_of(condition[end]) if end < len(condition) else ""
            if part:
                part_result = self._test(part)
                result = part_result if not joint else join_results(result, part_result, joint)
                joint = after if after in ("&&", "||") else joint
            condition = condition[end + 1 :]
        return result

    def _test(self, tokens: list) -> bool | None:
        if bare(tokens[0]) == "!":
            negated = self._test(tokens[1:])
            return None if negated is None else not negated
        if bare(tokens[0]) in ("true", "false"):
            return bare(tokens[0]) == "true"
        if bare(tokens[0]) not in ("[", "[[", "test"):
            return None
        texts = [operator_of(one) or "".join(self.expand(one, split=False)) for one in tokens[1:]]
        texts = texts[:-1] if texts and texts[-1] in ("]", "]]") else texts
        for joint in ("||", "&&"):
            if joint in texts:
                cut = texts.index(joint)
                return join_results(test_result(texts[:cut]), test_result(texts[cut + 1 :]), joint)
        return test_result(texts)

    def _doubt(self, tokens: list, start: int, end: int, why: str, root: str | None = None) -> int:
        """Take what these tokens would assign for unknown, for want of the variable `root` where one is to blame."""
        for token in tokens[start:end]:
            if isinstance(token, (Word, Array)) and token.assigns:
                self._set(token.assigns, unknown(root or token.assigns.rstrip("+=")), why)
        return end

    # ----------------------------------------------------------------------------------------------------- a command

    def _simple(self, tokens: list) -> bool | None:
        """Read one command. Returns how it ends, as far as that is known."""
        if bare(tokens[0]) in ("[", "[[", "test"):
            return self._test(tokens)
        words, target, body = [], None, None
        tokens, rest = [], list(tokens)
        while rest:
            token = rest.pop(0)
            kind = operator_of(token)
            if kind in ("<<", "<<-"):
                body = self._text(token.body, '"') if token.expands else token.body
            elif kind:
                follows = rest.pop(0) if rest and isinstance(rest[0], Word) else None
                target = "".join(self.expand(follows, split=False)) if follows and kind in (">", ">>") else target
                if tokens and kind not in ("<<<",) and (bare(tokens[-1]) or "").isdigit():
                    tokens.pop()  # 2>&1
            else:
                tokens.append(token)
        if body is not None and target:
            self.files[target] = body
            return True
        declares = bool(tokens) and bare(tokens[0]) in DECLARES
        for token in tokens[1:] if declares else tokens:
            if isinstance(token, Array):
                self._set_array(token)
            elif token.assigns and not words:
                self._assign(token)
            elif not declares:
                words += self.expand(token)
        if words:
            self.commands.append(Command(_line(tokens), words))
        return True

    def _assign(self, word: Word) -> None:
        first, _ = word.pieces[0]
        name = word.assigns.rstrip("+=")
        rest = Word(word.line, [(first[len(word.assigns) :], ""), *word.pieces[1:]])
        if "<" in rest.pieces[0][0]:
            self._set(word.assigns, unknown(name), f"line {word.line}: {rest.pieces[0][0]} is to be filled in")
            return
        value = "".join(self.expand(rest, split=False))
        why = f"line {word.line}: {''.join(text for text, _ in rest.pieces)[:60]}"
        self._set(word.assigns, unknown(name) if "" in unknown_in(value) else value, why)

    def _set_array(self, array: Array) -> None:
        items = [text for word in array.words for text in self.expand(word)]
        self._set(array.assigns, items, f"line {array.line}")

    def _set(self, assigns: str, value: str | list[str], why: str) -> None:
        name = assigns.rstrip("+=")
        if name in self.given:
            return
        if assigns.endswith("+="):
            before = self.variables.get(name, [] if isinstance(value, list) else "")
            if isinstance(value, list):
                value = [*([before] if isinstance(before, str) and before else before or []), *value]
            else:
                value = "".join([*before, value]) if isinstance(before, str) else [*before, value]
        self.variables[name] = value
        if value == unknown(name):
            self.reasons[name] = why

    # ----------------------------------------------------------------------------------------------------- expansion

    def expand(self, word: Word, split: bool = True) -> list[str]:
        """What a word becomes: one text, or with `split` as many as the shell would make of what is not quoted."""
        fields, open_field = [""], False
        for text, quote in word.pieces:
            if quote == "'":
                fields[-1] += text
                open_field = True
                continue
            for piece, substituted in self._pieces(text, quote):
                many = isinstance(piece, list)
                parts = piece if many else [piece]
                if split and substituted and not quote:
                    joined = " ".join(parts)
                    parts, edges = joined.split(), (joined[:1].isspace(), joined[-1:].isspace())
                    if edges[0] and fields[-1]:
                        fields.append("")
                elif many and not split:
                    parts = [" ".join(parts)]
                for index, part in enumerate(parts):
                    if index:
                        fields.append("")
                    fields[-1] += part
                if split and substituted and not quote and parts and edges[1]:
                    fields.append("")
            open_field = open_field or (bool(quote) and not (quote == '"' and not fields[-1] and "[@]" in text))
        return fields if not split else [one for one in fields if one or (open_field and len(fields) == 1)]

    def _text(self, text: str, quote: str) -> str:
        return "".join(" ".join(one) if isinstance(one, list) else one for one, _ in self._pieces(text, quote))

    def _pieces(self, text: str, quote: str) -> Iterator[tuple[str | list[str], bool]]:
        """(text or texts, whether a variable gave it)."""
        at, plain = 0, ""
        while at < len(text):
            if text[at] == "\\" and quote and text[at + 1 : at + 2] in ('"', "\\", "$", "`"):
                plain, at = plain + text[at + 1], at + 2
            elif text[at] in "$`" and (end := end_of_dollar(text, at)) > at + 1:
                yield plain, False
                plain = ""
                yield self._dollar(text[at:end]), True
                at = end
            else:
                plain, at = plain + text[at], at + 1
        yield plain, False

    def _dollar(self, text: str) -> str | list[str]:
        if text.startswith("$(("):
            return self._arithmetic(text[3:-2])
        if text[0] == "`" or text.startswith("$("):
            return "." if text.strip("$()` ") == "pwd" else unknown("")
        inside = text[2:-1] if text.startswith("${") else text[1:]
        match = re.fullmatch(r"(\w+|[@*#])(\[[@*]\]|\[\d+\])?(?:(:?[-=+])(.*))?", inside, re.DOTALL)
        if not match:
            return unknown(re.match(r"[#!]?(\w*)", inside)[1])
        name, index, how, other = match.groups()
        value = self._value(name)
        if how and (value is None or (how[0] == ":" and not value)) is (how[-1] != "+"):
            return " ".join(text for one in Lexer(other).tokens() if isinstance(one, Word)
                            for text in self.expand(one, split=False))  # fmt: skip
        if how and how[-1] == "+":
            return ""
        if value is None:
            self.reasons.setdefault(name, "nothing sets it" if not name.isdigit() else "an argument of the script")
            return unknown(name)
        if isinstance(value, list):
            if index and index[1:-1].isdigit():
                return value[int(index[1:-1])] if int(index[1:-1]) < len(value) else ""
            return value if index else (value[0] if value else "")
        return value

    def _value(self, name: str) -> str | list[str] | None:
        if name in ("@", "*", "#"):
            arguments = [self.given[str(index)] for index in range(1, 100) if str(index) in self.given]
            return str(len(arguments)) if name == "#" else arguments
        return self.variables.get(name)

    def _arithmetic(self, text: str) -> str:
        text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda match: f"${{{match[1]}}}", text)
        text = self._text(text, '"')
        if UNKNOWN.search(text):
            return unknown(UNKNOWN.search(text)[1])
        try:
            return str(int(evaluate_arithmetic(ast.parse(text.strip(), mode="eval").body)))
        except (ValueError, SyntaxError, KeyError, ZeroDivisionError, AttributeError, TypeError):
            return unknown("")


def _line(tokens: list) -> int:
    return tokens[0].line if tokens else 0
