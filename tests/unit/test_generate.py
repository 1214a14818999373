"""`zerofit generate`: what the model is given, what it writes, where it ends, and what is refused."""

import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from folders import save_adapter, save_blenderbot, save_writer, small_tokenizer
from helpers import tiny_deberta
from transformers import AutoModelForCausalLM, GenerationConfig

from zerofit.cli import main
from zerofit.recipe import Seq2SeqRecipe, parse_recipe
from zerofit.training.generation import generation_settings

pytestmark = pytest.mark.usefixtures("tools")
POSITIONS = 64  # of the tiny models
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_writer(folder, tokenizer)
    return folder


@pytest.fixture
def template(tmp_path) -> Path:
    file = tmp_path / "marks.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture
def given(monkeypatch) -> SimpleNamespace:
    """What `generate` was called with, ids and settings, and what it gave, once for each call; the model answers."""
    from transformers import GenerationMixin

    seen, true = SimpleNamespace(ids=[], settings=[], written=[]), GenerationMixin.generate

    def watched(self, inputs, **settings):
        seen.ids.append(inputs[0].tolist())
        seen.settings.append(settings)
        written = true(self, inputs, **settings)
        seen.written.append(written[0].tolist())
        return written

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    return seen


@pytest.fixture
def generate(capsys):
    def run(*flags: object, expect: int = 0):
        capsys.readouterr()
        code = main(["generate", *map(str, flags)])
        shown = capsys.readouterr()
        assert code == expect, shown
        return shown

    return run


@pytest.fixture
def talk(generate, monkeypatch):
    """Several lines to `--chat`, as they come through a pipe."""

    def run(lines: list[str], *flags: object, expect: int = 0):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return generate("--chat", *flags, expect=expect)

    return run


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_greedy_is_what_transformers_writes(tmp_path, tokenizer, generate, family):
    save_writer(tmp_path / "model", tokenizer, family)
    done = generate("--model", tmp_path / "model", "--prompt", "The loss", "--max_new_tokens", 20)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tokenizer("The loss")["input_ids"]
    written = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
    expected = tokenizer.decode(written[len(ids) :], skip_special_tokens=True)
    assert len(set(expected)) > 5
    assert done.out == expected + "\n"
    assert done.err == f"model {tmp_path / 'model'} in float32 on cpu\n"


def test_a_seed_repeats_what_was_drawn(model, generate):
    def drawn(seed: int) -> str:
        flags = ("--max_new_tokens", 12, "--top_k", 11, "--temperature", 1.5, "--seed", seed)
        done = generate("--model", model, "--prompt", "The", "The", *flags)
        assert f"temperature 1.5, top_k 11, top_p 1, seed {seed}" in done.err
        return done.out

    first = drawn(7)
    assert drawn(7) == first
    assert drawn(8) != first
    assert len(set(first.splitlines())) > 1, "each prompt draws for itself"


def test_files_of_prompts(model, generate, given, tmp_path, template, tokenizer):
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\n  two \r\nthree")
    generate("--model", model, "--prompt_file", lines, "--max_new_tokens", 2)
    assert given.ids == [tokenizer(text)["input_ids"] for text in ("one", "  two ", "three")]
    records = tmp_path / "prompts.jsonl"
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "lo"},
        {"role": "user", "content": "ho"},
        {"role": "assistant", "content": "never seen"},
    ]
    records.write_text(json.dumps({"prompt": "one", "id": 3}) + "\n" + json.dumps({"messages": turns}) + "\n")
    output = tmp_path / "out.jsonl"
    generate("--model", model, "--prompt_file", records, "--max_new_tokens", 2, "--chat_template", template,
             "--output", output)  # fmt: skip
    first, second = (tokenizer.decode(ids) for ids in given.ids[3:])
    assert first == "<user>one<assistant>"
    assert second == "<user>hi<assistant>lo<|endoftext|><user>ho<assistant>"
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [sorted(line) for line in written] == [["generated", "prompt"], ["generated", "messages"]]
    assert written[1]["messages"] == turns[:3]


def test_what_a_tokenizer_puts_after_a_text_is_not_continued(tmp_path, generate, given):
    """[CLS] a [SEP]: after the end there is nothing to go on with."""
    marked = small_tokenizer(tmp_path, pairs=True)
    save_writer(tmp_path / "model", marked)
    generate("--model", tmp_path / "model", "--prompt", "the loss", "--max_new_tokens", 3)
    whole = marked("the loss")["input_ids"]
    assert whole[-1] == marked.sep_token_id
    assert given.ids == [whole[:-1]]


def test_the_system_prompt_of_training_is_used(model, generate, given, template, tokenizer, tmp_path):
    folder = shutil.copytree(model, tmp_path / "trained")
    known = json.loads((folder / "tokenizer_config.json").read_text())
    known |= {"trained_with": {"system_prompt": "Be kind.", "block_size": 64}}
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    flags = ["--model", folder, "--prompt", "hi", "--max_new_tokens", 2]
    for more in ((), ("--system_prompt", "Be short."), ("--system_prompt", "")):
        generate(*flags, "--chat_template", template, *more)
    generate(*flags)  # no template, no conversation
    assert [tokenizer.decode(ids) for ids in given.ids] == [
        "<system>Be kind.<user>hi<assistant>",
        "<system>Be short.<user>hi<assistant>",
        "<user>hi<assistant>",
        "hi",
    ]


def test_it_ends_at_the_end_token(tmp_path, tokenizer, generate, given):
    """The end tokens are those of the model's settings, the tokenizer's, and the one the template ends turns with."""
    folder = tmp_path / "model"
    save_writer(folder, tokenizer)
    flags = ["--model", folder, "--prompt", "The loss", "--max_new_tokens", 30]
    generate(*flags)
    new = given.written[0][len(given.ids[0]) :]
    assert len(new) == 30
    end = next(token for place, token in enumerate(new) if place > 5 and token not in new[:place])
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [end, 5]}))
    output = tmp_path / "out.jsonl"
    generate(*flags, "--output", output)
    assert given.settings[1]["eos_token_id"] == sorted([0, 5, end])
    assert given.written[1][len(given.ids[1]) :] == new[: new.index(end) + 1]
    assert json.loads(output.read_text())["generated"] == tokenizer.decode(new[: new.index(end) + 1])


def test_it_never_asks_for_more_than_the_models_positions(model, generate, given):
    done = generate("--model", model, "--prompt", "The loss", "--max_new_tokens", 500)
    assert given.settings[0]["max_new_tokens"] == POSITIONS - len(given.ids[0])
    assert f"{POSITIONS} positions are used up" in done.err
    done = generate("--model", model, "--prompt", "a", "word " * 80, "--max_new_tokens", 5, expect=2)
    assert "prompt 2 of 2" in done.err
    assert "64 positions" in done.err
    assert not done.out, "it is found before the first prompt is continued"


def test_a_conversation_has_its_history_in_the_prompt(model, talk, given, template, tokenizer):
    lines = ["hi", "ho", "/reset", "he", "", "never"]
    done = talk(lines, "--model", model, "--chat_template", template, "--max_new_tokens", 4)
    prompts = [tokenizer.decode(ids) for ids in given.ids]
    assert len(prompts) == 3
    assert prompts[0] == "<user>hi<assistant>"
    reply = done.out.splitlines()[0].strip()
    assert reply
    assert prompts[1] == f"<user>hi<assistant>{reply}<|endoftext|><user>ho<assistant>"
    assert prompts[2] == "<user>he<assistant>"
    assert "forgotten" in done.err


def test_the_oldest_exchanges_are_dropped(model, talk, given, template, tokenizer):
    template.write_text(TEMPLATE.replace("m['role'] }}", "m['role'][0] }}").replace("<assistant>", "<a>"))
    lines = [f"{number} and" for number in range(8)]
    done = talk(lines, "--model", model, "--chat_template", template, "--system_prompt", "Ok.", "--max_new_tokens", 2)
    prompts = [tokenizer.decode(ids) for ids in given.ids]
    assert len(prompts) == 8
    assert all(prompt.startswith("<s>Ok.<u>") for prompt in prompts)
    assert all(prompt.endswith(f"<u>{line}<a>") for prompt, line in zip(prompts, lines))
    assert all(len(ids) + 2 <= POSITIONS for ids in given.ids)
    assert "<u>0 and<a>" in prompts[1]
    assert "<u>0 and<a>" not in prompts[7]
    assert "<u>6 and<a>" in prompts[7]
    assert "do not fit any more: the oldest" in done.err


def test_a_conversation_without_a_template(model, talk, template):
    message = talk(["hi"], "--model", model, expect=2).err
    assert "--chat_template" in message
    assert "no chat template" in message
    strict = template.with_name("strict.jinja")
    strict.write_text("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}a")
    flags = ["--model", model, "--chat_template", strict, "--system_prompt", "x"]
    assert "no system here" in talk(["hi"], *flags, expect=2).err


@pytest.fixture
def blenderbot(tmp_path, tokenizer) -> Path:
    save_blenderbot(tmp_path / "blenderbot", tokenizer)
    return tmp_path / "blenderbot"


def test_an_encoder_decoder_answers_as_it_was_trained(blenderbot, talk, generate, given, tokenizer, tmp_path):
    """The source's form lies in its tokenizer's configuration, and how it searches in generation_config.json."""
    folder = shutil.copytree(blenderbot, tmp_path / "trained")
    form = {"source_prefix": "Q: ", "turn_separator": " / ", "max_source_length": 20}
    search = {"num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 2}
    for file, more in (("tokenizer_config.json", {"trained_with": form}), ("generation_config.json", search)):
        known = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**known, **more}))
    done = talk(["one", "two"], "--model", folder, "--context", "persona")
    reply = done.out.splitlines()[0].strip()
    sources = [tokenizer.decode(ids) for ids in given.ids]
    assert sources[0] == "Q: persona / one<|endoftext|>"
    assert f"Q: persona / one / {reply} / two<|endoftext|>" == sources[1] or "do not fit" in done.err
    assert {(each["num_beams"], each["max_new_tokens"]) for each in given.settings} == {(3, 5)}
    generate("--model", folder, "--prompt", "word " * 40, "--num_beams", 1, "--max_new_tokens", 3)
    assert (given.settings[-1]["num_beams"], given.settings[-1]["max_new_tokens"]) == (1, 3)
    assert len(given.ids[-1]) == 20
    assert tokenizer.decode(given.ids[-1]).startswith("Q: word")
    generate("--model", folder, "--prompt", "one", "--raw")
    assert tokenizer.decode(given.ids[-1]) == "one<|endoftext|>"


def test_an_adapter_by_itself_on_its_base_and_merged(model, generate, tmp_path):
    adapter = tmp_path / "adapter"  # without a tokenizer beside it
    save_adapter(adapter, AutoModelForCausalLM.from_pretrained(model), model, target_modules=["q_proj"])

    def written(*flags) -> str:
        return generate(*flags, "--prompt", "The loss", "--max_new_tokens", 12).out

    assert main(["merge", "--adapter", str(adapter), "--output", str(tmp_path / "merged")]) == 0
    merged = written("--model", tmp_path / "merged")
    assert merged != written("--model", model), "the adapter does nothing: the test would show nothing"
    assert written("--model", adapter) == merged
    assert written("--model", model, "--adapter", adapter) == merged
    said = generate("--model", adapter, "--prompt", "a", "--max_new_tokens", 1).err
    assert said == f"model {model} with the adapter {adapter} in float32 on cpu\n"


def test_a_model_that_does_not_write(tmp_path, generate):
    tiny_deberta(tmp_path / "classifier", 2)
    message = generate("--model", tmp_path / "classifier", "--prompt", "a", expect=2).err
    assert "DebertaV2ForSequenceClassification" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt", "a"], ["no model", "--model"]),
        (["--model", "M", "--prompt", "a", "--chat"], ["prompt = a and chat = true", "keep one"]),
        (["--model", "M", "--chat", "--output", "b.jsonl"], ["b.jsonl", "chat = true"]),
        (["--model", "M", "--prompt", "a", "--do_sample", "false", "--top_k", "3"], ["do_sample = false", "top_k"]),
        (["--model", "M", "--prompt", "a", "--seed", "3"], ["seed has no effect", "do_sample"]),
        (["--model", "M", "--prompt", "a", "--temperature", "0"], ["temperature = 0", "Leave it out"]),
        (["--model", "M", "--prompt_file", "a.csv"], ["a.csv", ".jsonl"]),
        (["--model", "/no/such/folder", "--prompt", "a"], ["/no/such/folder", "no such folder"]),
        (["--model", "MODEL", "--prompt", "a", "--system_prompt", "b"], ["system_prompt = 'b'", "--chat_template"]),
        (["--model", "MODEL", "--prompt", "a", "--output", "/dev/null/b.jsonl"], ["/dev/null/b.jsonl", "cannot be"]),
    ],
)
def test_what_is_refused(generate, model, flags, words):
    done = generate(*[model if flag == "MODEL" else flag for flag in flags], expect=2)
    assert done.err.startswith("error: ")
    assert not done.out
    assert [word for word in words if word not in done.err] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ('{"prompt": "a"}\n{"text": "b"}\n', ["line 2", "`prompt`", "text"]),
        ('\n{"prompt": "a"}\nnonsense\n', ["line 3", "not JSON"]),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', ["line 1", "replied to"]),
        ('{"prompt": "a"}\n' + r'{"prompt": "b \ud83d"}', ["line 2", "surrogate pair"]),
    ],
)
def test_prompt_files_that_are_refused(generate, model, tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    message = generate("--model", model, "--prompt_file", file, expect=2).err
    assert not [word for word in words if word not in message], message


# ------------------------------------------------------------------------------------------------- where a text is cut


def longest(stored, *flags):
    recipe = parse_recipe(Seq2SeqRecipe, ["--model_name_or_path", "a", *flags])
    return generation_settings(recipe, (128, recipe.max_target_length), GenerationConfig(**stored))["max_new_tokens"]


@pytest.mark.parametrize("flags", [("--predict_file", "a.jsonl"), ("--evaluate_only", "--validation_file", "a.jsonl")])
def test_a_launch_without_training_takes_the_stored_length(flags):
    assert longest({"max_new_tokens": 40}, *flags) == 40
    assert longest({}, *flags) == 128
    assert longest({"max_new_tokens": 40}, *flags, "--val_max_target_length", "50") == 50
    assert longest({"max_new_tokens": 40}, *flags, "--max_target_length", "60") == 60
    assert longest({"max_new_tokens": 40}, "--train_file", "a.jsonl") == 128


def test_generate_says_where_an_answer_is_cut(blenderbot, model, generate):
    flags = ("--prompt", "hello", "--max_new_tokens", 2)
    assert "note: the text is cut at max_new_tokens = 2" in generate("--model", blenderbot, *flags).err
    assert "cut" not in generate("--model", model, *flags).err, "a text that is continued has no end"
