"""Steps that the scripts of causal models (clm.py, dpo.py, distill.py) have in common."""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from zerofit.data.chat.samples import PreferencePairs
from zerofit.data.collate import Batch
from zerofit.data.lengths import choose_length
from zerofit.data.order import FILLER, FixedOrder
from zerofit.data.pack import TextData
from zerofit.model.attention import choose_attention, packed_rows
from zerofit.model.configuration import read_config, weights_key
from zerofit.model.loss import log_probabilities
from zerofit.model.preflight import (
    check_loss,
    check_mask_support,
    check_packing,
    check_split_rows,
    documents_leak,
    install_chosen_loss,
    random_tokens,
)
from zerofit.model.pretrained_io import read_model
from zerofit.model.tokenizer import load_named_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file, cache_root
from zerofit.recipe.tasks import ClmRecipe
from zerofit.record.terminal import duration
from zerofit.strategy.engine import Engine
from zerofit.training.evaluation import eval_batches
from zerofit.training.run import Run

NOT_READ = ("labels", "next_tokens", "is_token")
ANOTHER = "Take another teacher"


class Teacher:
    """A frozen model whose distribution the student learns."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = model.get_output_embeddings()

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's last hidden states (B, T, H), which its head makes logits of; without gradients."""
        inputs = {name: value for name, value in batch.inputs.items() if name not in NOT_READ}
        with packed_rows(batch.packed):
            hidden: torch.Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden


def load_teacher(run: Run, student: Any, data: TextData, collate: Any) -> Teacher:
    """Load the recipe's teacher, and give the student's loss its head. Raises UserError: it cannot be loaded, has
    another vocabulary, makes logits in another way than its head, or mixes the documents of a packed row.

    Args:
        collate: lays rows out as in training.
    """
    recipe: Any = run.recipe  # a DistillRecipe
    device = run.device
    name = recipe.teacher
    trust = recipe.trust_remote_code
    precision = run.strategy.precision
    config = read_config("teacher", name, trust)
    stated = f"teacher = {name!r}"
    rows = config.vocab_size
    own = student.config.vocab_size
    if rows != own:
        raise UserError(f"{stated}: its vocabulary has {rows:,} rows, and the student's {own:,}. {ANOTHER}")
    if load_named_tokenizer("teacher", name, config, trust).get_vocab() != data.tokenizer.get_vocab():
        raise UserError(f"{stated} has another vocabulary than the student. Name the teacher's with tokenizer_name")
    choose_length("block_size", data.block_size, stated, config)
    config.use_cache = False
    model, missing = read_model(
        AutoModelForCausalLM, "teacher", name, config, precision=precision, trust_remote_code=trust
    )
    if missing:
        raise UserError(f"{stated} lacks {len(missing)} weights, such as {missing[0]}. Name a folder with all of them")
    if recipe.is_packed:
        choose_attention(model, recipe.attn_implementation, precision)
    teacher = Teacher(model.to(device))
    if model.base_model is model or not _makes_logits_of_its_head(teacher, random_tokens(rows, device)):
        raise UserError(f"{stated}: a {config.model_type} changes its logits after the head. {ANOTHER}")
    if recipe.is_packed and documents_leak(model, collate, rows, device):
        raise UserError(f"{stated}: a {config.model_type} mixes documents of a packed row. Use --packing none")
    terms = student.loss_terms
    student.loss_terms = terms._replace(distillation=terms.distillation._replace(head=teacher.head))
    return teacher


@torch.no_grad()
def _makes_logits_of_its_head(teacher: Teacher, ids: torch.Tensor) -> bool:
    logits = teacher.model(input_ids=ids).logits
    own = teacher.head(teacher.model.base_model(input_ids=ids).last_hidden_state)
    return torch.allclose(own, logits, rtol=0, atol=1e-2 * float(logits.abs().max()))


STORED_EVERY = 1024  # pairs


def measure_reference(
    run: Run, engine: Engine, parts: Mapping[str, PreferencePairs | None], collate: Callable[[list[Any]], Batch]
) -> None:
    """Let `engine`, whose model is still the one before training, give the reference's log-probabilities to all pairs.

    They are kept with the prepared data. A launch after this one finds them there, all or those that were done.
    """
    if run.measurement:
        return
    recipe: Any = run.recipe  # a DpoRecipe
    # All that the reference model depends on: its log-probabilities are stored under it.
    name = recipe.model_name_or_path
    precision = "float8" if recipe.float8 else run.strategy.precision
    weights = recipe.seed if name is None else weights_key(name)
    origin = f"{weights} {precision} {recipe.quantised} {torch.__version__} {engine.whole.config.to_json_string()}"
    if run.config.adapter is not None:  # the model before training is base and adapter
        origin += f" {weights_key(str(run.config.adapter.path))}"
    held = [part for part in parts.values() if part]
    for pairs in (pairs for part in held for pairs in getattr(part, "sets", [part])):  # of a mixture
        name = hashlib.sha256(f"{pairs.key} {len(pairs)} {origin}".encode()).hexdigest()[:32]
        file = cache_root(recipe.cache_dir) / f"reference-{name}.npy"
        began = time.perf_counter()
        done = _measure(engine, pairs, collate, recipe.per_device_eval_batch_size, file, run=run)
        if done:
            seconds = duration(time.perf_counter() - began)
            run.log_lines(f"reference {done:,} pairs in {seconds}; kept in {file}")


def _measure(engine: Engine, pairs: PreferencePairs, collate: Any, batch_size: int, file: Path, *, run: Run) -> int:
    """Returns how many pairs were not there yet."""
    found = engine.from_main(_stored(file, len(pairs)) if engine.is_main else None)
    indices = FixedOrder(len(pairs), pairs.sort_key).indices(0, len(pairs))
    missing = np.flatnonzero(np.isnan(found[indices]).any(axis=1))
    start = int(missing[0]) if len(missing) else len(pairs)
    todo = len(pairs) - start
    if todo:
        run.log_lines(f"reference of {todo:,} pairs: what the model before training makes of them")
    together = batch_size * engine.layout.data_size
    step = -(-STORED_EVERY // together) * together
    for begin in range(start, len(pairs), step):
        batches = eval_batches(engine, pairs, collate, batch_size, begin, stop=min(begin + step, len(pairs)))
        rows: dict[int, Any] = {}
        for batch, own in engine.losses(batches, log_probabilities):
            if own.dim():  # of a pipeline only the last stage has them
                rows |= zip(batch.indices, own.tolist())
        rows.pop(FILLER, None)
        ranks = engine.gather_objects(rows)
        if ranks is not None:
            for index, values in (item for rank in ranks for item in rank.items()):
                found[index] = values
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, "wb") as written:
                np.save(written, found)
    pairs.reference = engine.from_main(found)
    return todo


def _stored(file: Path, count: int) -> np.ndarray:
    """Return (count, 2) what is in the file; NaN where nothing is."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        found = None
    if found is None or found.shape != (count, 2) or found.dtype != np.float32:
        found = np.full((count, 2), np.nan, dtype=np.float32)
    return found


def choose_loss_and_attention(model: Any, run: Run) -> None:
    """Install the loss that the recipe names (in full, or in chunks that never hold all logits), and the attention
    kernel that keeps packed documents apart."""
    recipe: Any = run.recipe  # a ClmRecipe
    install_chosen_loss(model, recipe)
    if recipe.is_packed:
        run.log_at_start(choose_attention(model, recipe.attn_implementation, run.strategy.precision))


def try_kernels(engine: Engine, recipe: ClmRecipe, collate: Any) -> list[str | None]:
    """Choose by trial, on random tokens, the attention kernel that keeps packed documents apart and the loss that is
    the model's own; check that ranks that split rows find what one finds. Returns notes for the log. Raises UserError:
    one of these is not so.

    Args:
        collate: lays rows out as in training; it learns how the attention kernel takes packed rows.
    """
    notes: list[str | None] = []
    if recipe.is_packed:
        notes.append(check_packing(engine, recipe, collate))
    elif recipe.reset_attention_mask or recipe.reset_position_ids:
        check_mask_support(engine)
    if not recipe.predict_file:
        notes.append(check_loss(engine, recipe))
        check_split_rows(engine, collate, recipe.is_packed)
    return notes
