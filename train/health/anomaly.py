"""What is known of an update that was not let through to the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.data.collate import Batch

HEAD = 160  # characters of a sample that are shown


@dataclass
class Anomaly:
    """An update that must not reach the weights, as one rank sees it."""

    update: int
    reason: str
    figures: dict[str, float]  # of the whole update
    batches: list[Batch]  # this rank's micro-batches
    losses: list[float]  # and the loss that each was summed to

    def report(self, engine, action: str, head_of: Callable[[int], str]) -> dict[str, Any] | None:
        """The line of faults.jsonl, on the main process; None elsewhere. All ranks call it together.

        Args:
            action: what is done about it.
            head_of: sample index -> how the sample begins.
        """
        rank = engine.accelerator.process_index
        share = [
            {"rank": rank, "loss": loss, "samples": batch.samples} for batch, loss in zip(self.batches, self.losses)
        ]
        shares = engine.gather_objects(share)
        if shares is None:
            return None
        parts = [part for share in shares for part in share]
        heads = {index: head_of(index)[:HEAD] for part in parts for index in part["samples"]}
        return {"update": self.update, "reason": self.reason, "action": action, **self.figures,
                "micro_batches": parts, "heads": heads}  # fmt: skip
