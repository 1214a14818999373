"""Distillation: how far a student's next-token distribution is from a teacher's.

The loss of a token is, with a the weight and T the temperature,

    (1 - a) hard + a T^2 KL        forward: KL(teacher || student), reverse: KL(student || teacher)

as in Hinton et al. 2015 (arXiv:1503.02531) and Gu et al. 2023 (MiniLLM, arXiv:2306.08543). Both distributions are
softmax(log p / T). Of a stored teacher only the K likeliest tokens are known: all others are one class more, whose
probability is what the K leave, for teacher and student alike. A student that spreads probability over tokens that the
teacher finds unlikely is so corrected, and with K = V the loss is that of the whole vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

SMALLEST_REST = 1e-7  # below, the probability of all other tokens is rounding


class Distillation(NamedTuple):
    """How a teacher's distribution enters the loss: a, T and the direction of the KL divergence; and the teacher's
    head, where it is held beside the student."""

    weight: float
    temperature: float = 1.0
    reverse: bool = False
    head: Any = None

    def losses(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """(N,) T^2 KL of log-probabilities (N, C) of the same classes."""
        of_student, of_teacher = (F.log_softmax(each / self.temperature, dim=-1) for each in (student, teacher))
        target, other = (of_student, of_teacher) if self.reverse else (of_teacher, of_student)
        return self.temperature**2 * (target.exp() * (target - other)).sum(dim=-1)

    def with_gradient(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses (N,), their gradient (N, C) with regard to `student`), where autograd is switched off."""
        with torch.enable_grad():
            student = student.detach().requires_grad_()
            losses = self.losses(student, teacher)
            (gradient,) = torch.autograd.grad(losses.sum(), student)
        return losses.detach(), gradient


class TeacherTokens(NamedTuple):
    """What a teacher says of each token: ids (N, K) and their log-probabilities (N, K), fp32."""

    ids: torch.Tensor
    log_probabilities: torch.Tensor

    def rows(self, start: int, stop: int) -> "TeacherTokens":
        """Those of some tokens."""
        return TeacherTokens(self.ids[start:stop], self.log_probabilities[start:stop])


class TeacherStates(NamedTuple):
    """A teacher's last hidden states (N, H) and its head; its logits are made for some tokens at a time."""

    hidden: torch.Tensor
    head: Any

    def rows(self, start: int, stop: int) -> TeacherTokens:
        """The whole vocabulary for some tokens."""
        log_probabilities = self.head(self.hidden[start:stop]).float().log_softmax(-1)
        ids = torch.arange(log_probabilities.shape[1], device=log_probabilities.device)
        return TeacherTokens(ids.expand(log_probabilities.shape), log_probabilities)


AnyTeacher = TeacherTokens | TeacherStates


def with_rest(log_probabilities: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(N, K + 1): that of all other tokens is added; (N, K) where there are none."""
    if log_probabilities.shape[1] == vocab_size:
        return log_probabilities
    rest = 1 - log_probabilities.exp().sum(dim=-1, keepdim=True)
    return torch.cat([log_probabilities, rest.clamp(min=SMALLEST_REST).log()], dim=-1)
