"""Translation models: the tokens of languages in sources and targets, as transformers documents them."""

import json
import string

import pytest
from helpers import check_refusal, refusal, write_records
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoTokenizer,
    MarianTokenizer,
    MBart50Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerFast,
)

from zerofit.data.pairs import prepare_pairs
from zerofit.data.prompts import Renderer, read_sources
from zerofit.model.configuration import TRAINED_WITH
from zerofit.model.tokenizer import first_target_tokens, language_codes, set_decoder_start_token, set_languages
from zerofit.recipe import Seq2SeqRecipe, parse_recipe
from zerofit.training.run_configuration import trained_with

MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
LETTERS = ["▁", *string.ascii_letters, *".,äöü"]
KINDS = {  # tokenizer: the model's type, two of its codes, and the same languages as others spell them
    "nllb": ("m2m_100", "eng_Latn", "deu_Latn", "de"),
    "mbart": ("mbart", "en_XX", "de_DE", "deu_Latn"),
    "mbart50": ("mbart", "en_XX", "de_DE", "de"),
    "m2m": ("m2m_100", "en", "de", "de_DE"),
    "marian": ("marian", None, "deu", "de_DE"),
}
TALK = [{"source": "the cat sat", "target": "die katze"}, {"source": "a dog", "target": "der hund"}] * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: a folder with a small tokenizer of it}, without languages that are said."""
    spm = pytest.importorskip("sentencepiece")
    root = tmp_path_factory.mktemp("translation")
    (root / "text.txt").write_text("\n".join(f"{pair['source']} {pair['target']}" for pair in TALK) + "\n")
    how = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
    spm.SentencePieceTrainer.train(input=str(root / "text.txt"), model_prefix=str(root / "sp"), **how)
    model = spm.SentencePieceProcessor(model_file=str(root / "sp.model"))
    pieces = [model.IdToPiece(number) for number in range(3, model.GetPieceSize())]
    names = {"m2m": [*MARKS, *pieces], "marian": ["</s>", "<unk>", *pieces, ">>deu<<", ">>fra<<", "<pad>"]}
    for name, tokens in names.items():
        (root / f"{name}.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES, M2M100Tokenizer

    codes = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    spm_file, scored = str(root / "sp.model"), [(token, 0.0 if token in MARKS else -2.0) for token in MARKS + LETTERS]
    made = {
        "nllb": NllbTokenizer(vocab={token: number for number, (token, _) in enumerate(scored)}, merges=[]),
        "mbart": MBartTokenizer(vocab=scored),
        "mbart50": MBart50Tokenizer(vocab=scored),
        "m2m": M2M100Tokenizer(vocab_file=str(root / "m2m.json"), spm_file=spm_file, additional_special_tokens=codes),
        "marian": MarianTokenizer(source_spm=spm_file, target_spm=spm_file, vocab=str(root / "marian.json")),
    }
    for name, tokenizer in made.items():
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in made}


def recipe_of(folder, cache, file, *flags):
    words = ["--model_name_or_path", "a", "--tokenizer_name", folder, "--cache_dir", cache, *flags]
    words += ["--predict_file" if "predict" in file.name else "--train_file", file]
    return parse_recipe(Seq2SeqRecipe, [*map(str, words)])


def config_of(kind):
    """A published configuration: of the first mBART the decoder's start depends on the language."""
    start = None if kind == "mbart" else 2
    return AutoConfig.for_model(KINDS[kind][0], max_position_embeddings=64, decoder_start_token_id=start)


def documented(folder, kind, sources, targets):
    """What the tokenizer's documentation says to call."""
    _, source, target, _ = KINDS[kind]
    if kind == "marian":
        return AutoTokenizer.from_pretrained(folder)([f">>deu<< {text}" for text in sources], text_target=targets)
    return AutoTokenizer.from_pretrained(folder, src_lang=source, tgt_lang=target)(sources, text_target=targets)


@pytest.mark.parametrize("kind", KINDS)
def test_sources_and_targets_are_those_of_the_documented_call(folders, cache, tmp_path, kind):
    file, (_, source, target, _) = write_records(tmp_path / "a.jsonl", TALK), KINDS[kind]
    flags = ["--target_lang", target, *(["--source_lang", source] if source else [])]
    config = config_of(kind)
    data = prepare_pairs(recipe_of(folders[kind], cache, file, *flags), config)
    rows = [data.train[number] for number in range(len(data.train))]
    assert len(rows) >= 4
    asked = documented(folders[kind], kind, *([pair[side] for pair in TALK] for side in ("source", "target")))
    expected = {(*ids, -1, *labels) for ids, labels in zip(asked["input_ids"], asked["labels"])}
    assert {(*row["input_ids"].tolist(), -1, *row["labels"].tolist()) for row in rows} == expected
    set_decoder_start_token(config, data.tokenizer)
    code = data.tokenizer.convert_tokens_to_ids("__de__" if kind == "m2m" else target)
    if kind == "mbart":
        assert first_target_tokens(data.tokenizer) == {"decoder_start_token_id": code}
        assert config.decoder_start_token_id == code
    else:
        assert first_target_tokens(data.tokenizer) == ({} if kind == "marian" else {"forced_bos_token_id": code})
        assert config.decoder_start_token_id == 2


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_prompts_begin_as_in_training(folders, cache, tmp_path, kind):
    """The tokenizer that a run exports says the languages to every later launch, which may name another target."""
    file, (_, source, target, _) = write_records(tmp_path / "a.jsonl", TALK), KINDS[kind]
    flags = ["--target_lang", target, *(["--source_lang", source] if source else [])]
    recipe = recipe_of(folders[kind], cache, file, *flags)
    trained = prepare_pairs(recipe, config_of(kind)).tokenizer
    trained.init_kwargs[TRAINED_WITH] = recipe.inputs  # as a run exports it
    trained.save_pretrained(tmp_path / "model")
    asked = write_records(tmp_path / "predict.jsonl", [{"source": pair["source"]} for pair in TALK])
    recipe = recipe_of(tmp_path / "model", cache, asked)
    assert recipe.adopt_inputs(trained_with(str(tmp_path / "model")))
    data = read_sources(recipe, config_of(kind))
    expected = documented(folders[kind], kind, [TALK[0]["source"]], [TALK[0]["target"]])
    assert list(data.prompts[0]["input_ids"]) == expected["input_ids"][0]
    assert first_target_tokens(data.tokenizer) == first_target_tokens(trained)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert Renderer(loaded, config_of(kind)).ids(TALK[0]["source"]) == expected["input_ids"][0]
    other = {"marian": "fra", "nllb": "fra_Latn", "m2m": "fr"}.get(kind, "fr_XX")
    renderer = Renderer(AutoTokenizer.from_pretrained(tmp_path / "model"), config_of(kind), languages=(None, other))
    ids = renderer.ids(TALK[0]["source"])
    assert (ids == expected["input_ids"][0]) == (kind != "marian"), "Marian's code is in the source"
    assert first_target_tokens(renderer.tokenizer) != first_target_tokens(trained) or kind == "marian"


@pytest.mark.parametrize("kind", KINDS)
def test_languages_that_are_not_said_or_unknown(folders, cache, tmp_path, kind):
    file, (_, source, target, foreign) = write_records(tmp_path / "a.jsonl", TALK), KINDS[kind]
    said = refusal(prepare_pairs, recipe_of(folders[kind], cache, file), config_of(kind))
    assert "--target_lang" in said
    assert f" {language_codes(AutoTokenizer.from_pretrained(folders[kind]))[0]}" in said
    if source:
        one = recipe_of(folders[kind], cache, file, "--target_lang", target)
        assert "Say --source_lang and --target_lang" in refusal(prepare_pairs, one, config_of(kind))
    said = refusal(prepare_pairs, recipe_of(folders[kind], cache, file, "--target_lang", foreign), config_of(kind))
    assert f"target_lang = '{foreign}': the tokenizer has no such language. Similar ones: {target[:2]}" in said
    asked = write_records(tmp_path / "predict.jsonl", [{"source": pair["source"]} for pair in TALK])
    assert "--target_lang" in refusal(read_sources, recipe_of(folders[kind], cache, asked), config_of(kind))
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    assert "--target_lang" in refusal(lambda: Renderer(tokenizer, config_of(kind)).ids("a dog"))


def test_sources_that_bring_marians_code_need_no_option(folders, cache, tmp_path):
    file = write_records(tmp_path / "a.jsonl", [{**pair, "source": f">>fra<< {pair['source']}"} for pair in TALK])
    data = prepare_pairs(recipe_of(folders["marian"], cache, file), config_of("marian"))
    first = AutoTokenizer.from_pretrained(folders["marian"]).convert_tokens_to_ids(">>fra<<")
    assert data.train[0]["input_ids"][0] == first
    file = write_records(tmp_path / "b.jsonl", TALK)
    prefix = recipe_of(folders["marian"], cache, file, "--source_prefix", ">>deu<< ")
    assert prepare_pairs(prefix, config_of("marian")).train[0]["input_ids"][0] == first - 1


@pytest.mark.parametrize(
    ("record", "languages", "source"),
    [
        ({"translation": {"en": "the cat", "de": "die katze"}}, ("eng_Latn", "deu_Latn"), "the cat"),
        ({"translation": {"en": "the cat", "de": "die katze"}}, ("deu_Latn", "eng_Latn"), "die katze"),
        ({"translation": {"deu_Latn": "die katze", "eng_Latn": "the cat"}}, ("eng_Latn", "deu_Latn"), "the cat"),
        ({"de": "die katze", "en": "the cat"}, ("eng_Latn", "deu_Latn"), "the cat"),
        ({"target": "die katze", "source": "the cat"}, ("eng_Latn", "deu_Latn"), "the cat"),
    ],
)
def test_columns_that_are_named_after_languages(folders, cache, tmp_path, record, languages, source):
    file = write_records(tmp_path / "a.jsonl", [record] * 8)
    flags = ["--source_lang", languages[0], "--target_lang", languages[1]]
    data = prepare_pairs(recipe_of(folders["nllb"], cache, file, *flags), config_of("nllb"))
    ids = list(data.train[0]["input_ids"])
    assert ids == AutoTokenizer.from_pretrained(folders["nllb"], src_lang=languages[0])(source)["input_ids"]


def test_columns_whose_language_is_unclear(folders, cache, tmp_path):
    file = write_records(tmp_path / "a.jsonl", [{"translation": {"es": "el gato", "et": "kass"}}] * 8)
    flags = ["--source_lang", "spa_Latn", "--target_lang", "est_Latn"]
    said = refusal(prepare_pairs, recipe_of(folders["nllb"], cache, file, *flags), config_of("nllb"))
    assert "name --source_column and --target_column" in said
    named = [*flags, "--source_column", "es", "--target_column", "et"]
    assert len(prepare_pairs(recipe_of(folders["nllb"], cache, file, *named), config_of("nllb")).train) > 0


def test_tokenizers_without_languages(pairs_tokenizer, cache, tmp_path):
    config = AutoConfig.for_model("t5", vocab_size=300)
    file = write_records(tmp_path / "a.jsonl", [{"translation": {"en": "the cat", "de": "die katze"}}] * 8)
    recipe = recipe_of(pairs_tokenizer, cache, file, "--source_lang", "de", "--target_lang", "en")
    data = prepare_pairs(recipe, config)
    assert data.tokenizer.decode(data.train[0]["input_ids"], True).strip() == "die katze"
    file = write_records(tmp_path / "b.jsonl", TALK)
    recipe = recipe_of(pairs_tokenizer, cache, file, "--source_lang", "en", "--target_lang", "de")
    assert "--source_prefix 'translate" in refusal(prepare_pairs, recipe, config)
    tasks = {"one": {"prefix": "summarize: "}, "two": {"prefix": "translate English to German: "}, "three": {}}
    config = AutoConfig.for_model("t5", vocab_size=300, task_specific_params=tasks)
    for flags, count in (((), 1), (("--source_prefix", "summarize: "), 0)):
        notes = prepare_pairs(recipe_of(pairs_tokenizer, cache, file, *flags), config).notes
        assert sum("trained with 'summarize: ', 'translate English" in note for note in notes) == count
    tokenizer = AutoTokenizer.from_pretrained(pairs_tokenizer)
    assert (set_languages(tokenizer, "en", "de", "p: "), first_target_tokens(tokenizer)) == ("p: ", {})
    assert "marks no languages" in refusal(Renderer, tokenizer, config, languages=("en", None))


def test_a_decoder_that_has_no_token_to_begin_with():
    """Tokenizers that were trained on text alone have no special tokens."""
    config = AutoConfig.for_model("bart", decoder_start_token_id=None, bos_token_id=None, pad_token_id=None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    check_refusal(["decoder_start_token_id"], set_decoder_start_token, config, tokenizer)
    config.pad_token_id = 5
    set_decoder_start_token(config, tokenizer)
    assert config.decoder_start_token_id == 5
