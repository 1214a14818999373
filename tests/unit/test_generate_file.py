"""`zerofit generate` over a file: batches, order, what a killed run leaves, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from folders import save_blenderbot, save_writer, small_tokenizer
from transformers import AutoModelForCausalLM

from zerofit.cli import main
from zerofit.tools.generate.answers import AnswerJournal

pytestmark = pytest.mark.usefixtures("tools")
PROMPTS = [f"{'word ' * (number * 5 % 13)}{number}" for number in range(11)]
DRAWN = ("--temperature", 1.5, "--seed", 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_writer(folder / "llama", small_tokenizer(folder / "tokenizer"))
    return folder / "llama"


@pytest.fixture
def asked(tmp_path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.fixture
def answer(model, asked, tmp_path, capsys):
    """Answer the file. Returns (its answers, stderr); in `expect` its exit code."""

    def run(*flags, name: str = "out", expect: int = 0, of=model) -> tuple[list[str], str]:
        output = tmp_path / f"{name}.jsonl"
        flags = ["--model", of, "--prompt_file", asked, "--output", output, "--max_new_tokens", 12, *flags]
        assert main(["generate", *map(str, flags)]) == expect
        shown = capsys.readouterr()
        assert not shown.out
        if expect:
            return [], shown.err
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["prompt"] for line in lines] == PROMPTS
        assert not AnswerJournal(output).path.exists()
        return [line["generated"] for line in lines], shown.err

    return run


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "blenderbot"])
def test_answers_do_not_depend_on_the_batch(answer, family, tmp_path, capsys):
    folder, tokenizer = tmp_path / family, small_tokenizer(tmp_path / "tokenizer")
    (save_blenderbot(folder, tokenizer) if family == "blenderbot" else save_writer(folder, tokenizer, family))
    one, _ = answer("--batch_size", 1, of=folder)
    assert len(set(one)) > 8
    assert answer("--batch_size", 4, of=folder)[0] == one
    assert main(["generate", "--model", str(folder), "--prompt", *PROMPTS, "--max_new_tokens", "12"]) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in one)


def test_prompts_without_room_for_all_tokens_have_batches_of_their_own(answer):
    one, _ = answer("--batch_size", 1, "--max_new_tokens", 50)
    assert answer("--batch_size", 4, "--max_new_tokens", 50)[0] == one


def stopped(monkeypatch, answer, after: int, *flags) -> None:
    """A run that is interrupted after so many batches."""
    from zerofit.tools.generate.text_writer import Writer

    true, calls = Writer.write_batch, []

    def write(self, rows, number):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(number)
        return true(self, rows, number)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_batch", write)
        assert "the same command goes on" in answer(*flags, expect=130)[1]


@pytest.mark.parametrize("flags", [(), DRAWN])
def test_a_run_goes_on_where_it_was(answer, monkeypatch, tmp_path, flags):
    from zerofit.tools.generate.text_writer import Writer

    whole, _ = answer(*flags, "--batch_size", 2)
    stopped(monkeypatch, answer, 3, *flags, "--batch_size", 2)
    with (tmp_path / "out.jsonl.partial").open("a") as file:
        file.write('{"number": 0, "generated": "half')
    rows, true = [], Writer.write_batch
    monkeypatch.setattr(
        Writer, "write_batch", lambda self, batch, number: rows.extend(batch) or true(self, batch, number)
    )
    again, err = answer(*flags, "--batch_size", 2)
    assert again == whole
    assert len(rows) == len(PROMPTS) - 6
    assert f"6 of {len(PROMPTS)} prompts are answered already" in err


def test_the_seed_of_the_first_run_holds(answer, monkeypatch):
    flags = ["--do_sample", "--batch_size", 2]
    monkeypatch.setattr("os.urandom", lambda size: b"\0\0\7")
    whole, _ = answer(*flags)
    stopped(monkeypatch, answer, 2, *flags)
    monkeypatch.setattr("os.urandom", lambda size: b"\0\0\1")
    assert answer(*flags)[0] == whole
    assert answer(*flags)[0] != whole


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--max_new_tokens", 13], "max_new_tokens"), (["--num_beams", 2], "num_beams"), (DRAWN, "temperature")],
)
def test_answers_to_something_else_are_not_mixed(answer, monkeypatch, flags, word):
    stopped(monkeypatch, answer, 1)
    message = answer(*flags, expect=2)[1]
    assert "out.jsonl.partial holds 8 answers" in message
    assert word in message
    assert answer()[0]
    assert answer(*flags)[0], "a finished output is replaced"


def test_other_prompts_are_something_else(answer, monkeypatch, asked):
    stopped(monkeypatch, answer, 1)
    asked.write_text(asked.read_text().replace("10", "20"))
    assert "other prompts" in answer(expect=2)[1]


def test_a_model_that_has_changed_is_another(answer, monkeypatch, model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    stopped(monkeypatch, answer, 1, "--model", copy)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(copy)
    assert "other model" in answer("--model", copy, expect=2)[1]


@pytest.mark.parametrize(("output", "word"), [("out.txt", ".jsonl"), ("/dev/null/b.jsonl", "cannot be written")])
def test_what_is_refused(answer, output, word):
    message = answer("--output", output, expect=2)[1]
    assert message.startswith("error: ")
    assert output in message
    assert word in message


@pytest.mark.parametrize("given", [["--chat"], ["--prompt", "a"], ["--prompt_file", "a.txt"]])
def test_batches_need_a_file_and_an_output(given, capsys):
    assert main(["generate", "--model", "M", *given, "--batch_size", "2"]) == 2
    assert "it goes with --output" in capsys.readouterr().err
