"""The merge of a LoRA adapter into its base model, W + scale * B A, checked before and after it is written."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from zerofit import __version__
from zerofit.model.adapter_folder import AdapterFolder, find_base
from zerofit.model.configuration import read_config, usable_positions
from zerofit.model.export import export_model, write_model_card
from zerofit.model.lora import load_with_adapter
from zerofit.model.pretrained_io import atomic_folder, read_model
from zerofit.model.tokenizer import load_named_tokenizer
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import strip_folders

# Largest difference that rounding explains, as a share of the logits' range: in fp32 sums have another order; in bf16
# and fp16 the merged weights are rounded as well, in every layer.
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
NUM_PROBE_ROWS = 3
PROBE_LENGTH = 16


def merge(folder: AdapterFolder, output: Path, options: Any) -> list[str]:
    """Merge the adapter into its base and write the result to `output`, completely or not at all. Return lines for the
    log. `options`: MergeOptions.

    Raises:
        UserError: the adapter and the base do not fit together, or cannot be loaded.
        RuntimeError: the merged model differs from the adapted one. Nothing is written then.
    """
    trust = options.trust_remote_code
    base = find_base(folder, options.base, trust_remote_code=trust)
    adapted, auto_class = load_with_adapter(
        folder,
        base,
        precision=options.precision,
        quantised="dequantize" if options.dequantize else "refuse",
        trust_remote_code=trust,
    )
    option, source = ("adapter", str(folder.path)) if folder.has_tokenizer else (base.option, base.name)
    tokenizer = load_named_tokenizer(option, source, adapted.get_base_model().config, trust)
    probe = Probe(adapted.get_base_model())
    before = probe.logits(adapted.get_base_model())
    if not before.isfinite().all():
        raise UserError(f"{folder.where} gives logits that are not finite: its training has diverged")
    model = fold(adapted)
    notes = [probe.compare(before, model, "merged")]
    with atomic_folder(output) as partial:
        if (folder.path / "generation_config.json").is_file() and hasattr(model, "generation_config"):
            model.generation_config = GenerationConfig.from_pretrained(folder.path)
        for error in export_model(model, model.state_dict().items(), tokenizer, partial).values():
            raise error
        write_model_card(partial, _card(model, folder, base.name, notes))
        del model, adapted  # frees the model before the written one is loaded
        config = read_config("output", str(partial), trust)
        reading = {"precision": None, "trust_remote_code": trust}
        reloaded, missing = read_model(auto_class, "output", str(partial), config, **reading)
        if missing:
            raise RuntimeError(f"the written folder lacks {missing[:3]}. Nothing is written")
        notes.append(probe.compare(before, reloaded, "read back"))
    return notes


def fold(model: Any) -> PreTrainedModel:
    """Return the plain transformers model with the adapter in its weights. `model`: a PeftModel, consumed here.

    Embeddings and a head that the base ties are separated where the adapter changes them differently, and stay tied
    where it does not.
    """
    tied = model.get_base_model().config.tie_word_embeddings
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if weight is not None and owners[id(weight)] > 1:
            module.base_layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    try:
        model = model.merge_and_unload()
    except (ValueError, RuntimeError) as error:
        raise UserError(f"this kind of adapter cannot be merged: {first_line(error)}") from None
    head = model.get_output_embeddings()
    if tied and head is not None and torch.equal(head.weight, model.get_input_embeddings().weight):
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


class Probe:
    """A few random rows of tokens, for which two models must give the same logits.

    Each row is a batch of its own, since a classifier without a padding token accepts only one row. The end token is
    the last token of each row and nowhere else, since BART's classifier reads the position of the end token.
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config
        length = min(PROBE_LENGTH, usable_positions(config) or PROBE_LENGTH)
        generator = torch.Generator().manual_seed(0)
        embeddings: Any = model.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        rows = torch.randint(0, vocabulary, (NUM_PROBE_ROWS, 1, length), generator=generator)
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        if end is not None and end < vocabulary:
            rows[rows == end] = (end + 1) % vocabulary
            rows[:, :, -1] = end
        self.rows = rows
        self.has_decoder = config.is_encoder_decoder and model.get_output_embeddings() is not None

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Return the logits of all rows, flattened, in fp32."""
        with torch.no_grad():
            logits = []
            for row in self.rows:
                decoder_inputs = {"decoder_input_ids": row.flip(1)} if self.has_decoder else {}
                logits.append(model(input_ids=row, **decoder_inputs).logits.float().flatten())
        return torch.cat(logits)

    def compare(self, before: Tensor, model: PreTrainedModel, stage: str) -> str:
        """Return a line with the difference to the logits `before`. Raises RuntimeError where it exceeds rounding."""
        dtype = str(model.dtype).removeprefix("torch.")
        after = self.logits(model)
        difference = (after - before).abs().max().item() if after.shape == before.shape else float("nan")
        spread = (before.max() - before.min()).item()
        tolerance = LOGIT_TOLERANCE[dtype] * spread
        if not difference <= tolerance:  # also where it is nan
            raise RuntimeError(f"{stage}: logits differ by {difference:.1e}, rounding explains {tolerance:.1e}")
        return f"{stage:<12}  logits differ by {difference:.1e} of a spread of {spread:.1e}, in {dtype}"


def _card(model: PreTrainedModel, folder: AdapterFolder, base: str, notes: list[str]) -> str:
    """Return the text of the merged model's README.md."""
    shown = ("r", "lora_alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save", "task_type")
    settings = json.dumps({name: folder.settings.get(name) for name in shown}, indent=2)
    dtype = str(model.dtype).removeprefix("torch.")
    base = strip_folders(base)
    adapter = strip_folders(str(folder.path))
    path = folder.path.resolve()
    name = path.parent.name if path.name == "model" else path.name  # outputs/RUN/model: RUN
    return f"""---
library_name: transformers
base_model: {base}
tags: [zerofit]
---

# {name}, merged

The LoRA adapter {adapter} merged into {base} in {dtype} by zerofit {__version__}.

```
{chr(10).join(notes)}
```

```json
{settings}
```
"""
