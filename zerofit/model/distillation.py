"""Distillation: how far a student's next-token distribution is from a teacher's.

The loss of a token is, with a the weight and T the temperature,

    (1 - a) hard + a T^2 KL        forward: KL(teacher || student), reverse: KL(student || teacher)

as in Hinton et al. 2015 (arXiv:1503.02531) and Gu et al. 2023 (MiniLLM, arXiv:2306.08543). Both distributions are
softmax(log p / T), over the whole vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Distillation(NamedTuple):
    """How a teacher's distribution enters the loss: a, T and the direction of the KL divergence; and the teacher's
    head, where it is held beside the student."""

    weight: float
    temperature: float = 1.0
    reverse: bool = False
    head: Any = None

    def losses(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """(N,) T^2 KL of log-probabilities (N, V)."""
        of_student, of_teacher = (F.log_softmax(each / self.temperature, dim=-1) for each in (student, teacher))
        target, other = (of_student, of_teacher) if self.reverse else (of_teacher, of_student)
        return self.temperature**2 * (target.exp() * (target - other)).sum(dim=-1)

    def with_gradient(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses (N,), their gradient (N, V) with regard to `student`), where autograd is switched off."""
        with torch.enable_grad():
            student = student.detach().requires_grad_()
            losses = self.losses(student, teacher)
            (gradient,) = torch.autograd.grad(losses.sum(), student)
        return losses.detach(), gradient


class TeacherStates(NamedTuple):
    """A teacher's last hidden states (N, H) and its head; its logits are made for some tokens at a time."""

    hidden: torch.Tensor
    head: Any

    def log_probabilities(self, start: int, stop: int) -> torch.Tensor:
        """(stop - start, V) fp32."""
        return self.head(self.hidden[start:stop]).float().log_softmax(-1)
