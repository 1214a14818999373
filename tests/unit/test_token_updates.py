"""Batches by tokens: what an update and its micro-batches hold, in every layout, at every place of a run."""

import itertools

import numpy as np
import pytest

from zerofit.data.collate import TokenUpdates, round_up
from zerofit.data.order import FILLER, rank_batches
from zerofit.recipe.errors import UserError
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe, ClsRecipe, DpoRecipe, Seq2SeqRecipe
from zerofit.strategy.batches import resolve_batches
from zerofit.training.stream import run_length

ROW, ROWS = 256, 8  # tokens of a full row; full rows of an update
LAYOUTS = [(8, 1), (4, 1), (1, 1), (4, 2), (1, 2), (2, 4)]  # micro-batch, replicas


def updates(columns: int = 1, samples: int = 2000, seed: int = 3) -> TokenUpdates:
    widths = np.minimum(np.random.default_rng(7).geometric(0.02, (samples, columns)) + 3, ROW // columns)
    return TokenUpdates(widths, ROW, ROWS, seed)


def micro_batches(by_tokens: TokenUpdates, layout: tuple[int, int], done: int, total: int, rank: int = 0):
    """What a rank sees of a run of `total` samples after the updates that are done."""
    micro, replicas = layout
    ends = map(by_tokens.consumed, itertools.count(done + 1))
    start, accumulation = by_tokens.consumed(done), ROWS // micro // replicas
    return rank_batches(by_tokens, total, start, micro, accumulation, num_replicas=replicas, rank=rank, ends=ends)


def of_epoch(by_tokens: TokenUpdates, epoch: int) -> list[np.ndarray]:
    """The samples of each update."""
    first, last = (by_tokens.num_updates(count * by_tokens.num_samples) for count in (epoch, epoch + 1))
    ends = [by_tokens.consumed(number) for number in range(first, last + 1)]
    return [by_tokens.indices(*span) for span in itertools.pairwise(ends)]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("multiple", [1, 64], ids=["a CPU", "a GPU"])
def test_a_micro_batch_has_no_more_tokens_than_full_rows(columns, micro, multiple):
    by_tokens = updates(columns)
    whole = by_tokens.consumed(by_tokens.num_updates(by_tokens.num_samples) - 2)
    found = [
        len(rows) * int(round_up(by_tokens.widths[rows].max(axis=0), multiple).sum())
        for rows in micro_batches(by_tokens, (micro, 1), 0, whole)
    ]
    assert max(found) <= micro * ROW
    if columns == 1:  # of two, rows that are alike in one differ in the other here
        assert np.mean(found) > 0.7 * micro * ROW


def test_an_epoch_has_each_sample_once_and_the_next_one_another_order():
    by_tokens, epochs = updates(), []
    for epoch in range(3):
        parts = of_epoch(by_tokens, epoch)
        assert all(len(rows) % ROWS == 0 for rows in parts[:-2])
        assert all((np.diff(by_tokens.widths[rows, 0]) <= 0).all() for rows in parts)
        epochs.append(np.concatenate(parts))
        assert sorted(epochs[-1].tolist()) == list(range(by_tokens.num_samples))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("done", [0, 5, 61])
def test_every_layout_has_the_same_updates_also_after_a_resume(layout, done):
    (micro, replicas), total = layout, 2 * updates().num_samples - 77  # the last update is cut
    accumulation, whole = ROWS // micro // replicas, updates()
    last = whole.num_updates(total)
    ranks = [[*micro_batches(updates(), layout, done, total, rank)] for rank in range(replicas)]
    ends = [min(whole.consumed(number), total) for number in range(done, last + 1)]
    for place, span in enumerate(itertools.pairwise(ends)):
        steps = range(place * accumulation, (place + 1) * accumulation)
        batches = [ranks[rank][step] for step in steps for rank in range(replicas)]
        assert len({len(batch) for batch in batches}) == 1
        assert [sample for batch in batches for sample in batch if sample != FILLER] == whole.indices(*span).tolist()
    assert {len(rows) for rows in ranks} == {(last - done) * accumulation}


def test_the_place_of_a_sample_does_not_depend_on_its_length():
    """The mean place of the shortest and of the longest tenth: the middle of a sample's update, in epochs."""
    seeds, places = 400, np.zeros(500)
    for seed in range(seeds):
        by_tokens = updates(samples=500, seed=seed)
        start = 0
        for rows in of_epoch(by_tokens, 0):
            places[rows] += (start + len(rows) / 2) / 500 / seeds
            start += len(rows)
    ranked = places[np.argsort(by_tokens.widths[:, 0], kind="stable")]
    assert np.abs([ranked[:50].mean() - 0.5, ranked[-50:].mean() - 0.5]).max() < 0.04  # three standard deviations


def test_a_run_has_as_many_updates_as_its_epochs_need():
    recipe, by_tokens = parsed(num_train_epochs=1.5), updates()
    length = run_length(recipe, by_tokens.num_samples, resolve_batches(recipe, 2), by_tokens)
    assert (length.total_samples, length.num_updates) == (3000, by_tokens.num_updates(3000))
    assert length.consumed(length.num_updates) == 3000
    assert [length.is_due("epoch", None, number) for number in range(1, length.num_updates)].count(True) == 1


def parsed(kind=ClmRecipe, **options):
    given = {"train_file": "x", "tokens_per_batch": 4096, "output_dir": "y"} | options
    if issubclass(kind, ClmRecipe):
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
        ({"kind": DpoRecipe}, "tokens_per_batch = .* no effect with preference_loss"),
    ],
)
def test_what_it_cannot_go_with_is_named(options, named):
    with pytest.raises(UserError, match=named):
        parsed(**options)


def test_examples_that_count_alike_have_batches_of_samples():
    with pytest.raises(UserError, match="length_grouping"):
        parsed(ClsRecipe, model_name_or_path="z")
