"""Mixtures of sources: shares at every prefix, one order for every number of processes, and each source's own data."""

import itertools
import json
import re

import numpy as np
import pytest
from helpers import check_refusal, recipe_of, refusal, write_records
from transformers import T5Config

from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.labels import class_weights
from zerofit.data.mixture import PLACES_PER_BLOCK, MixtureOrder
from zerofit.data.pairs import prepare_pairs
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe, parse_recipe


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_less_than_one_sample_away_from_the_weights_at_every_prefix(seed):
    draw = np.random.default_rng(seed)
    count = (2, 2, 3, 5, 9, 17)[seed]
    weights = np.maximum(draw.dirichlet(np.full(count, 0.4)), 1e-4)
    weights /= weights.sum()
    chosen = MixtureOrder(weights, [1] * count, seed)
    places = np.concatenate([chosen.block(number)[0] for number in range(2)])
    counts = np.stack([np.cumsum(places == source) for source in range(count)], axis=1)
    away = np.abs(counts - np.outer(np.arange(1, 2 * PLACES_PER_BLOCK + 1), weights))
    assert away.max() <= 1 - 1 / (2 * count - 2) + 1e-6
    assert chosen.block(1)[1].tolist() == counts[PLACES_PER_BLOCK - 1].tolist()


def test_each_source_is_read_as_a_run_on_it_alone_reads_it():
    """In epochs of its own, each a permutation, whatever the cuts at which places are asked for."""
    weights, sizes = [0.6, 0.3, 0.1], [50, 7, 400]
    order = MixtureOrder(weights, sizes, seed=3)
    whole = order.indices(0, 2 * PLACES_PER_BLOCK + 100)
    cuts = [0, 1, 17, PLACES_PER_BLOCK - 3, PLACES_PER_BLOCK + 5, 2 * PLACES_PER_BLOCK, 2 * PLACES_PER_BLOCK + 100]
    pieces = [MixtureOrder(weights, sizes, seed=3).indices(*cut) for cut in itertools.pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), whole)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    for source, size in enumerate(sizes):
        own = whole[(whole >= edges[source]) & (whole < edges[source + 1])] - edges[source]
        assert len(own) > size
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert not np.array_equal(whole, MixtureOrder(weights, sizes, seed=4).indices(0, len(whole)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["0.7", "a.jsonl", "b.jsonl", "0.3", "c.txt"], [(0.7, ["a.jsonl", "b.jsonl"]), (0.3, ["c.txt"])]),
        (["2", "a.jsonl", "1", "c.txt"], [(2.0, ["a.jsonl"]), (1.0, ["c.txt"])]),
        (["a.jsonl", "c.txt"], []),
    ],
)
def test_sources_as_they_are_written(words, expected):
    assert recipe_of(train_file=words).mixture == expected


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train_file", "a.txt", "0.5", "b.txt"], "a.txt 0.5 b.txt: write WEIGHT SOURCE"),
        (["--train_file", "0.5", "0.5", "b.txt"], "0.5 0.5 b.txt: write WEIGHT SOURCE"),
        (["--train_file", "0", "a.txt", "1", "b.txt"], "each weight above 0"),
        (["--train_file", "1", "a.txt"], "one source"),
    ],
)
def test_mistakes_are_named(flags, named):
    assert named in refusal(parse_recipe, ClmRecipe, flags)


def test_options_of_chats_need_a_source_of_chats(tmp_path, llama, prepare_causal):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("\n".join(json.dumps({"text": f"Line {n}."}) for n in range(40)))
    flags = ("--train_file", "1", tmp_path / "a.txt", "1", tmp_path / "a.jsonl", "--block_size", "16")
    assert [*prepare_causal(llama, tmp_path / "a.txt", *flags).sources] == ["a", "a_"]
    words = refusal(prepare_causal, llama, tmp_path / "a.txt", *flags, "--chat_template", "instruction")
    assert "chat_template: no effect, every source is text" in words


def test_text_and_chats_are_mixed(tmp_path, llama, prepare_causal):
    chats = [{"instruction": f"Say {n}.", "output": f"It is {n}."} for n in range(40)]
    write_records(tmp_path / "chats.jsonl", chats)
    (tmp_path / "notes.txt").write_text("\n".join(f"Line {n} of the notes." for n in range(60)))
    words = (tmp_path / "notes.txt", "1", tmp_path / "chats.jsonl")
    flags = ("--chat_template", "instruction", "--packing", "none", "--document_separator", "line")
    data = prepare_causal(llama, "3", *flags, "--train_file", "3", *words, validation_split_percentage=10)
    assert [len(each) for each in data.train.sets] == [54, 36]
    assert {name: len(part) for name, part in data.sources.items()} == {"notes": 6, "chats": 4}
    assert len(data.validation) == 10
    assert data.samples_per_epoch == 72  # the notes are through
    texts = [data.tokenizer.decode(data.train[index]["input_ids"]) for index in data.order.indices(0, 8).tolist()]
    assert sum("Response" in text for text in texts) == 2
    assert json.dumps(data.notes).count("75.0% of the samples") == 1


def test_pairs_are_mixed(tmp_path, pairs_tokenizer):
    """Of sources with other columns; the held-out part of each is the first of the whole, one after another."""
    write_records(tmp_path / "said.jsonl", [{"source": f"say {n}", "target": "a good one"} for n in range(40)])
    write_records(tmp_path / "asked.jsonl", [{"question": f"what is {n}?", "answer": f"{n}"} for n in range(60)])
    sources = ("3", tmp_path / "said.jsonl", "1", tmp_path / "asked.jsonl")
    flags = ("--model_type", "t5", "--tokenizer_name", pairs_tokenizer, "--cache_dir", tmp_path)
    words = (*flags, "--train_file", *sources, "--validation_split_percentage", "10")
    recipe = parse_recipe(Seq2SeqRecipe, [*map(str, words)])
    data = prepare_pairs(recipe, T5Config())
    assert [len(each) for each in data.train.sets] == [36, 54]
    assert {name: len(part) for name, part in data.sources.items()} == {"said": 4, "asked": 6}
    assert data.targets[:4] == ["a good one"] * 4
    assert len(data.validation) == len(data.targets) == 10
    assert data.samples_per_epoch == 48
    assert (data.order.indices(0, 8) < 36).sum() == 6
    lengths = [len(data.train[index]["labels"]) for index in range(90)]
    assert data.train.stats.pair_lengths[1] == pytest.approx(np.mean(lengths))


@pytest.fixture
def prepare_labelled(tmp_path, pairs_tokenizer):
    def prepared(*sources, **more):
        words = []
        for number, (weight, records) in enumerate(sources):
            words += [weight, write_records(tmp_path / f"{'abc'[number]}.jsonl", records)]
        flags = ["--model_type", "bert", "--tokenizer_name", pairs_tokenizer, "--cache_dir", tmp_path / "cache",
                 "--train_file", *words, "--validation_split_percentage", "10"]  # fmt: skip
        recipe = parse_recipe(ClsRecipe, [*map(str, flags), *(word for pair in more.items() for word in pair)])
        data = prepare_examples(recipe, load_configuration(recipe))
        return data, class_weights(recipe, data)

    return prepared


def test_labels_are_mixed(prepare_labelled):
    """Of sources with other columns, whose labels are numbered together; balanced is what an epoch reads."""
    said = [{"text": f"it is {n}", "label": "ham" if n % 4 else "spam"} for n in range(40)]
    asked = [{"sentence1": f"is it {n}?", "sentence2": "yes", "label": "junk" if n % 3 else "ham"} for n in range(60)]
    data, weights = prepare_labelled((3, said), (1, asked), **{"--class_weights": "balanced"})
    assert data.labels.names == ("ham", "junk", "spam")
    assert [len(each) for each in data.train.sets] == [36, 54]
    (part,) = data.held_out
    assert {name: len(samples) for name, samples in part.sources.items()} == {"a": 4, "b": 6}
    texts = [row for table in part.tables for row in table]
    assert len(texts) == len(part.samples) == len(part.samples.labels) == 10
    assert [*texts[0]] == ["text"]
    assert [*texts[-1]] == ["sentence1", "sentence2"]
    assert data.samples_per_epoch == 48
    drawn = data.train.labels[data.order.indices(0, 48 * 54)]  # each source some whole times
    counts = np.bincount(drawn)
    assert weights == pytest.approx(counts.sum() / (3 * counts))
    (report,) = (" ".join(note.split()) for note in data.notes if note.startswith("labels "))
    counts = (re.search(rf"{name} (\d+) \+ (\d+)", report).groups() for name in ("ham", "junk", "spam"))
    assert [int(trained) + int(held_out) for trained, held_out in counts] == [50, 40, 10]


def test_sources_of_several_kinds_are_refused(prepare_labelled):
    tags = [{"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}] * 20
    texts = [{"text": f"{n}", "label": n % 2} for n in range(20)]
    check_refusal(["train_file", "tags"], prepare_labelled, (1, tags), (1, texts))
