"""Training on Megatron's corpora: the samples are megatron-core's, and what cannot be read is refused."""

import dataclasses
import platform
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.helpers import ROOT, check_refusal, refusal, tiny_model
from zerofit.data.causal import prepare_causal_data
from zerofit.data.collate import CausalCollator
from zerofit.data.megatron import (
    INDEX_FOLDER,
    Blend,
    CorpusCard,
    build_samples,
    import_megatron,
    open_corpus,
    tokenizer_fingerprint,
)
from zerofit.data.order import FixedOrder, make_loader, rank_batches
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import IGNORE, install_loss
from zerofit.model.tokenizer import check_vocabulary, pad_vocabulary, train_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import cache_root
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe

pytest.importorskip("megatron.core", reason="corpora take the extra [megatron]")

VOCABULARY, EOD = 97, 0


def write_corpus(prefix: Path, documents: list[list[int]], dtype=np.uint16) -> str:
    builder = import_megatron().indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document, dtype=np.int64), [len(document)] if document else [])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(seed: int, count: int, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(1, VOCABULARY, rng.integers(0, longest)).tolist(), EOD] for _ in range(count)]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    return [
        write_corpus(folder / name, random_documents(seed, count))
        for seed, (name, count) in enumerate((("a", 300), ("b", 90), ("c", 150)))
    ]


def indices(recipe) -> dict[str, object]:
    """The options that restart, and the folder of indices."""
    root = cache_root(recipe.cache_dir) / INDEX_FOLDER
    return {"resets": tuple(name for name in FLAGS if getattr(recipe, name)), "root": root}


def recipe_of(*flags: str):
    """A recipe that is sound but for what the flags say."""
    data = [] if {"--data_path", "--train_file"} & set(flags) else ["--train_file", "any"]
    return parse_recipe(ClmRecipe, ["--config_name", "gpt2", "--tokenizer_name", "any", *data, *flags])


def samples_of(prefix: str, count: int, cache: Path, size: int = 16, vocabulary: int = VOCABULARY):
    """Training samples of a whole corpus."""
    blend = Blend([open_corpus("data_path", prefix)], None, "1", size, 0)
    return build_samples(blend, count, 0, vocabulary, EOD, resets=(), root=cache)[0]


def megatrons(blend: list[str], split: str, size: int, samples: int, held_out: int, seed: int, flags: dict):
    """What megatron-core gives by itself, with no cache."""
    core = import_megatron()
    from megatron.core.datasets.utils import get_blend_from_list

    class Tokenizer:
        vocab_size, eod, unique_identifiers = VOCABULARY, EOD, {}

    config = core.gpt.GPTDatasetConfig(
        random_seed=seed, sequence_length=size, blend=get_blend_from_list(blend), split=split, tokenizer=Tokenizer(),
        create_attention_mask=True, path_to_cache=None, **flags,
    )  # fmt: skip
    config.split_matrix[2] = None  # with an empty test part megatron-core 0.16.1 never comes back
    builder = core.builder.BlendedMegatronDatasetBuilder
    return builder(core.gpt.GPTDataset, [samples, held_out, 0], lambda: True, config).build()


FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.parametrize(
    ("weights", "split", "samples", "size", "flags"),
    [
        ([None], "949,50,1", 40, 16, ()),
        ([None], "1", 700, 16, ("eod_mask_loss",)),  # more than one pass
        ([None], "80,20,0", 600, 7, FLAGS),
        ([1.0], "969,30,1", 300, 16, ()),  # a weight makes a blend of one
        ([0.3, 0.7], "90,10", 400, 16, ("reset_position_ids",)),
        ([3, 1, 2], "80,10,10", 1000, 9, ("eod_mask_loss",)),
        ([None, None, None], "90/10/0", 200, 16, ()),
    ],
)
def test_samples_are_those_of_megatron(prefixes, tmp_path, weights, split, samples, size, flags):
    chosen = prefixes[: len(weights)]
    words = [str(word) for pair in zip(weights, chosen) for word in pair if word is not None]
    given = [f"--{name}" for name in flags]
    recipe = recipe_of("--data_path", *words, "--split", split, "--cache_dir", str(tmp_path / "cache"), *given)
    corpora = [open_corpus("data_path", prefix) for prefix in chosen]
    blend = Blend(corpora, None if weights[0] is None else weights, recipe.split, size, seed=5)
    blend.check()
    held_out = 0 if split == "1" else min(7, blend.max_samples_without_repeats(1))
    train, validation = build_samples(blend, samples, held_out, VOCABULARY, EOD, **indices(recipe))
    theirs = megatrons(words, split, size, samples, held_out, 5, {name: name in flags for name in FLAGS})
    compared = 0
    for ours, reference, count in ((train, theirs[0], samples), (validation, theirs[1], held_out)):
        for index in range(count):
            sample, found = ours[index], reference[index]
            targets = np.where(found["loss_mask"].numpy() > 0, found["labels"].numpy(), IGNORE)
            assert sample["input_ids"].tolist() == found["tokens"].tolist()
            assert sample["next_tokens"].tolist() == targets.tolist()
            if "reset_position_ids" in flags:
                assert sample["position_ids"].tolist() == found["position_ids"].tolist()
            compared += 1
    assert compared == samples + held_out
    again, _ = build_samples(blend, samples, held_out, VOCABULARY, EOD, **indices(recipe))  # from the index
    assert again[samples - 1]["input_ids"].tolist() == train[samples - 1]["input_ids"].tolist()


def test_evaluation_is_the_same_however_long_the_run(prefixes, tmp_path):
    """Without weights: each held-out sample once, also where the run passes over the training part several times."""
    corpora = [open_corpus("data_path", prefix) for prefix in prefixes]
    blend = Blend(corpora, None, "80,20", 16, seed=1)
    recipe = recipe_of("--data_path", *prefixes, "--split", "80,20", "--cache_dir", str(tmp_path))
    most = blend.max_samples_without_repeats(1)
    assert most == blend.samples_per_epoch(1) == sum(blend.samples(corpus, 1) for corpus in corpora)
    seen = []
    for passes in (1, 3):
        count = passes * blend.samples_per_epoch(0)
        _, held_out = build_samples(blend, count, most, VOCABULARY, EOD, **indices(recipe))
        rows = [held_out[index]["input_ids"].tolist() for index in range(most)]
        origins = np.bincount([int(held_out.dataset[index]["dataset_id"]) for index in range(most)])
        assert origins.tolist() == [blend.samples(corpus, 1) for corpus in corpora]
        seen.append(rows)
    assert seen[0] == seen[1]
    assert len({tuple(row) for row in seen[0]}) == most


@pytest.mark.parametrize("weights", [[0.2, 0.5, 0.3], [0.9, 0.05, 0.05], [1, 100, 1]])
def test_with_weights_no_held_out_sample_comes_twice(prefixes, tmp_path, weights):
    blend = Blend([open_corpus("data_path", prefix) for prefix in prefixes], weights, "80,20", 16, seed=1)
    recipe = recipe_of("--data_path", *prefixes, "--cache_dir", str(tmp_path))
    most = blend.max_samples_without_repeats(1)
    _, held_out = build_samples(blend, 50, most, VOCABULARY, EOD, **indices(recipe))
    rows = [tuple(held_out[index]["input_ids"].tolist()) for index in range(most)]
    assert len(set(rows)) == most > 0


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("flags", [(), FLAGS[1:2], FLAGS])
def test_the_model_sees_what_megatrons_masks_say(prefixes, tmp_path, family, flags):
    """The oracle is megatron-core's own mask and positions, given to the model in full."""
    given = [f"--{name}" for name in flags]
    recipe = recipe_of("--data_path", prefixes[0], "--split", "1", "--cache_dir", str(tmp_path), *given)
    blend = Blend([open_corpus("data_path", prefixes[0])], None, "1", 48, seed=2)
    train, _ = build_samples(blend, 12, 0, VOCABULARY, EOD, **indices(recipe))
    theirs = megatrons(prefixes[:1], "1", 48, 12, 0, 2, {name: name in flags for name in FLAGS})[0]
    rows = [theirs[index] for index in range(12)]
    assert sum(int((row["tokens"] == EOD).sum()) for row in rows) > 20
    model = tiny_model(family)
    install_loss(model, "full")
    mask = torch.stack([~row["attention_mask"] for row in rows])
    names = ("position_ids", "tokens", "labels", "loss_mask")
    positions, tokens, labels, counts = (torch.stack([row[name] for row in rows]) for name in names)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        expected = (losses * counts.flatten()).sum().item()
        batch = CausalCollator(pad_id=0)([(train[index], index) for index in range(12)])
        assert batch.num_targets == int(counts.sum())
        for kind in ("full", "chunked"):
            install_loss(model, kind)
            assert model(**batch.inputs).item() == pytest.approx(expected, rel=1e-6)


def test_a_vocabulary_is_padded():
    """It is cut again on export: test_pipeline.py."""
    config = tiny_model("gpt2").config
    assert "128 rows" in pad_vocabulary(config, recipe_of("--make_vocab_size_divisible_by", "128"))
    assert (config.vocab_size, config.unpadded_vocab_size) == (128, VOCABULARY)


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory):
    """(tokenizer's folder, corpus with a card, the card)."""
    folder = tmp_path_factory.mktemp("tokenised")
    texts = [file.read_text() for file in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = train_tokenizer(texts, 400, "docs", folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    pieces = [piece for text in texts for piece in text.split("\n\n") if piece.strip()]
    ids = [[*tokenizer(piece)["input_ids"], tokenizer.eos_token_id] for piece in pieces]
    prefix = write_corpus(folder / "docs", ids)
    card = CorpusCard("docs", tokenizer_fingerprint(tokenizer), len(tokenizer), tokenizer.eos_token_id, len(ids),
                sum(map(len, ids)), max(map(max, ids)), ["docs"], "a test")  # fmt: skip
    card.write(Path(f"{prefix}.json"))
    return folder / "tokenizer", prefix, card


def prepared(tokenised, cache: Path, *flags: str):
    folder, prefix, _ = tokenised
    given = [] if "--data_path" in flags else ["--data_path", prefix]
    words = ["--config_name", "gpt2", "--tokenizer_name", str(folder), "--block_size", "64", "--split", "90,10,0"]
    recipe = parse_recipe(ClmRecipe, [*words, "--cache_dir", str(cache), *given, *flags])
    config = load_configuration(recipe)
    data = prepare_causal_data(recipe, config, consumed=lambda updates: 8 * updates)
    check_vocabulary(config, data.tokenizer, recipe)
    return data


def test_evaluation_alone_reads_what_a_run_holds_out(tokenised, tmp_path):
    tokens = len(AutoTokenizer.from_pretrained(tokenised[0]))
    AutoConfig.for_model("gpt2", vocab_size=tokens).save_pretrained(tmp_path / "model")
    model = ("--evaluate_only", "--model_name_or_path", str(tmp_path / "model"))
    trained = prepared(tokenised, tmp_path, "--max_train_steps", "50").validation
    evaluated, whole = (prepared(tokenised, tmp_path, *model, *more) for more in ([], ["--split", "0,1"]))
    assert evaluated.train is None
    assert len(trained) == len(evaluated.validation) >= 2
    for index in range(len(trained)):
        assert trained[index]["input_ids"].tolist() == evaluated.validation[index]["input_ids"].tolist()
    assert len(whole.validation) == (tokenised[2].tokens - 1) // 64
    assert "holds nothing out" in refusal(prepared, tokenised, tmp_path, *model, "--split", "1")


def test_an_index_is_whole_or_not_there(tokenised, tmp_path):
    whole = prepared(tokenised, tmp_path / "x").train[3]["input_ids"].tolist()
    (index,) = [path for path in (tmp_path / "x" / INDEX_FOLDER).iterdir() if path.is_dir()]
    partial = index.with_name(f"{index.name}.partial-{platform.node()}")
    index.rename(partial)  # as a kill leaves it
    for file in partial.glob("*.npy"):
        file.write_bytes(file.read_bytes()[:60])
    assert prepared(tokenised, tmp_path / "x").train[3]["input_ids"].tolist() == whole
    assert index.is_dir()
    assert not partial.exists()


def test_an_index_is_not_taken_for_another_corpus(tmp_path):
    """megatron-core's own cache goes by the path alone: a corpus made anew would be read with the old index."""
    prefix = write_corpus(tmp_path / "x", random_documents(1, 50))
    before = samples_of(prefix, 4, tmp_path / "cache")
    write_corpus(tmp_path / "x", random_documents(2, 20))
    assert len(samples_of(prefix, 4, tmp_path / "cache")) != len(before)


@pytest.fixture
def damaged(tokenised, tmp_path) -> str:
    """A copy of the corpus, to be spoilt."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{tokenised[1]}{suffix}", tmp_path / f"copy{suffix}")
    return str(tmp_path / "copy")


def change(path: str, offset: int, value: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(value)


def cut(path: str, count: int) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-count])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda p: cut(f"{p}.bin", 2), ["copy.bin has"]),
        (lambda p: cut(f"{p}.idx", 8), ["copy.idx has", "truncated"]),
        (lambda p: change(f"{p}.idx", 0, b"TNTIDX\x00\x00\x00"), ["not an index of Megatron's", "MMIDIDX"]),
        (lambda p: change(f"{p}.idx", 17, b"\x63"), ["of type 99"]),
        (lambda p: change(f"{p}.idx", 34, struct.pack("<i", -7)), ["copy.idx contradicts itself"]),
        (lambda p: Path(f"{p}.bin").unlink(), ["there is no", "copy.bin"]),
        (lambda p: Path(f"{p}.json").write_text("{}"), ["copy.json", "zerofit prepare"]),
    ],
)
def test_damaged_corpora_are_refused(tokenised, damaged, tmp_path, spoil, said):
    assert prepared(tokenised, tmp_path / "cache", "--data_path", damaged).train is not None
    spoil(damaged)
    message = refusal(prepared, tokenised, tmp_path / "cache", "--data_path", damaged)
    assert message.startswith(f"error: {damaged if 'json' in said[0] else 'data_path'}"), message
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data_path", "0.5", "{corpus}", "0.5", "missing/prefix"], ["missing/prefix.idx", "missing/prefix.bin"]),
        (["--data_path", "-1", "{corpus}", "2", "other"], ["write WEIGHT SOURCE"]),
        (["--data_path", "0.3", "{corpus}", "other"], ["other: write WEIGHT SOURCE"]),
        (["--data_path", "{corpus}", "{corpus}.bin"], ["are one corpus"]),
        (["--data_path", ""], ["has no name"]),
        (["--append_eos", "false"], ["append_eos", "no effect with data_path"]),
        (["--split", "1000000,1,0"], ["leaves evaluation 0 tokens"]),
        (["--split", "0,1,1"], ["split = '0,1,1'"]),
    ],
)
def test_mistakes_in_the_options(tokenised, tmp_path, flags, said):
    check_refusal(said, prepared, tokenised, tmp_path, *(flag.format(corpus=tokenised[1]) for flag in flags))


def test_ids_beyond_the_vocabulary(tokenised, tmp_path):
    for number in (-1, 40_000):
        documents = [[1, 2, 3] * 50, [4, number, 5] * 50, [7] * 200]
        prefix = write_corpus(tmp_path / f"with{number}", documents, np.int32)
        message = refusal(prepared, tokenised, tmp_path, "--data_path", prefix, "--split", "1")
        assert f"token {number:,}, the tokenizer has 400" in message
    train = samples_of(prefix, 20, tmp_path, vocabulary=400)  # and where nobody has looked before
    with pytest.raises(UserError, match=r"sample \d+ holds token 40,000"):
        [train[index] for index in range(20)]


def test_what_a_data_worker_says_reaches_the_user(tmp_path):
    prefix = write_corpus(tmp_path / "big", [[1, 2, 3] * 50, [4, 96, 5] * 50])
    train = samples_of(prefix, 12, tmp_path, vocabulary=90)
    batches = rank_batches(FixedOrder(12), 12, 0, 4, 1, num_replicas=1, rank=0)
    message = refusal(list, make_loader(train, batches, CausalCollator(pad_id=0), 1, pin=False))
    assert message.startswith("error: data_path: sample ")
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"eod": 7}, ["{corpus}"], "end differently"),
        ({"fingerprint": "another", "tokenizer": "gpt2"}, [], "tokenizer_name"),
    ],
)
def test_a_card_that_contradicts(tokenised, damaged, tmp_path, changes, flags, said):
    dataclasses.replace(tokenised[2], **changes).write(Path(f"{damaged}.json"))
    more = [flag.format(corpus=tokenised[1]) for flag in flags]
    assert said in refusal(prepared, tokenised, tmp_path, "--data_path", damaged, *more)


def test_a_fingerprint_is_of_what_a_tokenizer_does(tokenised, tmp_path):
    folder, _, card = tokenised
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<padding>"]})
    tokenizer.save_pretrained(tmp_path / "stored")
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path / "stored")) == card.fingerprint
    other = train_tokenizer(["something else " * 99, "z q j " * 80], 262, "other", tmp_path)
    assert tokenizer_fingerprint(other) != card.fingerprint
