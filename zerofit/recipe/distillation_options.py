"""Options of distillation: a student is trained on a teacher's distribution."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import option

DIVERGENCES = ("forward", "reverse")


@dataclass
class DistillationOptions(Recipe):
    """Distillation"""

    distill_divergence: str | None = option(
        None,
        "Train on a teacher's distribution, too: forward, KL(teacher || student), or reverse, KL(student || teacher). "
        "See teacher.",
        choices=DIVERGENCES,
    )
    teacher: str | None = option(
        None,
        "The teacher, a folder or a hub name, held by each process beside the student: all of its weights, in the "
        "precision of the run.",
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
        if self.trains and not self.teacher:
            problems.append(f"{stated}: name the teacher with --teacher, a folder or a hub name")
        return problems
