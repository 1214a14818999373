"""A curriculum by difficulty: which samples come first, and which number belongs to which sample."""

from pathlib import Path

import numpy as np
import pytest
from folders import save_blenderbot, save_writer, small_tokenizer
from helpers import write_records

from zerofit.data.causal import prepare_causal_data
from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.order import EasiestFirst, LengthGroups, SampleOrder, easiest_first
from zerofit.data.pairs.prepare import prepare_pairs
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe, parse_recipe

UPDATES, BATCH, SAMPLES = 10, 8, 203


def order(seed: int = 0, scores: np.ndarray | None = None, **more) -> SampleOrder:
    scores = np.arange(SAMPLES) if scores is None else scores
    ends = [BATCH * update for update in range(1, UPDATES + 1)]
    return SampleOrder(len(scores), seed, easiest=EasiestFirst(scores, ends), **more)


def test_each_update_draws_from_its_share_and_each_sample_is_seen_once():
    for seed in range(20):
        places = order(seed).epoch(0)
        assert sorted(places) == list(range(SAMPLES))
        for update in range(UPDATES):
            drawn = places[update * BATCH : (update + 1) * BATCH]
            assert drawn.max() < max(BATCH * (update + 1), SAMPLES * (update + 1) // UPDATES)
        assert (np.diff(places[UPDATES * BATCH :]) < 0).sum() > 30, "what is left is shuffled"


def test_an_update_draws_without_a_preference_within_its_share():
    """Of the third update, 60 samples can be reached: those that were there from the start are rarer, as they may have
    been drawn; the last 20 have the same chance."""
    counts = np.zeros(SAMPLES)
    for seed in range(3000):
        counts[order(seed).places(2 * BATCH, 3 * BATCH)] += 1
    expected = 3000 * BATCH / (60 - 2 * BATCH)
    assert abs(counts[40:60] - expected).max() < 5 * np.sqrt(expected)


def test_it_can_begin_anywhere_and_later_epochs_are_those_without_it():
    groups = LengthGroups(np.arange(SAMPLES), BATCH)
    places = order(3).epoch(0)
    assert np.array_equal(order(3).places(37, 90), places[37:90])
    assert np.array_equal(order(3, groups=groups).epoch(0), places)
    assert np.array_equal(order(3, groups=groups).epoch(1), SampleOrder(SAMPLES, 3, groups).epoch(1))


@pytest.fixture(scope="module")
def models(cache, tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models"), small_tokenizer(Path(cache))
    save_blenderbot(folder / "bot", tokenizer)
    save_writer(folder / "writer", tokenizer)
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


PREPARE = {ClmRecipe: prepare_causal_data, ClsRecipe: prepare_examples, Seq2SeqRecipe: prepare_pairs}
RECORDS = {
    ClmRecipe: lambda text, n: {"instruction": text, "output": "yes"},
    ClsRecipe: lambda text, n: {"text": text, "label": "yes" if n % 3 else "no"},
    Seq2SeqRecipe: lambda text, n: {"dialogue": [text, "yes", text]},  # two pairs of each record
}
SCORES = [(37 * n) % 41 for n in range(40)]


@pytest.fixture
def prepare(models, cache, tmp_path):
    """(recipe class, records, flags) -> (recipe, its data)."""

    def prepare(kind, records: list[dict], *flags: str):
        write_records(tmp_path / "a.jsonl", records)
        model = {ClmRecipe: "writer", Seq2SeqRecipe: "bot"}.get(kind)
        recipe = parse_recipe(kind, [
            *(("--model_name_or_path", str(models / model)) if model else ("--model_type", "bert")),
            "--tokenizer_name", str(models / "tokenizer"), "--cache_dir", cache,
            "--train_file", str(tmp_path / "a.jsonl"), *flags,
        ])  # fmt: skip
        return recipe, PREPARE[kind](recipe, load_configuration(recipe))

    return prepare


@pytest.mark.parametrize("kind", PREPARE)
def test_a_score_goes_with_its_record(prepare, kind):
    """Also where records are held out, skipped or left away."""
    records = [{**RECORDS[kind](f"number {score}", n), "hardness": score} for n, score in enumerate(SCORES)]
    records[5] = {**records[5], **RECORDS[kind]("", 5)}
    more = ("--packing", "none", "--chat_template", "instruction") if kind is ClmRecipe else ()
    recipe, data = prepare(
        kind, records, "--difficulty_warmup", "hardness@2", "--skip_bad_records", "--max_train_samples", "30", *more
    )
    samples, count = data.train, 30
    assert len(samples) == len(samples.scores) == count
    for index in range(count):
        text = data.tokenizer.decode(samples[index]["input_ids"]).replace(" ", "")
        assert f"number{samples.scores[index]:.0f}" in text.replace("</s>", "|")
    easiest = easiest_first(recipe.difficulty, samples, lambda updates: 4 * updates)
    first = SampleOrder(count, 0, easiest=easiest).places(0, 4)
    assert samples.scores[first].max() <= np.sort(samples.scores)[14]
