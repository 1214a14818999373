"""Options of batches and of the length of the run; what tokens_per_batch means for the other sizes."""

import re
from dataclasses import dataclass

from zerofit.recipe.base import Clash, Recipe
from zerofit.recipe.fields import option

WITHOUT_TRAINING = "To train nothing, say --evaluate_only, or --predict_file FILE"
# Options whose sum is the length of a full row, of the tasks that have them.
FULL_ROW = (("block_size",), ("max_source_length", "max_target_length"))


@dataclass(frozen=True)
class Warmup:
    """The first update has the size `first`. It grows in steps of as much until, after `updates` updates, it is
    `last`, which is a multiple of `first`."""

    first: int
    last: int
    updates: int

    def __call__(self, update: int) -> int:
        """The size of an update, counted from 1."""
        steps = self.last // self.first - 1
        return self.first * (1 + min(update - 1, self.updates) * steps // self.updates)


def read_warmup(text: str) -> tuple[int, int] | None:
    """Return (first size, updates that grow) of `START@UPDATES`; None: it is not such a text."""
    found = re.fullmatch(r"([1-9]\d*)@([1-9]\d*)", text)
    return found and (int(found[1]), int(found[2]))


WARMUP = (
    read_warmup,
    "START@UPDATES, the size in the first update and the number of updates in which it grows, e.g. 64@5000",
)


@dataclass
class BatchOptions(Recipe, phase="train"):
    """Batches and length of the run"""

    per_device_train_batch_size: int = option(
        8,
        "Micro-batch size: samples on one device in one pass.",
        positive=True,
        aliases=("micro_batch_size",),
        common=True,
        identity=False,
    )
    per_device_eval_batch_size: int = option(
        8, "Micro-batch size in evaluation.", positive=True, phase="always", identity=False
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per update (default 1).", positive=True, follows="global_batch_size", identity=False
    )
    global_batch_size: int | None = option(
        None,
        "Samples per update on all devices; sets gradient_accumulation_steps.",
        positive=True,
        follows="gradient_accumulation_steps",
        common=True,
        identity=False,
    )
    tokens_per_batch: int | None = option(
        None,
        "Tokens per update on all devices, padding included, in place of global_batch_size: a micro-batch has as many "
        "rows of similar length as fit into per_device_train_batch_size rows of full length. For rows of different "
        "lengths of clm (--packing none) and seq2seq.",
        why="both decide which samples a batch has",
        positive=True,
        needs="!streaming !preference_loss",
    )
    global_batch_warmup: str | None = option(
        None,
        "START@UPDATES, as 64@5000: the first update takes START samples, and updates grow in steps of START to the "
        "global batch, which those after UPDATES have.",
        form=WARMUP,
        needs="!tokens_per_batch",
    )
    num_train_epochs: float = option(
        3.0,
        "Passes over the training data.",
        positive=True,
        common=True,
        zero=WITHOUT_TRAINING,
        noted="!max_train_steps",
    )
    max_train_steps: int | None = option(
        None,
        "Number of updates; overrides num_train_epochs.",
        positive=True,
        aliases=("train_iters",),
        common=True,
        zero=WITHOUT_TRAINING,
    )
    seed: int = option(
        42, "Seed of the order of samples, the initial weights and dropout.", minimum=0, below=2**31, phase="always"
    )
    dataloader_num_workers: int | None = option(
        None, "Processes per rank that load batches; by default 2 with a GPU, else 0.", minimum=0, identity=False
    )

    @property
    def row_tokens(self) -> int | None:
        """The tokens of a row of full length; None: batches are not by tokens, or a length is not set."""
        of_task = next((names for names in FULL_ROW if hasattr(self, names[0])), ())
        lengths = [getattr(self, name) for name in of_task]
        return sum(lengths) if self.tokens_per_batch and lengths and all(lengths) else None

    def settle(self) -> None:
        """Let the global batch, in full rows, follow from tokens_per_batch."""
        super().settle()
        if self.tokens_per_batch and self.row_tokens and self.global_batch_size is None:
            rows = self.tokens_per_batch // self.row_tokens
            self.adopt("global_batch_size", rows, f"tokens_per_batch = {self.tokens_per_batch}")

    def clashes(self) -> list[Clash]:
        found, tokens, row = super().clashes(), self.tokens_per_batch, self.row_tokens
        if tokens and row and not tokens % row and self.global_batch_size != tokens // row:
            text = (
                f"tokens_per_batch = {tokens} and global_batch_size = {self.global_batch_size}: set one of the two "
                f"({tokens} tokens are {tokens // row} full rows of {row})"
            )
            found.append(Clash("global_batch_size", ["tokens_per_batch"], text, excludes=True))
        return found

    def problems(self) -> list[str]:
        return super().problems() + token_batch_problems(self)


def token_batch_problems(recipe: BatchOptions) -> list[str]:
    """Return what is wrong with tokens_per_batch."""
    tokens, row = recipe.tokens_per_batch, recipe.row_tokens
    if tokens is None:
        return []
    stated = f"tokens_per_batch = {tokens}"
    if getattr(recipe, "max_length", None):
        return [
            f"{stated}: the loss is a mean over examples here, and short ones, of which a batch has more, would count "
            "less each. Rows of similar length share a batch as it is (length_grouping). Set global_batch_size"
        ]
    problems = []
    if getattr(recipe, "mixture", None):
        problems.append(f"{stated} and weights in train_file: both decide which samples a batch has")
    if getattr(recipe, "packing", "none") != "none":
        problems.append(
            f"{stated}: packed rows all have the same length. Say --packing none, or set global_batch_size"
        )
    if row is None:
        return [*problems, f"{stated}: say block_size, the tokens of a full row"]
    if tokens % row:
        fewer, remedy = tokens // row * row, f"{tokens // row * row + row}"
        remedy = f"{fewer} or {remedy}" if fewer else remedy
        problems.append(f"{stated} is not a multiple of a full row, {row} tokens. Say {remedy}")
    return problems
