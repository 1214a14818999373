"""What is on the device while texts are generated for an evaluation batch: above all, keys and values."""

from dataclasses import dataclass
from typing import Any

import torch

PROBE = 2  # positions of the pass that shows what is cached


@dataclass(frozen=True)
class KeyValueCache:
    """What an encoder-decoder caches, in elements.

    Attributes:
        written: of each generated token, in all layers.
        read: of each token of the source, in all layers.
        layers: of the decoder.
        hidden: of the encoder's output, of each token of the source.
        vocabulary: logits of a token.
    """

    written: int
    read: int
    layers: int
    hidden: int
    vocabulary: int

    def parts(self, recipe: Any, rows: int, width: int) -> dict[str, int]:
        """Bytes at the last token, when the search reorders the cache tensor by tensor (`reorder_cache` of
        transformers' cache_utils.py), or when it scores the next token (generation/utils.py, _beam_search).

        Args:
            rows: of the batch, each as often as there are beams.
            width: bytes of an element.
        """
        written = (recipe.val_max_target_length or recipe.max_target_length) * self.written
        read = recipe.max_source_length * self.read
        scores = 4 * rows * self.vocabulary  # logits and log probabilities, in fp32
        reordered = rows * width * max(written, read) // (2 * self.layers)
        return {
            "keys and values": rows * width * (written + read),
            "activations": rows * width * recipe.max_source_length * self.hidden,
            "workspace": 2 * scores + max(scores, reordered),
        }


@torch.no_grad()
def cache_of(model: torch.nn.Module) -> KeyValueCache:
    """What an encoder-decoder on "meta" caches, seen in a pass of one short row."""
    tokens = torch.zeros(1, PROBE, dtype=torch.int64, device="meta")
    mask = torch.zeros(1, 1, PROBE, PROBE, device="meta")  # as attention takes it: nothing is asked of its values
    was_training = model.training
    made = model.eval()(input_ids=tokens, decoder_input_ids=tokens, attention_mask=mask, decoder_attention_mask=mask,
                        use_cache=True)  # fmt: skip
    model.train(was_training)
    caches = made.past_key_values.self_attention_cache, made.past_key_values.cross_attention_cache
    written, read = (sum(one.keys.numel() + one.values.numel() for one in cache.layers) for cache in caches)
    hidden = made.encoder_last_hidden_state.shape[-1]
    return KeyValueCache(written // PROBE, read // PROBE, len(caches[0].layers), hidden, made.logits.shape[-1])
