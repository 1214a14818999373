"""Shell text to words and operators, with quotes remembered: the part of bash that launch scripts are written in."""

import re
from dataclasses import dataclass, field

OPERATORS = ("<<<", "<<-", "&>>", "<<", "&>", "&&", "||", ";;", ">>", ">&", "<&", ">", "<", "|", "&", ";", "(", ")")
ASSIGNS = re.compile(r"[A-Za-z_]\w*\+?=")
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n]*>[^\s;]*")  # NAME=<Specify path>/file, as published scripts have it
CLOSES = {"(": ")", "{": "}", "`": "`"}


@dataclass
class Word:
    """Pieces of (text, quote): quote is ' or " or nothing."""

    line: int
    pieces: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bare(self) -> str | None:
        """The text of a word that was written without any quote."""
        return "".join(text for text, _ in self.pieces) if all(not quote for _, quote in self.pieces) else None

    @property
    def assigns(self) -> str | None:
        """`NAME=` or `NAME+=` where the word begins with that."""
        text, quote = self.pieces[0] if self.pieces else ("", "")
        match = None if quote else ASSIGNS.match(text)
        return match[0] if match else None


@dataclass
class Array:
    """NAME=( words ), or NAME+=( words )."""

    line: int
    assigns: str
    words: list[Word]


@dataclass
class Operator:
    line: int
    text: str
    body: str = ""  # of a here-document
    expands: bool = True  # whether that is expanded


class Lexer:
    """Cuts a script into tokens. Comments and line continuations are gone afterwards."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text, 0, line
        self.waiting: list[tuple[Operator, bool]] = []  # here-documents whose body comes after this line

    def tokens(self) -> list:
        tokens = []
        while (token := self._next()) is not None:
            tokens.append(token)
        return tokens

    def _next(self):
        self._skip_blanks()
        if self.at >= len(self.text):
            return None
        if self.text[self.at] == "\n":
            token = Operator(self.line, "\n")
            self._forward(1)
            self._read_bodies()
            return token
        operator = next((one for one in OPERATORS if self.text.startswith(one, self.at)), None)
        if operator:
            token = Operator(self.line, operator)
            self._forward(len(operator))
            if operator in ("<<", "<<-"):
                self.waiting.append((token, operator == "<<-"))
                self._skip_blanks()
                mark = self._word()
                token.expands = mark.bare is not None
                token.body = "".join(text for text, _ in mark.pieces).replace("\\", "")
            return token
        return self._word()

    def _forward(self, characters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + characters)
        self.at += characters

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self._forward(self.text.index("\n", self.at) - self.at + 1)
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _read_bodies(self) -> None:
        for token, strips in self.waiting:
            lines, mark = [], token.body
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end].rstrip("\r")
                self._forward(end - self.at + 1)
                line = line.lstrip("\t") if strips else line
                if line == mark:
                    break
                lines.append(line)
            token.body = "\n".join(lines)
        self.waiting = []

    def _word(self):
        word = Word(self.line)
        bare = ""
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "<" and ASSIGNS.fullmatch(bare) and (unknown := PLACEHOLDER.match(self.text, self.at)):
                bare += unknown[0]
                self._forward(len(unknown[0]))
            elif character in " \t\r\n;&|<>()":
                if character == "(" and ASSIGNS.fullmatch(bare) and not word.pieces:
                    return self._array(word.line, bare)
                break
            elif character in "'\"":
                if bare:
                    word.pieces.append((bare, ""))
                    bare = ""
                word.pieces.append((self._quoted(character), character))
            elif character == "\\":
                if not self.text.startswith(("\\\n", "\\\r\n"), self.at):
                    if bare:
                        word.pieces.append((bare, ""))
                        bare = ""
                    word.pieces.append((self.text[self.at + 1 : self.at + 2], "'"))
                    self._forward(2)
                else:
                    self._forward(self.text.index("\n", self.at) - self.at + 1)
            elif character in "$`":
                end = end_of_dollar(self.text, self.at)
                bare += self.text[self.at : end]
                self._forward(end - self.at)
            else:
                bare += character
                self.at += 1
        if bare:
            word.pieces.append((bare, ""))
        return word

    def _quoted(self, quote: str) -> str:
        start = self.at = self.at + 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            if quote == '"' and self.text[self.at] == "\\":
                self._forward(2)
            elif quote == '"' and self.text[self.at] in "$`":
                self._forward(end_of_dollar(self.text, self.at) - self.at)
            else:
                self._forward(1)
        inside = self.text[start : self.at]
        self.at += 1
        return inside.replace("\\\r\n", "").replace("\\\n", "") if quote == '"' else inside

    def _array(self, line: int, assigns: str) -> Array:
        self.at += 1
        words = []
        while (token := self._next()) is not None:
            if isinstance(token, Operator) and token.text == ")":
                break
            if isinstance(token, Word):
                words.append(token)
        return Array(line, assigns, words)


def end_of_dollar(text: str, start: int) -> int:
    """Where the $NAME, ${...}, $(...), $((...)) or `...` that begins at `start` ends."""
    opening = text[start] if text[start] == "`" else text[start + 1 : start + 2]
    if opening not in CLOSES:
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(text, start + 1)
        return name.end() if name else start + 1
    if opening == "`":
        end = text.find("`", start + 1)
        return len(text) if end < 0 else end + 1
    depth, at = 0, start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "'" and opening == "(":
            at = max(at, text.find("'", at + 1))
        elif text[at] == opening:
            depth += 1
        elif text[at] == CLOSES[opening]:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)
