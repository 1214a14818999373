"""Texts and names of others: on the terminal and in reports no control character is raw, and no name is markup."""

import json

import pytest
import yaml

from zerofit.recipe import ClmRecipe
from zerofit.recipe.errors import UserError
from zerofit.record.model_card import model_card
from zerofit.record.terminal import Bar, log_lines, table
from zerofit.tools.compare.compare import html_page

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mname\r\x08\u202egnp.exe\x7f"
RAW = set("\x1b\x07\x9b\r\x08\u202e\x7f")


def test_what_is_printed(capsys):
    log_lines("data", HOSTILE)
    log_lines(table([("name", "rows"), (HOSTILE, f"1\n{HOSTILE}")]))
    Bar(10, 1, main=True).log_lines(HOSTILE)
    log_lines(UserError([f"column {HOSTILE}", "another"]).report(), UserError(HOSTILE).report())
    shown = "".join(capsys.readouterr())
    assert shown.count("name") > 5
    assert not RAW & set(shown)
    assert "\n\\x1b" not in table([("name", "rows"), ("x", f"1\n{HOSTILE}")])


@pytest.mark.parametrize("name", [
    'a\nlicense: mit\nextra: [x', "a: b # c", '"\n---\n# Other', f"x{HOSTILE}", "a'); import os; os.system('id') #",
    'x", trust_remote_code=True) #',
])  # fmt: skip
def test_a_name_stays_a_name_in_a_model_card(name):
    recipe = ClmRecipe(model_name_or_path=name, train_file=[f"{name}.txt"], report_name=name)
    recipe.remember_sources({option: f"--{option}" for option in ("model_name_or_path", "train_file")})
    environment = {"packages": {"torch": "2.0"}, "zerofit_commit": None}
    for is_adapter in (False, True):
        card = model_card("clm", recipe, {"eval_loss": 1.5}, environment, is_adapter)
        assert not RAW & set(card)
        front = yaml.safe_load(card.split("---\n")[1])
        assert set(front) == {"library_name", "base_model", "tags"}
        assert front["base_model"] == name
        assert [line for line in card.splitlines() if line.startswith("# ")] == [card.splitlines()[6]]
        assert json.loads(card.split("```json\n")[1].split("\n```")[0])["model_name_or_path"] == name
    code = compile(card.split("```python\n")[1].split("```")[0], "card", "exec")
    assert name in code.co_consts
    assert "os" not in code.co_names


def test_a_report_in_html():
    page = html_page([f"# {HOSTILE}", "<script>", [("strategy", "a"), (HOSTILE, "<b>")], [HOSTILE]], {})
    assert not RAW & set(page)
    assert "<script>" not in page
