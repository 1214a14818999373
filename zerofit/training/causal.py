"""The steps that the scripts of causal models (clm.py, dpo.py, distill.py) have in common."""

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

LOSS_ONLY_INPUTS = ("labels", "next_tokens", "is_token")  # keys of a batch that the teacher does not read
TEACHER_REMEDY = "Take another teacher"


class Teacher:
    """A frozen model whose distribution the student learns."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = model.get_output_embeddings()

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's last hidden states (B, T, H), the input of its head. They have no gradients."""
        inputs = {name: value for name, value in batch.inputs.items() if name not in LOSS_ONLY_INPUTS}
        with packed_rows(batch.packed):
            hidden: torch.Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden


def load_teacher(run: Run, student: Any, data: TextData, collate: Any) -> Teacher:
    """Load the recipe's teacher, and give its head to the student's loss. Raises UserError: it cannot be loaded, has
    another vocabulary, changes its logits after the head, or mixes the documents of a packed row.

    Args:
        collate: lays rows out as in training.
    """
    recipe: Any = run.recipe  # a DistillRecipe
    device = run.device
    name = recipe.teacher
    trust = recipe.trust_remote_code
    precision = run.strategy.precision
    config = read_config("teacher", name, trust)
    option = f"teacher = {name!r}"
    vocab_size = config.vocab_size
    student_size = student.config.vocab_size
    if vocab_size != student_size:
        raise UserError(
            f"{option}: its vocabulary has {vocab_size:,} rows, and the student's {student_size:,}. {TEACHER_REMEDY}"
        )
    if load_named_tokenizer("teacher", name, config, trust).get_vocab() != data.tokenizer.get_vocab():
        raise UserError(f"{option} has another vocabulary than the student. Name the teacher's with tokenizer_name")
    choose_length("block_size", data.block_size, option, config)
    config.use_cache = False
    model, missing = read_model(
        AutoModelForCausalLM, "teacher", name, config, precision=precision, trust_remote_code=trust
    )
    if missing:
        raise UserError(f"{option} lacks {len(missing)} weights, such as {missing[0]}. Name a folder with all of them")
    if recipe.is_packed:
        choose_attention(model, recipe.attn_implementation, precision)
    teacher = Teacher(model.to(device))
    if model.base_model is model or not _logits_come_from_head(teacher, random_tokens(vocab_size, device)):
        raise UserError(f"{option}: a {config.model_type} changes its logits after the head. {TEACHER_REMEDY}")
    if recipe.is_packed and documents_leak(model, collate, vocab_size, device):
        raise UserError(f"{option}: a {config.model_type} mixes documents of a packed row. Use --packing none")
    terms = student.loss_terms
    student.loss_terms = terms._replace(distillation=terms.distillation._replace(head=teacher.head))
    return teacher


@torch.no_grad()
def _logits_come_from_head(teacher: Teacher, ids: torch.Tensor) -> bool:
    logits = teacher.model(input_ids=ids).logits
    head_logits = teacher.head(teacher.model.base_model(input_ids=ids).last_hidden_state)
    return torch.allclose(head_logits, logits, rtol=0, atol=1e-2 * float(logits.abs().max()))


MIN_PAIRS_PER_WRITE = 1024  # pairs


def measure_reference(
    run: Run, engine: Engine, parts: Mapping[str, PreferencePairs | None], collate: Callable[[list[Any]], Batch]
) -> None:
    """Compute the reference model's log-probabilities of all pairs with `engine`, whose model is not trained yet.

    They are stored with the prepared data. A later launch reads them there, and computes only those that are missing.
    """
    if run.measurement:
        return
    recipe: Any = run.recipe  # a DpoRecipe
    # The log-probabilities are stored under a hash of all that the reference model depends on.
    name = recipe.model_name_or_path
    precision = "float8" if recipe.float8 else run.strategy.precision
    weights = recipe.seed if name is None else weights_key(name)
    origin = f"{weights} {precision} {recipe.quantised} {torch.__version__} {engine.whole.config.to_json_string()}"
    if run.config.adapter is not None:  # the model before training is base and adapter
        origin += f" {weights_key(str(run.config.adapter.path))}"
    parts_with_pairs = [part for part in parts.values() if part]
    for pairs in (pairs for part in parts_with_pairs for pairs in getattr(part, "sets", [part])):  # a mixture has sets
        name = hashlib.sha256(f"{pairs.key} {len(pairs)} {origin}".encode()).hexdigest()[:32]
        file = cache_root(recipe.cache_dir) / f"reference-{name}.npy"
        began = time.perf_counter()
        num_measured = _measure(engine, pairs, collate, recipe.per_device_eval_batch_size, file, run=run)
        if num_measured:
            seconds = duration(time.perf_counter() - began)
            run.log_lines(f"reference {num_measured:,} pairs in {seconds}; kept in {file}")


def _measure(engine: Engine, pairs: PreferencePairs, collate: Any, batch_size: int, file: Path, *, run: Run) -> int:
    """Compute the log-probabilities that are not stored yet. Returns the number of these pairs."""
    reference = engine.from_main(_read_stored(file, len(pairs)) if engine.is_main else None)
    indices = FixedOrder(len(pairs), pairs.sort_key).indices(0, len(pairs))
    missing = np.flatnonzero(np.isnan(reference[indices]).any(axis=1))
    start = int(missing[0]) if len(missing) else len(pairs)
    num_missing = len(pairs) - start
    if num_missing:
        run.log_lines(f"reference of {num_missing:,} pairs: what the model before training makes of them")
    pairs_per_batch = batch_size * engine.layout.data_size
    chunk = -(-MIN_PAIRS_PER_WRITE // pairs_per_batch) * pairs_per_batch
    for begin in range(start, len(pairs), chunk):
        batches = eval_batches(engine, pairs, collate, batch_size, begin, stop=min(begin + chunk, len(pairs)))
        rows: dict[int, Any] = {}
        for batch, batch_values in engine.losses(batches, log_probabilities):
            if batch_values.dim():  # in a pipeline only the last stage has them
                rows |= zip(batch.indices, batch_values.tolist())
        rows.pop(FILLER, None)
        ranks = engine.gather_objects(rows)
        if ranks is not None:
            for index, values in (item for rank in ranks for item in rank.items()):
                reference[index] = values
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file, "wb") as written:
                np.save(written, reference)
    pairs.reference = engine.from_main(reference)
    return num_missing


def _read_stored(file: Path, count: int) -> np.ndarray:
    """Return the stored log-probabilities, (count, 2), float32; NaN where a pair has none yet."""
    try:
        reference = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        reference = None
    if reference is None or reference.shape != (count, 2) or reference.dtype != np.float32:
        reference = np.full((count, 2), np.nan, dtype=np.float32)
    return reference


def choose_loss_and_attention(model: Any, run: Run) -> None:
    """Install the loss that the recipe names (in full, or in chunks that never hold all logits), and the attention
    kernel that keeps packed documents apart."""
    recipe: Any = run.recipe  # a ClmRecipe
    install_chosen_loss(model, recipe)
    if recipe.is_packed:
        run.log_at_start(choose_attention(model, recipe.attn_implementation, run.strategy.precision))


def check_kernels(engine: Engine, recipe: ClmRecipe, collate: Any) -> list[str | None]:
    """Check on random tokens that the attention kernel keeps packed documents apart, that the loss equals the model's
    own, and that ranks that split rows compute what one rank computes. Returns notes for the log. Raises UserError:
    a check fails.

    Args:
        collate: lays rows out as in training; it is told how the attention kernel takes packed rows.
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
