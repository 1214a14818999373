"""Launches that train nothing: what they forget of a recipe, what they read, what they leave, what they refuse."""

from pathlib import Path

import numpy as np
import pytest
from folders import save_blenderbot, save_writer, small_tokenizer
from helpers import refusal, write_records
from transformers import AutoConfig

from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import PromptCollator
from zerofit.data.labelled.examples import GLUE_TASKS, prepare_examples
from zerofit.data.labelled.labels import trained_labels
from zerofit.data.order import FILLER
from zerofit.data.pairs import prepare_pairs
from zerofit.data.prompts import read_sources
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe, parse_recipe
from zerofit.record.run_folder import RunFolder
from zerofit.training.run_configuration import refuse_a_training_run, refuse_other_answers


def test_the_recipe_of_a_run_from_scratch_serves_as_it_is(tmp_path):
    file = tmp_path / "run.yaml"
    from_scratch = "model_type: bert\nconfig_overrides: hidden_size=16\ntrain_tokenizer_vocab_size: 300\nlora_r: 4\n"
    file.write_text(from_scratch + "train_file: gone.csv\nlearning_rate: 3e-3\nglobal_batch_size: 7\n")
    flags = ["--config", str(file), "--evaluate_only", "--validation_file", "a.csv", "--max_train_steps", "9"]
    recipe = parse_recipe(ClsRecipe, [*flags, "--model_name_or_path", "outputs/run"])
    assert not recipe.trains
    left = {name: getattr(recipe, name) for name in ("model_type", "config_overrides", "train_file", "lora_r")}
    assert left == {"model_type": None, "config_overrides": None, "train_file": None, "lora_r": 8}
    assert (recipe.learning_rate, recipe.global_batch_size) == (5e-5, None)
    assert recipe.without_effect == ["--max_train_steps"], "a recipe may say what it likes, a flag is told of"
    kept = parse_recipe(
        ClsRecipe,
        ["--model_name_or_path", "a", "--config_overrides", "b=1", "--evaluate_only", "--train_file", "a.csv"],
    )
    assert (kept.config_overrides, kept.train_file) == ("b=1", ["a.csv"])
    flags = ["--config_name", "gpt2", "--tokenizer_name", "gpt2", "--evaluate_only", "--validation_file", "a.txt"]
    assert "--evaluate_only: the weights are those of model_name_or_path" in refusal(parse_recipe, ClmRecipe, flags)


def test_a_task_of_glue_is_read_from_the_file_that_is_named():
    flags = ["--model_name_or_path", "a", "--task_name", "mrpc"]
    for more in (["--evaluate_only", "--validation_file", "dev.tsv"], ["--predict_file", "test.tsv"]):
        assert parse_recipe(ClsRecipe, [*flags, *more]).dataset_name is None
    assert parse_recipe(ClsRecipe, [*flags, "--evaluate_only"]).dataset_name == "nyu-mll/glue"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max_train_steps 0 --train_file a", "it must be above 0. To train nothing, say --evaluate_only, or"),
        ("--evaluate_only --predict_file a.txt", "evaluate_only = true and predict_file = a.txt: keep one of them"),
        ("--evaluate_only --train_file a --validation_split_percentage 0", "Name a validation_file"),
    ],
)
def test_what_a_recipe_says_of_it(flags, words):
    assert words in refusal(parse_recipe, ClmRecipe, ["--model_name_or_path", "gpt2", *flags.split()])


def test_the_folder_of_a_training_run_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    refuse_a_training_run(folder)
    folder.start_answers({"seed": 1}, {"name": "single"}, {})
    (tmp_path / "run" / "predictions.jsonl").write_text("{}\n")
    folder.metrics.add({"update": 0, "eval_loss": 1.0})
    refuse_a_training_run(folder)
    folder.start_answers({"seed": 2}, {"name": "single"}, {})
    assert {file.name for file in folder.path.iterdir()} == {
        ".lock",
        "files.json",
        "recipe.yaml",
        "strategy.yaml",
        "environment.json",
    }, "what an earlier one has left is gone"
    recipe = parse_recipe(ClsRecipe, ["--model_name_or_path", "a", "--predict_file", "one.tsv"])
    folder.start_answers(recipe.to_dict(), {"name": "single"}, {})
    other = parse_recipe(ClsRecipe, ["--model_name_or_path", "a", "--predict_file", "two.tsv"])
    refuse_other_answers(folder, other)  # nothing was answered yet
    folder.write_predictions([{}])
    refuse_other_answers(folder, recipe)
    said = refusal(refuse_other_answers, folder, other)
    assert "holds a different run: predict_file was ['one.tsv'], now ['two.tsv']" in said
    (tmp_path / "run" / "model").mkdir()
    assert "holds a training run" in refusal(refuse_a_training_run, folder)


TESTED = {  # the columns of test.tsv, and a record of it
    "cola": ("index\tsentence", "0\ta cat"),
    "mnli": ("index\tpromptID\tpairID\tsentence1_binary_parse\tsentence1\tsentence2", "0\t1\t2\t(a)\ta\tb"),
    "mrpc": ("index\t#1 ID\t#2 ID\t#1 String\t#2 String", "0\t4\t5\ta\tb"),
    "qnli": ("index\tquestion\tsentence", "0\ta\tb"),
    "qqp": ("id\tquestion1\tquestion2", "0\ta\tb"),
    "rte": ("index\tsentence1\tsentence2", "0\ta\tb"),
    "sst2": ("index\tsentence", "0\ta"),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
        "0\tg\tf\t1\t2\ts\tt\ta\tb",
    ),
    "wnli": ("index\tsentence1\tsentence2", "0\ta\tb"),
}


def classifier(labels: tuple[str, ...] | None):
    names = labels or ("LABEL_0",)
    return AutoConfig.for_model(
        "bert",
        id2label=dict(enumerate(names)),
        max_position_embeddings=64,
        problem_type=None if labels else "regression",
    )


def asked(config, tokenizer: Path, cache: str, *flags: str):
    words = ["--model_name_or_path", "a", "--tokenizer_name", str(tokenizer), "--cache_dir", cache, *map(str, flags)]
    return prepare_examples(parse_recipe(ClsRecipe, words), config)


@pytest.mark.parametrize("task", GLUE_TASKS)
def test_the_test_file_of_each_task_is_read(tmp_path, cache, byte_tokenizer, task):
    assert TESTED.keys() == GLUE_TASKS.keys()
    header, row = TESTED[task]
    file = tmp_path / "test.tsv"
    rows = [str(number + 7) + row[1:] for number in range(3)]
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8-sig")
    config = classifier(GLUE_TASKS[task].labels)
    data = asked(config, byte_tokenizer, cache, "--task_name", task, "--predict_file", file)
    (part,) = data.held_out
    assert data.train is None
    assert len(part.samples) == 3
    assert part.tables[0][0] == dict(zip(header.split("\t"), rows[0].split("\t")))
    read = data.tokenizer.decode(part.samples[0]["input_ids"], skip_special_tokens=True)
    assert read.replace(" ", "") == "".join(row.split("\t")[-len(GLUE_TASKS[task].texts) :]).replace(" ", "")


def test_records_of_ones_own_need_no_label_and_keep_their_places(tmp_path, cache, byte_tokenizer):
    config = classifier(("bad", "good"))
    (tmp_path / "a.csv").write_text('title,label\n"a cat",\n"",good\n"None",\n')
    data = asked(config, byte_tokenizer, cache, "--predict_file", tmp_path / "a.csv")
    assert data.labels.names == ("bad", "good")
    assert data.held_out[0].tables[0]["title"][:] == ["a cat", "", "None"]
    assert "note      1 of 3 texts are empty" in data.notes
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    assert len(asked(config, byte_tokenizer, cache, "--predict_file", tmp_path / "a.txt").held_out[0].samples) == 2


def test_words_need_no_tags(tmp_path, cache, pairs_tokenizer):
    config = classifier(("O", "B-PER"))
    config.architectures = ["BertForTokenClassification"]
    rows = [["a", "cat"], [], ["", "b"]]
    file = write_records(tmp_path / "a.jsonl", [{"words": words, "more": 1} for words in rows])
    data = asked(config, pairs_tokenizer, cache, "--predict_file", file)
    (part,) = data.held_out
    assert (data.labels.names, data.labels.is_token_level) == (("O", "B-PER"), True)
    assert part.tables[0].to_dict() == {"words": rows, "more": [1] * 3}
    assert [(part.samples[index]["starts"] < 0).tolist() for index in range(3)] == [[False] * 2, [], [True, False]]
    assert "note      1 of 3 texts are empty" in data.notes
    flags = ("--predict_file", file, "--text_columns", "x")
    assert "text_columns" in refusal(asked, config, pairs_tokenizer, cache, *flags)


@pytest.mark.parametrize(
    ("names", "class_names", "is_number", "words"),
    [
        (("a", "b", "c"), ("x", "y"), False, "was trained for 3 labels (a, b, c), the data has x, y"),
        (("a", "b"), None, True, "the task asks for a number"),
        (None, ("x", "y"), False, "was trained for one number, and the task asks for x, y"),
    ],
)
def test_a_model_of_other_labels_is_refused(names, class_names, is_number, words):
    assert words in refusal(trained_labels, classifier(names), class_names, [], is_number)


@pytest.fixture(scope="module")
def writer(cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = small_tokenizer(Path(cache))
    save_writer(folder, tokenizer)
    return folder


def text_data(model: Path, cache: str, *flags: str):
    recipe = parse_recipe(ClmRecipe, ["--model_name_or_path", str(model), "--cache_dir", cache, *map(str, flags)])
    return prepare_causal_data(recipe, load_configuration(recipe))


def test_what_a_prompt_is(writer, cache, tmp_path):
    """Texts go on as they are; instructions are asked as in training, up to where the answer begins."""
    (tmp_path / "a.txt").write_text("Once upon\n\n  a time \n")
    data = text_data(writer, cache, "--predict_file", tmp_path / "a.txt")
    assert [record["prompt"] for record in data.prompts.records] == ["Once upon", "  a time "]
    assert [data.tokenizer.decode(ids) for ids in data.prompts.ids] == ["Once upon", "  a time "]
    flags = ("--predict_file", tmp_path / "a.txt", "--chat_template", "chatml")
    assert "chat_template = 'chatml': no effect" in refusal(text_data, writer, cache, *flags)
    known = {"instruction": "Say 1", "output": "one"}
    file = write_records(tmp_path / "a.jsonl", [known, {"instruction": "Say 2", "output": None}])
    asked = text_data(writer, cache, "--predict_file", file, "--chat_template", "instruction")
    one, two = (asked.tokenizer.decode(ids) for ids in asked.prompts.ids)
    assert one.replace("1", "2") == two
    assert one.endswith("### Response:\n")
    assert asked.prompts.is_chat
    talks = [[("user", "a"), ("assistant", "b"), ("user", "c")], [("user", "a"), ("assistant", "b")]]
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    file = write_records(tmp_path / "talks.jsonl", records)
    waiting = text_data(writer, cache, "--predict_file", file, "--chat_template", "none").prompts
    assert [len(record["messages"]) for record in waiting.records] == [3, 1], "an answer that is known is left out"


def test_a_prompt_without_room(writer, cache, tmp_path):
    (tmp_path / "a.txt").write_text("a cat sat on a mat " * 40 + "\nshort\n")
    data = text_data(writer, cache, "--predict_file", tmp_path / "a.txt", "--max_new_tokens", "54")
    assert [len(ids) for ids in data.prompts.ids] == [10, len(data.tokenizer("short")["input_ids"])]
    assert any("1 of 2 prompts lose their beginning" in note for note in data.notes)
    message = refusal(text_data, writer, cache, "--predict_file", tmp_path / "a.txt", "--max_new_tokens", "64")
    assert "max_new_tokens = 64:" in message


def test_sources_without_targets(cache, tmp_path):
    save_blenderbot(tmp_path / "bot", small_tokenizer(Path(cache)))

    def recipe_of(option: str, records: list[dict], *flags: str):
        words = [
            "--model_name_or_path",
            str(tmp_path / "bot"),
            "--max_source_length",
            "32",
            "--max_target_length",
            "16",
        ]
        file = write_records(tmp_path / "a.jsonl", records)
        return parse_recipe(Seq2SeqRecipe, [*words, "--cache_dir", cache, option, str(file), *flags])

    talks = [{"dialogue": [f"turn {n} of {k}" for n in range(k)]} for k in (2, 3)]
    recipe = recipe_of("--train_file", talks, "--validation_split_percentage", "0")
    rows = prepare_pairs(recipe, load_configuration(recipe)).train
    trained = [rows[index]["input_ids"].tolist() for index in range(len(rows))]
    turns = [{"dialogue": talk["dialogue"][:-1]} for talk in talks]
    recipe = recipe_of("--predict_file", turns)
    prompts = read_sources(recipe, load_configuration(recipe)).prompts
    assert prompts.ids == [trained[0], trained[2]], "the very rows of training, each conversation once"
    named = [{"from": "user", "value": "turn 0 of 2"}, {"from": "gpt", "value": "known"}]
    for records in (
        [{"source": "turn 0 of 2", "target": "x"}],
        [{"x": "turn 0 of 2"}],
        [{"conversations": named}],
        [{"translation": {"de": "turn 0 of 2"}}],
    ):
        recipe = recipe_of("--predict_file", records)
        assert read_sources(recipe, load_configuration(recipe)).prompts.ids == [trained[0]]
    recipe = recipe_of("--predict_file", [{"a": "x", "b": "y"}])
    assert "--source_column" in refusal(read_sources, recipe, load_configuration(recipe))


def test_prompts_are_padded_on_the_side_where_they_do_not_go_on():
    samples = [({"input_ids": np.arange(1, length + 1)}, index) for length, index in ((2, 0), (4, FILLER))]
    for left, row, seen in ((True, [9, 9, 1, 2], [0, 0, 1, 1]), (False, [1, 2, 9, 9], [1, 1, 0, 0])):
        batch = PromptCollator(9, left)(samples)
        assert batch.inputs["input_ids"].tolist() == [row, [1, 2, 3, 4]]
        assert batch.inputs["attention_mask"].tolist() == [seen, [1, 1, 1, 1]]
        assert (batch.num_tokens, batch.indices) == (2, [0, FILLER])


# ----------------------------------------------------------------------------------------------- inputs as in training


@pytest.mark.parametrize(("recipe_class", "trained", "flags", "values", "words"), [
    (ClsRecipe, {"max_length": 64, "text_columns": ["b", "a"]}, (), {"max_length": 64, "text_columns": ["b", "a"]},
     ("as in training: max_length = 64", "as in training: text_columns = b a")),
    (ClsRecipe, {"max_length": 64}, ("--max_length", "32"), {"max_length": 32},
     ("max_length = 32 (--max_length): the model was trained with 64",)),
    (ClsRecipe, {"max_length": 32}, ("--max_length", "32"), {"max_length": 32}, ()),
    (ClsRecipe, {"max_length": 128, "unknown": 1}, (), {"max_length": 128}, ()),
    (Seq2SeqRecipe, {"source_prefix": "Q: ", "max_target_length": 9, "turn_separator": None},
     ("--turn_separator", "|"), {"source_prefix": "Q: ", "max_target_length": 9, "turn_separator": "|"},
     ("source_prefix = 'Q: '", "turn_separator = '|' (--turn_separator): the model was trained without it")),
    (ClmRecipe, {"block_size": 96, "packing": "none", "system_prompt": "Be short."}, (),
     {"block_size": 96, "packing": "none", "system_prompt": "Be short."}, ("block_size = 96",)),
    (ClmRecipe, {"reset_position_ids": True}, (), {"reset_position_ids": False}, ()),  # of corpora
])  # fmt: skip
def test_inputs_are_as_in_training_unless_an_option_says_otherwise(recipe_class, trained, flags, values, words):
    file = "a.txt" if recipe_class is ClmRecipe else "a.jsonl"
    arguments = ["--model_name_or_path", "m", "--evaluate_only", "--validation_file", file, *flags]
    recipe = parse_recipe(recipe_class, arguments).draft()
    notes = recipe.adopt_inputs(trained)
    assert {name: getattr(recipe, name) for name in values} == values
    assert len(notes) >= len(words)
    assert all(any(word in note for note in notes) for word in words)
    assert words or not notes


def test_columns_of_training_that_other_data_lacks_are_not_asked_for():
    recipe = parse_recipe(ClsRecipe, ["--model_name_or_path", "m", "--predict_file", "a.csv"]).draft()
    recipe.adopt_inputs({"text_columns": ["b", "a"], "label_column": "class"})
    assert recipe.columns_in(["a", "b", "class"]) is recipe
    other = recipe.columns_in(["a", "class"])
    assert (other.text_columns, other.label_column) == (None, "class")
    assert recipe.text_columns == ["b", "a"]
