"""Two questions to the model at hand, before it trains: do its documents stay apart, and is its cheap loss its loss?

Both depend on what a model's own code does (position ids that it ignores, logits that it caps or scales after the
head), on the attention kernel and on the versions installed. A few tokens through the prepared model settle them.
"""

from collections.abc import Callable

import numpy as np
import torch

ROWS = 2  # what keeps documents apart may do so in one row only
LENGTH = 8  # tokens a document, if the model has twice as many positions


@torch.no_grad()
def documents_leak(
    call: Callable, collate: Callable, vocab_size: int, device: torch.device, length: int = LENGTH
) -> bool:
    """Whether the second documents' logits move when the first documents of two packed rows are replaced.

    Args:
        call: the model, ready to be called with what comes of `collate`.
        collate: makes a batch of (sample, index) pairs, as in training.
        length: tokens of each document.
    """
    generator = torch.Generator().manual_seed(0)
    first, other, second = torch.randint(0, vocab_size, (3, ROWS, length), generator=generator).numpy()
    positions, answers = np.tile(np.arange(length), 2), []
    for documents in (first, other):
        rows = np.concatenate([documents, second], axis=1)
        batch = collate([({"input_ids": row, "labels": row, "position_ids": positions}, 0) for row in rows])
        inputs = {name: value for name, value in batch.to(device).inputs.items() if name != "labels"}
        answers.append(call(**inputs).logits.reshape(ROWS, 2 * length, -1)[:, length:].float())
    return not torch.allclose(*answers, rtol=0, atol=1e-3 * answers[0].std().item())


@torch.no_grad()
def losses_differ(
    call: Callable, set_kind: Callable[[str], None], kind: str, inputs: dict[str, torch.Tensor]
) -> float:
    """The relative difference between the loss of `kind` and the plain one on `inputs`, some of them masked."""
    inputs["labels"][0, ::5] = -100
    losses = []
    for each in ("full", kind):
        set_kind(each)
        losses.append(call(**inputs).float().item())
    return abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-12)


def random_tokens(vocab_size: int, device: torch.device, length: int = LENGTH, count: int = 1) -> torch.Tensor:
    """(1, count * length) random ids, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (1, count * length), generator=generator).to(device)
