"""A teacher beside the student: each process holds all of its weights, and reads the micro-batches it trains on."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from zerofit.data.collate import Batch
from zerofit.data.lengths import choose_length
from zerofit.data.pack import TextData
from zerofit.model.attention import choose_attention, packed_rows
from zerofit.model.configuration import read_config
from zerofit.model.loss import HIDDEN, has_separate_body, model_loss
from zerofit.model.preflight import documents_leak, random_tokens
from zerofit.model.pretrained_io import read_model, read_tokenizer
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from zerofit.training.run import Run

NOT_READ = ("labels", "next_tokens", "is_token")
ANOTHER = "Take another teacher"


class Teacher:
    """A frozen model whose distribution the student learns; as a loss: (student, batch) -> the summed loss."""

    def __init__(self, model: Any) -> None:
        self.model, self.head = model.eval().requires_grad_(False), model.get_output_embeddings()

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's last hidden states (B, T, H), which its head makes logits of; without gradients."""
        inputs = {name: value for name, value in batch.inputs.items() if name not in NOT_READ}
        with packed_rows(batch.packed):
            hidden: torch.Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden

    def __call__(self, student: Any, batch: Batch) -> torch.Tensor:
        return model_loss(student, replace(batch, inputs={**batch.inputs, HIDDEN: self.hidden(batch)}))


def load_teacher(run: "Run", student: Any, data: TextData, collate: Any) -> Teacher:
    """Load the recipe's teacher, and give the student's loss its head. Raises UserError: it cannot be loaded, has
    another vocabulary, makes logits in another way than its head, or mixes the documents of a packed row.

    Args:
        collate: lays rows out as in training.
    """
    recipe: Any = run.recipe  # a DistillRecipe
    device = run.device
    name, trust, precision = recipe.teacher, recipe.trust_remote_code, run.strategy.precision
    config, stated = read_config("teacher", name, trust), f"teacher = {name!r}"
    rows, own = config.vocab_size, student.config.vocab_size
    if rows != own:
        raise UserError(f"{stated}: its vocabulary has {rows:,} rows, and the student's {own:,}. {ANOTHER}")
    if read_tokenizer("teacher", name, config, trust).get_vocab() != data.tokenizer.get_vocab():
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
    if not has_separate_body(model) or not _makes_logits_of_its_head(teacher, random_tokens(rows, device)):
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
