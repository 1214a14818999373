"""Options of distillation: a student is trained on a teacher's distribution."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option

DIVERGENCES = ("forward", "reverse")
AS_WRITTEN = (  # options of text, without effect on samples that `zerofit generate --logprobs` has written
    "dataset_name", "data_path", "block_size_warmup", "packing", "data_format", "messages_column",
    "train_on_prompt", "train_tokenizer_vocab_size", "difficulty_warmup", "mixture_temperature",
)  # fmt: skip


@dataclass
class DistillationOptions(Recipe):
    """Distillation"""

    distill_divergence: str | None = option(
        None,
        "Train on a teacher's distribution, too: forward, KL(teacher || student), or reverse, KL(student || teacher). "
        "train_file is what --logprobs of zerofit generate has written, or teacher reads the data.",
        choices=DIVERGENCES,
    )
    teacher: str | None = option(
        None,
        "The teacher, a folder or a hub name, held by each process beside the student: all of its weights, in the "
        "precision of the run. By default what it says is in train_file.",
    )
    distill_weight: float = option(
        0.5, "What the divergence weighs; the loss of the next token itself weighs 1 - X.", minimum=0
    )
    distill_temperature: float = option(
        1.0, "Temperature of both distributions; the divergence is multiplied by its square.", positive=True
    )

    def problems(self) -> list[str]:
        problems, divergence = super().problems(), self.distill_divergence
        if divergence is None:
            names = ("teacher", "distill_weight", "distill_temperature")
            return problems + [
                f"{name} has no effect without distill_divergence. Set that to {' or '.join(DIVERGENCES)}"
                for name in names
                if self.is_changed(name)
            ]
        stated = f"distill_divergence = {divergence}"
        if self.distill_weight > 1:
            problems.append(f"distill_weight = {self.distill_weight:g}: it is at most 1, such as 0.5")
        if self.preference_loss:
            problems.append(f"{stated} and preference_loss = {self.preference_loss}: keep one of the two")
        if self.streaming and not self.teacher:
            problems.append(f"streaming = {self.streaming} is not supported with {stated}. Remove streaming")
        if not (self.predict_file or self.teacher):
            problems += [
                f"{name} ({self.source(name)}) has no effect with {stated}: samples are as written. Give it to "
                "`zerofit generate --logprobs`, or remove it"
                for name in AS_WRITTEN
                if self.is_changed(name)
            ]
            if self.trains and not self.train_file:
                problems.append(f"{stated}: name what `zerofit generate --logprobs` has written with train_file")
        return problems
