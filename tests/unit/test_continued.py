"""Adapters that are trained on: of this program and of others, with what peft makes of them as the measure; those that
cannot be are refused, with the command that merges them. And embeddings that get rows for more tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from folders import VOCABULARY, answer, save_adapter, save_base, save_blenderbot, small_tokenizer
from helpers import NOT_SHARDED, Harmful, check_refusal, refusal, tiny_deberta
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

from zerofit.model.adapter_folder import adapter_to_train_on, check_resized, find_base, open_adapter, trained_config
from zerofit.model.configuration import load_configuration
from zerofit.model.load import load_model
from zerofit.model.lora import add_adapter, continue_adapter, load_with_adapter
from zerofit.model.tokenizer import check_vocabulary
from zerofit.recipe import parse_recipe
from zerofit.recipe.tasks import TASKS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of peft
CLASSES = {"clm": AutoModelForCausalLM, "cls": AutoModelForSequenceClassification, "seq2seq": AutoModelForSeq2SeqLM}


TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def made(tmp_path, tokenizer):
    """made(family, **settings) -> (folder of an adapter that plain peft has written, what base and adapter answer)."""

    def make(family: str = "llama", config=(), rows: int = 0, **settings):
        if family == "deberta":
            tiny_deberta(tmp_path / "base", num_labels=3)
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
            settings = {"task_type": "SEQ_CLS", "target_modules": ["query_proj", "value_proj"], **settings}
        elif family == "blenderbot":
            model = save_blenderbot(tmp_path / "base", tokenizer)
            settings = {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q_proj", "v_proj"], **settings}
        else:
            model = save_base(tmp_path / "base", tokenizer, family, **dict(config))
            settings = {"target_modules": ["c_attn"] if family == "gpt2" else TARGETS, **settings}
        if rows:
            model.resize_token_embeddings(rows)
        adapted = save_adapter(tmp_path / "adapter", model, tmp_path / "base", **settings)
        return tmp_path / "adapter", answer(adapted)

    return make


def read(folder: Path, *flags: str, task: str = "clm"):
    """(the recipe that trains on the adapter, and names its base; the adapter; the model before it)."""
    words = ["--train_file", "a.jsonl", "--model_name_or_path", str(folder), *flags]
    recipe = parse_recipe(TASKS[task], words).draft()
    adapter = adapter_to_train_on(recipe, task)
    config = trained_config(adapter, load_configuration(recipe), recipe.config_overrides)
    model = load_model(CLASSES[task], config, recipe, NOT_SHARDED, ignored_weights=adapter.full_weights)
    return recipe, adapter, model


def continued(folder: Path, *flags: str, task: str = "clm"):
    recipe, adapter, model = read(folder, *flags, task=task)
    return model, continue_adapter(adapter, model, recipe, NOT_SHARDED)


def trained(model) -> dict[str, torch.Tensor]:
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}


def edit(folder: Path, **changes) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


KINDS = {
    "plain": ("llama", "clm", {}),
    "gpt2": ("gpt2", "clm", {"fan_in_fan_out": True}),
    "rslora": ("llama", "clm", {"use_rslora": True, "lora_alpha": 12}),
    "patterns": ("llama", "clm", {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3}}),
    "regex": ("llama", "clm", {"target_modules": r".*layers\.[01]\..*(up|gate)_proj"}),
    "some layers": ("llama", "clm", {"layers_to_transform": [1]}),
    "saved modules": ("llama", "clm", {"modules_to_save": ["norm", "lm_head"]}),
    "gaussian": ("llama", "clm", {"init_lora_weights": "gaussian"}),
    "classes": ("deberta", "cls", {}),
    "pairs": ("blenderbot", "seq2seq", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_as_base_and_adapter_and_is_written_as_it_was(made, tokenizer, tmp_path, kind):
    family, task, settings = KINDS[kind]
    untied = {"config": {"tie_word_embeddings": False}} if kind == "saved modules" else {}
    folder, expected = made(family, **untied, **settings)
    model, adapter = continued(folder, task=task)
    torch.testing.assert_close(answer(model), expected, rtol=0, atol=1e-5)
    adapter.save(model, trained(model), tokenizer, tmp_path / "again")
    before, after = (load_file(each / "adapter_model.safetensors") for each in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)
    was, now = (json.loads((each / "adapter_config.json").read_text()) for each in (folder, tmp_path / "again"))
    for name in ("r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "task_type"):
        assert now[name] == was[name]
    assert now["base_model_name_or_path"] == "./base"
    assert answer(load_again(tmp_path / "again", tmp_path / "base")).equal(answer(load_again(folder, None)))


def load_again(folder: Path, base: Path | None):
    adapter = open_adapter(str(folder))
    return load_with_adapter(adapter, find_base(adapter, str(base) if base else None))[0].get_base_model()


def to_pickle(folder: Path, rename=str) -> None:
    file = folder / "adapter_model.safetensors"
    torch.save({rename(name): tensor for name, tensor in load_file(file).items()}, folder / "adapter_model.bin")
    file.unlink()


def named_in_state_dict(name: str) -> str:
    return f"{name}.default.weight" if name.endswith("vector") else name.replace(".weight", ".default.weight")


def renamed(rename):
    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})

    return change


BARE = "base_model.model."
FORMS = {
    "pickled": to_pickle,
    "pickled state_dict": lambda folder: to_pickle(folder, named_in_state_dict),
    "compiled": renamed(lambda name: f"_orig_mod.{name}"),
    "compiled base": renamed(lambda name: name.replace(BARE, f"{BARE}_orig_mod.")),
    "compiled layers": renamed(lambda name: name.replace(".layers.1.", ".layers.1._orig_mod.")),
    "ddp": renamed(lambda name: f"module.{name}"),
    "ddp of a compiled one": renamed(lambda name: f"module._orig_mod.{name}"),
    "no prefix": renamed(lambda name: name.removeprefix(BARE)),
    "prefix twice": renamed(lambda name: BARE + name),
    "fsdp": renamed(lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module.")),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_others_are_read(made, form):
    folder, expected = made(use_dora=form == "pickled state_dict")
    FORMS[form](folder)
    torch.testing.assert_close(answer(continued(folder)[0]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("contents", [Harmful("harm"), {"a": Harmful("harm")}, [torch.ones(2)], {"a": 1}, None])
def test_a_pickle_with_more_than_tensors_is_refused(made, contents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = made()
    to_pickle(folder)
    if contents is None:
        (folder / "adapter_model.bin").write_bytes(b"PK\x03\x04 cut off")
    else:
        torch.save(contents, folder / "adapter_model.bin")
    check_refusal(["adapter_model.bin", "adapter_model.safetensors"], open_adapter, str(folder))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [VOCABULARY + 5, VOCABULARY - 20])
def test_a_resized_vocabulary(made, rows, tied):
    """Its embeddings are in the adapter's file, and have other rows than the base's."""
    saves = {} if tied else {"modules_to_save": ["embed_tokens", "lm_head"]}  # tied: peft saves resized ones by itself
    folder, expected = made(config={"tie_word_embeddings": tied}, rows=rows, **saves)
    held = load_file(folder / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in held.items() if "lora_" not in name} == {rows}
    model, adapter = continued(folder)
    assert answer(model).shape[-1] == model.config.vocab_size == rows
    torch.testing.assert_close(answer(model), expected, rtol=0, atol=1e-5)
    assert set(adapter.saved) == {"model.embed_tokens", "lm_head"}
    torch.testing.assert_close(answer(load_again(folder, None)), expected, rtol=0, atol=1e-5)


REFUSED = {  # kind: (changes to adapter_config.json, task, flags, words)
    "other kind": ({"peft_type": "IA3"}, "clm", [], ["IA3"]),
    "pissa": ({"init_lora_weights": "pissa"}, "clm", [], ["init_lora_weights", "pissa"]),
    "tokens": ({"trainable_token_indices": [3]}, "clm", [], ["trainable_token_indices"]),
    "layers": ({"layer_replication": [[0, 2]]}, "clm", [], ["layer_replication"]),
    "task": ({}, "cls", [], ["train/clm.py"]),
    "no base": ({"base_model_name_or_path": None}, "clm", [], ["names no base"]),
    "rank": ({}, "clm", ["--lora_r", "9"], ["lora_r = 9 (--lora_r)", "4"]),
    "targets": ({}, "clm", ["--lora_target_modules", "q_proj"], ["lora_target_modules"]),
    "whole": ({}, "clm", ["--lora", "false"], ["lora = False"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_on_is_refused_with_the_command_that_merges_it(made, kind):
    changes, task, flags, words = REFUSED[kind]
    folder, _ = made()
    edit(folder, **changes)
    command = f"zerofit merge --adapter {folder} --output {folder}-merged"
    check_refusal([str(folder), command, *words], read, folder, *flags, task=task)


def test_ends_that_were_trained_apart_are_refused(made):
    """peft makes two of an embedding that the base uses as its head as well."""
    for saved in (["embed_tokens", "lm_head"], ["lm_head"]):
        folder, _ = made(modules_to_save=saved)
        check_refusal(["one weight", "trained them apart", "zerofit merge --adapter"], continued, folder)


def test_its_own_settings_hold_and_its_dropout_may_change(made):
    folder, _ = made(use_rslora=True, target_modules=TARGETS)
    recipe, _, _ = read(folder)
    assert (recipe.lora, recipe.lora_r, recipe.lora_alpha, recipe.use_rslora) == (True, 4, 8, True)
    assert set(recipe.lora_target_modules) == set(TARGETS)
    assert recipe.lora_dropout == 0.5
    assert recipe.to_dict()["model_name_or_path"] == str(folder), "what is recorded"
    model, adapter = continued(folder, "--lora_dropout", "0.25", "--lora_r", "4")
    assert adapter.config.lora_dropout == 0.25
    assert {each.p for each in model.modules() if isinstance(each, torch.nn.Dropout)} >= {0.25}


def test_an_adapter_of_an_adapter_finds_the_base_of_the_first(made, tmp_path, monkeypatch):
    """Both name a base by its folder's last name, and the path is in the first run's recipe."""
    folder, _ = made()
    for run, trained_on in (("first", tmp_path / "base"), ("second", tmp_path / "first"), ("third", "second/model")):
        (tmp_path / run).mkdir()
        shutil.copytree(folder, tmp_path / run / "model")
        edit(tmp_path / run / "model", base_model_name_or_path="./base")
        (tmp_path / run / "recipe.yaml").write_text(f"model_name_or_path: {trained_on}\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    (tmp_path / "first" / "recipe.yaml").write_text(f"model_name_or_path: {tmp_path / 'moved'}\n")
    assert find_base(open_adapter("third/model"))[1] == str(tmp_path / "moved")


# ------------------------------------------------------------------------------------------------ rows for more tokens


def grown(base: Path, tokens: int, *flags: str, task: str = "clm"):
    """(the model with rows for so many tokens more, the note)."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<new {number}>" for number in range(tokens)])
    words = ["--train_file", "a.jsonl", "--model_name_or_path", str(base), *flags]
    recipe = parse_recipe(TASKS[task], words)
    config = load_configuration(recipe)
    note = check_vocabulary(config, tokenizer, recipe)
    config.pad_token_id = config.vocab_size - 1 if tokens else 0  # as train/cls.py sets it
    model = load_model(CLASSES[task], config, recipe, NOT_SHARDED)
    return model, add_adapter(model, recipe, task, NOT_SHARDED), note


@pytest.mark.parametrize("family", ["llama", "untied", "gpt2", "gpt_neox", "blenderbot", "deberta"])
def test_new_rows_are_the_mean_of_the_others(tmp_path, tokenizer, family):
    task = {"blenderbot": "seq2seq", "deberta": "cls"}.get(family, "clm")
    if family == "deberta":
        tiny_deberta(tmp_path, num_labels=3)
    elif family == "blenderbot":
        save_blenderbot(tmp_path, tokenizer)
    else:
        name, changes = ("llama", {"tie_word_embeddings": False}) if family == "untied" else (family, {})
        save_base(tmp_path, tokenizer, name, **changes)
    before = CLASSES[task].from_pretrained(tmp_path)
    rows = before.config.vocab_size
    model, _, note = grown(tmp_path, 3, "--resize_embeddings", task=task)
    assert f"{rows:,} rows become {model.config.vocab_size:,}" in note
    assert (model.config.vocab_size, model.config.pad_token_id) == (rows + 3, rows + 2)
    assert "stored_vocab_size" not in model.config.to_dict()
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    olds = [each for each in (before.get_input_embeddings(), before.get_output_embeddings()) if each is not None]
    for new, old in zip(ends, olds):
        assert new.weight[:rows].equal(old.weight)
        torch.testing.assert_close(new.weight[rows:], old.weight.mean(dim=0).expand(3, -1), rtol=0, atol=1e-7)
    assert len({id(end.weight) for end in ends}) == len({id(old.weight) for old in olds}), "tied as they were"
    head = answer(model)[..., :rows], answer(before)[..., :rows]
    torch.testing.assert_close(*head, rtol=0, atol=1e-5)


def test_with_an_adapter_the_embeddings_are_trained_and_saved(tmp_path, tokenizer):
    save_base(tmp_path / "base", tokenizer, "llama", tie_word_embeddings=False)
    model, adapter, note = grown(tmp_path / "base", 3, "--resize_embeddings", "--lora")
    assert "saved in full" in note
    assert set(adapter.saved) == {"model.embed_tokens", "lm_head"}
    adapter.save(model, trained(model), tokenizer, tmp_path / "adapter")
    edit(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    torch.testing.assert_close(answer(load_again(tmp_path / "adapter", None)), answer(model), rtol=0, atol=1e-5)
    again, _ = continued(tmp_path / "adapter")
    torch.testing.assert_close(answer(again), answer(model), rtol=0, atol=1e-5)
    recipe, folder, _ = read(tmp_path / "adapter", "--resize_embeddings")
    config = trained_config(folder, load_configuration(recipe), recipe.config_overrides)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.add_tokens([f"<new {number}>" for number in range(9)])
    check_vocabulary(config, tokenizer, recipe)
    check_refusal(["resize_embeddings", "zerofit merge --adapter"], check_resized, folder, config)


def test_without_the_option_the_message_names_it(tmp_path, tokenizer):
    save_base(tmp_path, tokenizer)
    check_refusal(["303 tokens", "300 rows", "--resize_embeddings"], grown, tmp_path, 3)
    assert "all tokens have" in grown(tmp_path, 0, "--resize_embeddings")[2]
    words = ["--train_file", "a.jsonl", "--config_name", "gpt2", "--train_tokenizer_vocab_size", "300"]
    said = refusal(parse_recipe, TASKS["clm"], [*words, "--resize_embeddings"])
    assert "resize_embeddings has no effect without model_name_or_path" in said
    assert "resize_embeddings" in refusal(parse_recipe, TASKS["clm"], [*words, "--resize_vocab", "true"])
