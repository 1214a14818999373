"""Options from YAML and flags: names, types, who wins, and what is refused."""

import dataclasses
import os
import re

import pytest
from helpers import ROOT, check_refusal, refusal

from zerofit.recipe import ClmRecipe, UserError, parse_recipe
from zerofit.recipe import parse as parsing
from zerofit.recipe.parse import flag_value, read_recipe
from zerofit.recipe.tasks import TASKS as RECIPES

TASKS = tuple(RECIPES.values())

MINIMAL = ["--config_name", "gpt2", "--tokenizer_name", "gpt2", "--train_file", "a.txt"]


def parse(*flags: str) -> ClmRecipe:
    return parse_recipe(ClmRecipe, [*MINIMAL, *flags])


def recipe_file(tmp_path, text: str) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(text)
    return ["--config", str(tmp_path / "recipe.yaml")]


def test_flags_override_the_file_and_both_are_remembered(tmp_path):
    file = recipe_file(tmp_path, 'learning_rate: 5e-4\nweight_decay: "1"\nblock_size: 64\n')
    recipe = parse(*file, "--learning_rate", "1e-5")
    assert (recipe.learning_rate, recipe.weight_decay, recipe.block_size) == (1e-5, 1.0, 64)
    assert recipe.source("learning_rate") == "--learning_rate"
    assert recipe.source("block_size").endswith("recipe.yaml, line 3")
    assert recipe.source("seed") is None


@pytest.mark.parametrize(("recipe", "flags", "left_out"), [
    ("clm/stdlib-gpt2", "--sample_tokens 0", "sample_prompt"),
    ("clm/stdlib-gpt2", "--model_name_or_path M", "config_name config_overrides train_tokenizer_vocab_size"),
    ("clm/stdlib-gpt2", "--config_name llama-2-7b", "config_overrides"),
    ("clm/stdlib-gpt2", "--tokenizer_name gpt2", "train_tokenizer_vocab_size"),
    ("clm/stdlib-gpt2", "--gradient_accumulation_steps 4", "global_batch_size"),
    ("clm/gpt2-345m-pretrain", "--save_strategy no", "save_steps save_total_limit"),
    ("clm/gpt2-345m-pretrain", "--save_strategy epoch", "save_steps"),
    ("clm/stories-continual", "--train_file a.txt",
     "data_path split reset_position_ids reset_attention_mask eod_mask_loss"),
    ("clm/gpt2-wikitext2", "--train_file a.txt", "dataset_name dataset_config_name"),
    ("clm/gpt2-wikitext2", "--dataset_name other", "dataset_config_name"),
    ("clm/gpt2-wikitext2", "--data_path corpus", "dataset_name dataset_config_name packing"),
    ("clm/stories-stream", "--streaming null", ""),
    ("dpo/stories-dpo", "--preference_loss ipo --preference_label_smoothing 0", ""),
    ("cls/deberta-xl-mrpc", "--train_file a.csv", ""),
    ("seq2seq/stdlib-functions", "--tokens_per_batch 4096 --max_source_length 64 --max_target_length 64",
     "global_batch_size"),
])  # fmt: skip
def test_what_a_flag_takes_out_takes_what_hangs_on_it(recipe, flags, left_out):
    task, file = recipe.split("/")[0], ROOT / f"recipes/{recipe}.yaml"
    given = parse_recipe(RECIPES[task], ["--config", str(file)])
    found = parse_recipe(RECIPES[task], ["--config", str(file), *flags.split()])
    assert {note.split()[0] for note in found.left_out} == set(left_out.split())
    for name in left_out.split():
        assert found.source(name) is None or name == "global_batch_size"  # which tokens_per_batch sets
        assert getattr(found, name) != getattr(given, name), name
    assert all(flags.split()[0] in note and f"{file.name}, line" in note for note in found.left_out)


# Of each option the values that switch something off, or choose something else.
OFF = {bool: ["false"], int: ["0"], float: ["0"]}


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda file: file.stem)
def test_no_flag_is_refused_for_what_only_the_file_says(file, monkeypatch):
    cls = RECIPES[file.parent.name]
    lines = parsing._lines_of(str(file))  # once: it takes as long as all the rest
    monkeypatch.setattr(parsing, "_lines_of", lambda *_: lines)
    entries = [key.value for key, _ in lines]
    tried = 0
    for field in dataclasses.fields(cls):
        kind = field.metadata["kind"]
        values = ["null"] * kind.optional + OFF.get(kind.base, []) + list(field.metadata["choices"])
        for value in values:
            tried += 1
            try:
                parse_recipe(cls, ["--config", str(file), f"--{field.name}", value])
            except UserError as error:
                for problem in error.problems:
                    useless = re.split("no effect|not supported", problem)[0]
                    names = [name for name in entries if re.search(rf"\b{name}\b", useless) and name != field.name]
                    assert not names or problem.startswith("no ") or field.name in NEEDS, (field.name, value, problem)
    assert tried > 120


# Other data than the file's: a flag must name them.
NEEDS = ("streaming", "train_file", "max_train_steps", "regression")


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("sample_prompt: a\nsample_tokens: 0\n", ["--seed", "3"], "sample_prompt has no effect"),  # two lines of it
        ("seed: 3\n", ["--sample_prompt", "a", "--sample_tokens", "0"], "sample_prompt has no effect"),  # two flags
        ("sample_tokens: 0\n", ["--sample_prompt", "a"], "sample_prompt has no effect"),  # the flag has none
        ("save_steps: 5\nsave_strategy: no\n", ["--save_total_limit", "2"], "keep one of them"),
    ],
)
def test_what_one_says_twice_is_refused(tmp_path, text, flags, words):
    text = text.replace("no\n", "'no'\n")
    with pytest.raises(UserError, match=words):
        parse(*recipe_file(tmp_path, text), *flags)


def test_forms_of_flags():
    recipe = parse(*"--gradient-checkpointing --learning_rate=3e-4 --train_file a.txt b.txt --append_eos no".split())
    assert recipe.gradient_checkpointing
    assert recipe.learning_rate == 3e-4
    assert recipe.train_file == ["a.txt", "b.txt"]
    assert recipe.append_eos is False
    assert parse("--output_dir=~/runs").output_dir == os.path.expanduser("~/runs")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--learnin_rate", "1"], ["--learnin_rate", "Did you mean learning_rate?"]),
        (["--block_size", "12.5"], ["--block_size 12.5", "an integer"]),
        (["--learning_rate", "nan"], ["finite"]),
        (["--seed"], ["--seed without a value", "an integer"]),
        (["--num_warmup_steps", "5", "--warmup_ratio", "0.1"], ["num_warmup_steps = 5", "warmup_ratio = 0.1"]),
        (["--global_batch_warmup", "64@"], ["expected START@UPDATES"]),
        (["--block_size_warmup", "64->1024@9"], ["expected START@UPDATES"]),
        (["--adam_beta2", "1"], ["adam_beta2 = 1.0 (--adam_beta2): it must be below 1"]),
        (["--encoding", "hex"], ["encoding = 'hex' (--encoding): expected the name of an encoding"]),
        (["--delimiter", ";;"], ["expected one character"]),
        (["--streaming", "many"], ["expected a size such as 256MiB"]),
        (["--warmup_ratio", "1.5"], ["warmup_ratio = 1.5", "at most 1"]),
        (["--vocab_file", "a"], ["vocab_file has no effect without merge_file"]),
        (["--dataset_name", "wikitext"], ["dataset_name", "train_file", "keep one"]),
        (["--output_dir="], ["output_dir = '' (--output_dir): expected a folder"]),
        (["--seed", "2147483648"], ["it must be below 2147483648"]),
        (["--val_set_size", "0.1"], ["say --validation_split_percentage 10 for 0.1"]),
        (["--profile", "12:9"], ["profile = '12:9' (--profile): expected N:M"]),
    ],
)
def test_what_is_refused(flags, words):
    check_refusal(words, parse, *flags)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learnin_rate: 1\n", ["line 1", "learnin_rate", "Did you mean learning_rate?"]),
        ("train_file: [a.txt, null]\n", ["train_file is a list", "each text"]),
        ("train_file: {a: b}\n", ["train_file is a map", "each text"]),
        ("block_size: [1, 2]\n", ["block_size", "a list", "an integer"]),
        ("seed: 1\nseed: 2\n", ["line 2", "set twice"]),
        ("a: [1\n", ["not valid YAML"]),
        ("seed: 010\n", ["seed is '010'", "an integer"]),  # 8 in YAML 1.1
        ("report_name: no\n", ["report_name is no", "put it in quotes"]),
        ("lora_r: 4\nlora_alpha: 8\n", ["lora_r has no effect without lora", "lora_alpha has no effect"]),
        ("output_dir: $HOME/runs\n", ["output_dir = '$HOME/runs'", "variables such as $HOME are not replaced"]),
        ("push_to_hub: false\n", ["push_to_hub is false", "Leave the line out"]),
    ],
)
def test_what_is_refused_in_a_file(tmp_path, text, words):
    check_refusal(words, parse, *recipe_file(tmp_path, text))


@pytest.mark.parametrize(
    "text", ["0123", "1e3", "1.10", "2024-01-01", "2024-99-99", "1_000", "0x1f", "1:30", "+1", ".5"]
)
def test_a_text_is_what_is_written(tmp_path, text):
    lines = f"report_name: {text}\nsave_strategy: no\nlora_target_modules: [{text}]\nlora: true\n"
    recipe = parse(*recipe_file(tmp_path, lines))
    assert recipe.report_name == text
    assert recipe.lora_target_modules == [text]
    assert recipe.save_strategy == "no"


def test_all_problems_come_together(tmp_path):
    file = recipe_file(tmp_path, "learnin_rate: 1\nseed: x\n")
    message = refusal(parse, *file, "--block_size", "no", "--max_grad_norm", "-1")
    assert message.startswith("error: 4 problems")
    for word in ("learnin_rate", "seed", "block_size", "max_grad_norm"):
        assert word in message


def help_of(capsys, cls, word: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_recipe(cls, [word])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("cls", TASKS)
def test_help_is_short_and_help_all_names_every_option(cls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, long = help_of(capsys, cls, "--help"), help_of(capsys, cls, "--help_all")
    fields = dataclasses.fields(cls)
    assert len(fields) > 40
    for field in fields:
        common = field.metadata["common"]
        assert f"  --{field.name}" in re.findall(r"^  --\w+", long, re.M), field.name
        assert (f"  --{field.name}" in re.findall(r"^  --\w+", short, re.M)) == common, field.name
    assert "--trial" not in long
    assert len(short.splitlines()) <= 44, "one screen"
    assert "--help_all" in short
    for line in (short + long).splitlines():
        assert len(line) <= 80, line
    headings = [line for line in long.splitlines() if line and not line.startswith(" ")][2:]
    assert headings.index("Model and tokenizer") < headings.index("Data sources")
    assert headings.index("Data sources") < headings.index("Batches and length of the run")
    assert len(headings) == len(set(headings)), "a group comes twice"


@pytest.mark.parametrize(
    ("option", "script"), [("packing", "clm"), ("teacher", "distill"), ("preference_loss", "dpo")]
)
def test_an_option_of_another_script_names_the_script_that_has_it_first(option, script):
    with pytest.raises(UserError, match=f"--{option} is not an option: it is one of train/{script}.py"):
        parse_recipe(RECIPES["cls"], [f"--{option}", "x"])


def test_what_is_published_has_no_folder_of_this_machine():
    recipe = ClmRecipe(
        train_file=["/home/me/my texts/a.txt", "data/*.txt"],
        data_path=["0.3", "/me/a_document", "0.7", "/me/b"],
        model_name_or_path="/models/llama",
        tokenizer_name="org/name",
        output_dir="outputs/x",
        sample_prompt="/etc is",
    )
    published = recipe.to_publish()
    assert published["train_file"] == ["a.txt", "data/*.txt"]
    assert published["data_path"] == ["0.3", "a_document", "0.7", "b"]
    assert (published["model_name_or_path"], published["tokenizer_name"]) == ("llama", "org/name")
    assert (published["output_dir"], published["sample_prompt"]) == ("outputs/x", "/etc is")
    assert published.keys() == recipe.to_dict().keys()


@pytest.mark.parametrize("cls", [RECIPES["clm"], RECIPES["cls"]])
def test_null_is_not_stated_for_any_option(tmp_path, cls):
    """As in the recipe.yaml of a run, which has all options; and a flag takes back what a file states."""
    file = tmp_path / "recipe.yaml"
    plain, problems = read_recipe(cls, [])
    names = [field.name for field in dataclasses.fields(cls)]
    assert len(names) > 90
    for name in names:
        file.write_text(f"{name}: null\n")
        recipe, found = read_recipe(cls, ["--config", str(file)])
        assert (recipe.source(name), found, recipe.to_dict()) == (None, problems, plain.to_dict()), name
    file.write_text("".join(f"{name}:\n" for name in names))
    recipe, found = read_recipe(cls, ["--config", str(file)])
    assert (found, recipe.to_dict()) == (problems, plain.to_dict())
    assert not [name for name in names if recipe.source(name)]
    optional = [field.name for field in dataclasses.fields(cls) if field.default is None]
    assert len(optional) > 30
    for name in optional:
        recipe, found = read_recipe(cls, [f"--{name}", "null"])
        assert (recipe.source(name), found, recipe.to_dict()) == (None, problems, plain.to_dict()), name


def test_a_removed_option_that_an_older_run_has_as_null_is_not_stated(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("preprocessing_num_workers: null\n")
    assert read_recipe(ClmRecipe, ["--config", str(file)])[1] == read_recipe(ClmRecipe, [])[1]
    for line in ("preprocessing_num_workers: 2\n", "no_option_at_all: null\n"):
        file.write_text(line)
        assert line.partition(":")[0] in read_recipe(ClmRecipe, ["--config", str(file)])[1][0]


def test_a_flag_that_is_null_takes_back_what_the_file_states(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("save_steps: 100\nblock_size: 64\nseed: 3\n")
    recipe, _ = read_recipe(ClmRecipe, ["--config", str(file), "--save_steps", "null", "--max_hours", "null"])
    assert (recipe.save_steps, recipe.source("save_steps"), recipe.block_size, recipe.seed) == (None, None, 64, 3)
    assert recipe.draft().flags_given() == ["--config", str(file), "--save_steps", "null"], "of a printed command, too"


def test_of_a_flag_that_stands_twice_the_last_holds_everywhere():
    assert parse("--seed", "1", "--seed", "2").seed == 2
    assert flag_value(["--task", "clm", "--task=dpo", "--seed", "3"], "task") == "dpo"
