"""The lines of metrics.jsonl. docs/run-folder.md has the table of their fields; a test compares it with this class."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from zerofit.recipe.errors import UserError
from zerofit.record.jsonl import line_of_update


def described(text: str) -> Any:
    """A field with its meaning."""
    return field(default=None, metadata={"meaning": text})


def required(text: str) -> Any:
    """A field that every line has."""
    return field(metadata={"meaning": text})


class EvaluationTime(NamedTuple):
    """The seconds of an evaluation on the slowest rank, and its samples a second on all ranks together."""

    seconds: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class UpdateMetrics:
    """One line: an update of the optimizer, over all ranks; update 0 is the evaluation before training. A field that
    is None is not in the line."""

    update: int = required("number of the update; 0: held-out figures before training")
    epoch: float = required("passes over the training data so far")
    consumed_samples: int = required("samples so far")
    loss: float | None = described(
        "the loss that is trained: mean over the trained tokens (examples, pairs) of the global batch, in nats"
    )
    grad_norm: float | None = described("2-norm of all gradients, before clipping")
    learning_rate: float | None = described("of this update")
    targets: float | None = described(
        "trained tokens (examples, pairs) of the global batch; with `class_weights` the sum of their weights"
    )
    tokens: int | None = described("its tokens without padding")
    padding: float | None = described("share of its positions that is padding")
    aux_loss: float | None = described("mixture of experts: the routers' auxiliary loss")
    expert_load_max: float | None = described("mixture of experts: the largest load of an expert; 1 is even")
    expert_load_min: float | None = described("mixture of experts: the smallest load of an expert; 1 is even")
    preference_accuracy: float | None = described(
        "pairs of answers: share of which the chosen one has the larger reward; ties are one half"
    )
    reward_margin: float | None = described(
        "pairs of answers: mean reward of the chosen ones, less that of the rejected"
    )
    reward_chosen: float | None = described("pairs of answers: mean reward of the chosen ones")
    reward_rejected: float | None = described("pairs of answers: mean reward of the rejected ones")
    seconds: float | None = described("time of the update, of rank 0")
    samples_per_s: float | None = described("samples a second, all ranks together")
    tokens_per_s: float | None = described("tokens a second without padding, all ranks together")
    flops_per_s: float | None = described("model FLOP/s, all ranks together")
    mfu: float | None = described("share of the devices' peak FLOP/s, where a table of GPUs has it")
    peak_memory_bytes: int | None = described(
        "the largest of all ranks: of the device's allocator, or resident memory on a CPU"
    )
    rank_seconds: Mapping[str, float] | None = described(
        "every 10 updates, or `--logging_steps`, of several processes: mean seconds an update of the slowest rank and "
        "of others, in parts ([trouble.md](trouble.md#a-slow-rank))"
    )
    anomaly: str | None = described("why the update was not applied to the weights")
    skipped: bool | None = described("true: not computed, after a rewind from an anomaly in it")
    held_out: Mapping[str, float] | None = described("figures of the evaluation after it, as `eval_<figure>`")
    own: Mapping[str, float] | None = described("figures that a script gives to `run.log` on rank 0, by their names")
    evaluation_seconds: float | None = described("time of that evaluation, of the slowest rank")
    evaluation_samples_per_s: float | None = described("held-out samples a second, all ranks together")

    def __post_init__(self) -> None:
        if self.own and (taken := sorted({each.name for each in fields(self)} & self.own.keys())):
            raise UserError(f"run.log: each line of metrics.jsonl has {', '.join(taken)}: name your figure otherwise")

    @classmethod
    def of_evaluation(cls, figures: Mapping[str, float], time: EvaluationTime) -> "UpdateMetrics":
        """The line of an evaluation before training, or without any."""
        return cls(
            update=0,
            epoch=0.0,
            consumed_samples=0,
            held_out=figures,
            evaluation_seconds=time.seconds,
            evaluation_samples_per_s=time.samples_per_s,
        )

    def to_line(self) -> dict[str, Any]:
        """The JSON object of the line."""
        line = {each.name: getattr(self, each.name) for each in fields(self)}
        line |= (line.pop("held_out") or {}) | (line.pop("own") or {})
        return {name: value for name, value in line.items() if value is not None}


TEXTS, FLAGS, TABLES = ("anomaly",), ("skipped",), ("rank_seconds",)  # fields that are not numbers


def line_of_metrics(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, without values of another type than their field's; None: it is of no update."""
    line = line_of_update(text)
    kinds = dict.fromkeys(TEXTS, str) | dict.fromkeys(FLAGS, bool) | dict.fromkeys(TABLES, dict)
    return line and {
        name: value
        for name, value in line.items()
        if (isinstance(value, kinds[name]) if name in kinds else type(value) in (int, float))
    }
