"""Batches by tokens: what an update and its micro-batches hold, in every layout, at every place of a run."""

import numpy as np
import pytest

from zerofit.data.order import FILLER
from zerofit.data.token_updates import TokenMicroBatches, TokenUpdates
from zerofit.recipe.errors import UserError
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe, ClsRecipe, Seq2SeqRecipe
from zerofit.strategy.batches import resolve_batches
from zerofit.training.stream import run_length

POSITIONS, K = 2048, 4  # of a micro-batch; micro-batches of an update


def updates(columns: int = 1, samples: int = 2000, seed: int = 3) -> TokenUpdates:
    widths = np.minimum(np.random.default_rng(7).geometric(0.02, (samples, columns)) + 3, 256 // columns)
    return TokenUpdates(widths, POSITIONS, K, seed)


def positions(by_tokens: TokenUpdates, rows: np.ndarray) -> int:
    return len(rows) * int(by_tokens.widths[rows].max(axis=0).sum())


@pytest.mark.parametrize("columns", [1, 2])
def test_a_micro_batch_never_has_more_positions_and_an_update_has_hardly_fewer(columns):
    by_tokens = updates(columns)
    last = by_tokens.num_updates(len(by_tokens))
    sizes = [[positions(by_tokens, rows) for rows in by_tokens.update(each, 10**9)] for each in range(1, last + 1)]
    assert max(map(max, sizes)) <= POSITIONS
    assert min(map(sum, sizes[:-1])) > 0.85 * K * POSITIONS
    assert by_tokens.padding(0) < (0.05 if columns == 1 else 0.35)  # rows are alike in the first column only


def test_an_epoch_has_each_sample_once_and_the_next_one_another_order():
    by_tokens = updates()
    assert [by_tokens.num_updates(epoch * len(by_tokens)) for epoch in (0, 1)][0] == 0
    epochs = []
    for epoch in range(3):
        first, last = (by_tokens.num_updates(count * len(by_tokens)) for count in (epoch, epoch + 1))
        parts = [by_tokens.update(number, 10**9) for number in range(first + 1, last + 1)]
        assert all(len(part) == K for part in parts[:-1])
        epochs.append(np.concatenate([rows for part in parts for rows in part]))
        assert sorted(epochs[-1].tolist()) == list(range(len(by_tokens)))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("done", [0, 5, 19])
def test_every_layout_has_the_same_updates_also_after_a_resume(world, done):
    total = 2 * len(updates()) - 77  # the last update is cut
    last = updates().num_updates(total)
    ranks = [[*TokenMicroBatches(updates(), (done, last), total, world, rank)] for rank in range(world)]
    assert {len(rows) for rows in ranks} == {(last - done) * K // world}
    seen = [
        sorted(sample for rows in ranks for batch in rows[at : at + K // world] for sample in batch if sample != FILLER)
        for at in range(0, len(ranks[0]), K // world)
    ]
    whole = updates()
    assert seen == [sorted(np.concatenate(whole.update(each, total))) for each in range(done + 1, last + 1)]
    assert sum(map(len, seen)) == total - whole.consumed(done)


def test_consumed_and_num_updates_belong_together():
    by_tokens = updates(samples=300)
    for number in (*range(12), 90, 91):
        assert by_tokens.num_updates(by_tokens.consumed(number)) == number
        assert by_tokens.num_updates(by_tokens.consumed(number) + 1) == number + 1


def test_the_place_of_a_sample_does_not_depend_on_its_length():
    """The mean place of the shortest and of the longest tenth: the middle of a sample's update, in epochs."""
    seeds, places = 400, np.zeros(500)
    for seed in range(seeds):
        by_tokens = updates(samples=500, seed=seed)
        for number in range(1, by_tokens.num_updates(500) + 1):
            middle = (by_tokens.consumed(number - 1) + by_tokens.consumed(number)) / 1000
            places[np.concatenate(by_tokens.update(number, 500))] += middle / seeds
    ranked = places[np.argsort(by_tokens.widths[:, 0], kind="stable")]
    assert np.abs([ranked[:50].mean() - 0.5, ranked[-50:].mean() - 0.5]).max() < 0.04  # three standard deviations


def test_a_run_has_as_many_updates_as_its_epochs_need():
    recipe, by_tokens = parsed(num_train_epochs=1.5), updates()
    length = run_length(recipe, len(by_tokens), resolve_batches(recipe, 2), by_tokens)
    assert (length.total_samples, length.num_updates) == (3000, by_tokens.num_updates(3000))
    assert length.consumed(length.num_updates) == 3000
    assert [length.ends_an_epoch(number) for number in range(1, length.num_updates)].count(True) == 1


def parsed(kind=ClmRecipe, **options):
    given = {"train_file": "x", "tokens_per_batch": 4096, "output_dir": "y"} | options
    if kind is ClmRecipe:
        given = {"model_name_or_path": "z", "block_size": 256, "packing": "none"} | given
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return parse_recipe(kind, words, prog="train")


def test_sizes_in_full_rows_follow():
    sizes = resolve_batches(parsed(per_device_train_batch_size=2), 4)
    assert (sizes.micro_batch, sizes.accumulation, sizes.global_batch, sizes.row_tokens) == (2, 2, 16, 256)
    pairs = parsed(Seq2SeqRecipe, max_source_length=64, max_target_length=64, model_name_or_path="z")
    assert resolve_batches(pairs, 1).global_batch == 32
    assert parsed(global_batch_size=16).global_batch_size == 16  # a run's recipe.yaml has both


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": None}, "block_size"),
        ({"tokens_per_batch": 1000}, "768 or 1024"),
        ({"global_batch_size": 8}, "global_batch_size"),
        ({"packing": None}, "--packing none"),
        ({"global_batch_warmup": "4@8"}, "global_batch_warmup"),
        ({"preference_loss": "dpo"}, "pairs"),
    ],
)
def test_what_it_cannot_go_with_is_named(options, named):
    with pytest.raises(UserError, match=named):
        parsed(**options)


def test_examples_that_count_alike_have_batches_of_samples():
    with pytest.raises(UserError, match="length_grouping"):
        parsed(ClsRecipe, model_name_or_path="z")
