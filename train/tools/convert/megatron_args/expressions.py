"""What the shell reader computes: arithmetic, tests of texts and numbers, and marks for values that are not known."""

import ast
import operator
import re

UNKNOWN = re.compile("\ue000([^\ue001]*)\ue001")  # marks an unknown value in a text; has the variable's name
ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Gt: operator.gt, ast.Lt: operator.lt, ast.GtE: operator.ge, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Div: lambda one, two: int(one / two),
}  # fmt: skip
NUMBERS = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-lt": operator.lt, "-ge": operator.ge,
           "-le": operator.le}  # fmt: skip


def unknown(name: str) -> str:
    """The mark for the unknown value of a variable."""
    return f"\ue000{name}\ue001"


def unknown_in(text: str) -> list[str]:
    """The variables whose unknown values are marked in a text."""
    return UNKNOWN.findall(text)


def shown(text: str) -> str:
    """A text for people: unknown values are written as $NAME."""
    return UNKNOWN.sub(lambda found: f"${found[1]}", text)


def evaluate_arithmetic(node: ast.AST) -> int:
    """The value of $((...)), parsed as a Python expression. Raises KeyError for an operator that is not supported."""
    if isinstance(node, ast.Constant):
        return int(node.value)
    if isinstance(node, ast.UnaryOp):
        return -evaluate_arithmetic(node.operand)
    if isinstance(node, ast.Compare):
        return ARITHMETIC[type(node.ops[0])](evaluate_arithmetic(node.left), evaluate_arithmetic(node.comparators[0]))
    return ARITHMETIC[type(node.op)](evaluate_arithmetic(node.left), evaluate_arithmetic(node.right))


def test_result(texts: list[str]) -> bool | None:
    """Whether the test `[ ... ]` of these words is true; None: it needs an unknown value, or tests files."""
    if any(UNKNOWN.search(text) for text in texts):
        return None
    if len(texts) == 3 and texts[1] in ("=", "=="):
        return texts[0] == texts[2]
    if len(texts) == 3 and texts[1] == "!=":
        return texts[0] != texts[2]
    if len(texts) == 3 and texts[1] in NUMBERS and all(re.fullmatch(r"-?\d+", text) for text in texts[::2]):
        return NUMBERS[texts[1]](int(texts[0]), int(texts[2]))
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) is (texts[0] == "-n")
    if len(texts) == 2 and texts[0] == "!":
        return not texts[1]
    return bool(texts[0]) if len(texts) == 1 else None


def join_results(one: bool | None, two: bool | None, joint: str) -> bool | None:
    """The result of two tests joined by && or ||; None: not known."""
    decides = joint == "||"
    if one is decides or two is decides:
        return decides
    return None if one is None or two is None else not decides
