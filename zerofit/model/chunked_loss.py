"""The product with the vocabulary and its loss, computed in chunks of rows: all logits are never in memory at once."""

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofit.model.compilation import failing_compiler
from zerofit.recipe.causal_options import DistillationOptions
from zerofit.recipe.tasks import LossOptions

if TYPE_CHECKING:
    from zerofit.model.tensor_parallel import VocabularyShare

Share: TypeAlias = "VocabularyShare | None"  # None: no tensor parallelism
IGNORE = -100
CHUNK_BYTES = 128 * 2**20  # fp32 logits: enough for full speed, few bytes compared with activations
MIN_CHUNK_ROWS = 64
# On a GPU chunks are larger, because each of them reads and writes the head's whole gradient.
GPU_CHUNK_BYTES = 2**30
GPU_CHUNK_ROWS = (1024, 2048)  # the smallest and the largest number
GPU_VOCABULARY_MULTIPLE = 64  # products are made of a multiple of this many tokens
# The most that logits and their gradient take in the chunks above; compiled chunks may take as much.
COMPILED_CHUNK_BYTES = 5 * 2**29
MAX_COMPILED_ROWS = 4096


class Distillation(NamedTuple):
    """The distance of a student's next-token distribution from a teacher's, as a part of the loss of a token,

        (1 - a) hard + a T^2 KL        forward: KL(teacher || student), reverse: KL(student || teacher)

    with `weight` a and `temperature` T, as in Hinton et al. 2015 (arXiv:1503.02531) and Gu et al. 2023 (MiniLLM,
    arXiv:2306.08543). Both distributions are softmax(log p / T), over the whole vocabulary. `head` is the teacher's,
    where it is held next to the student.
    """

    weight: float
    temperature: float = 1.0
    reverse: bool = False
    head: Any = None

    def of_teacher(self, hidden: Tensor) -> Tensor:
        """Return (N, V) fp32 log-probabilities of the teacher, whose last hidden states are (N, H)."""
        return self.head(hidden).float().log_softmax(-1)

    def losses(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return (N,) T^2 KL of log-probabilities (N, V)."""
        of_student, of_teacher = (F.log_softmax(each / self.temperature, dim=-1) for each in (student, teacher))
        target, approximation = (of_student, of_teacher) if self.reverse else (of_teacher, of_student)
        return self.temperature**2 * (target.exp() * (target - approximation)).sum(dim=-1)

    def with_gradient(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return (losses (N,), their gradient (N, V) with regard to `student`), where autograd is switched off."""
        with torch.enable_grad():
            student = student.detach().requires_grad_()
            losses = self.losses(student, teacher)
            (gradient,) = torch.autograd.grad(losses.sum(), student)
        return losses.detach(), gradient


class TokenLoss(NamedTuple):
    """The terms that training adds to the cross entropy of a token."""

    label_smoothing: float = 0.0  # this part of the target is divided among the whole vocabulary
    # factor of the squared logsumexp of the logits (Chowdhery et al. 2022, PaLM: 1e-4)
    z_loss: float = 0.0
    distillation: Distillation | None = None  # how a teacher's distribution enters the loss, where a batch has one

    @property
    def hard_weight(self) -> float:
        """The factor of the loss of the next token itself."""
        return 1.0 if self.distillation is None else 1 - self.distillation.weight


CROSS_ENTROPY = TokenLoss()


def token_loss_of(recipe: LossOptions) -> TokenLoss:
    """Return the terms that a recipe adds to the cross entropy of tokens."""
    distillation = None
    if isinstance(recipe, DistillationOptions):
        reverse = recipe.distill_divergence == "reverse"
        distillation = Distillation(recipe.distill_weight, recipe.distill_temperature, reverse)
    return TokenLoss(recipe.label_smoothing, recipe.z_loss, distillation)


def chunk_rows(vocab_size: int, on_gpu: bool) -> int:
    """Return how many rows of logits are in memory at a time."""
    if not on_gpu:
        return max(MIN_CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))
    smallest, largest = GPU_CHUNK_ROWS
    return min(max(GPU_CHUNK_BYTES // (4 * vocab_size) // 128 * 128, smallest), largest)


def compiled_rows(vocab_size: int) -> int:
    """Return how many rows of logits are in memory at a time in compiled chunks: 6 bytes per logit instead of 10."""
    return min(max(COMPILED_CHUNK_BYTES // (6 * vocab_size) // 128 * 128, GPU_CHUNK_ROWS[0]), MAX_COMPILED_ROWS)


def chunk_starts(num_rows: int, rows: int) -> Iterable[int]:
    """Return the first row of each chunk; `zerofit plan` traces some of them."""
    return range(0, num_rows, rows)


@torch.compiler.disable  # it would unroll the loop
def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    share: Share = None,
    *,
    terms: TokenLoss = CROSS_ENTROPY,
    teacher: Tensor | None = None,
) -> Tensor:
    """Return the summed loss (fp32) of hidden states (N, H) against targets (N,), computing some rows of logits at a
    time.

    Args:
        weight, bias: (V, H) and (V,); in fp32 they are cast to the dtype of the hidden states, and their gradients
            are not.
        share: under tensor parallelism the rows of the vocabulary that weight and bias have here (VocabularyShare).
        terms: what is added to the cross entropy.
        teacher: (N, width) a teacher's last hidden states, whose logits are made for some tokens at a time; needed
            where `terms` distil, which does not go together with `share`.
    """
    tensors = (hidden, weight, bias)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    is_plain = share is None and terms.distillation is None and hidden.dtype != torch.float32 and any(needs_grad)
    compiled = compiled_chunk(hidden.device) if is_plain else None
    rows = _rows_of_chunk(hidden, weight, share) if compiled is None else compiled_rows(len(weight))
    return _ChunkedLoss.apply(hidden, weight, bias, targets, rows, needs_grad, share, terms, teacher, compiled)


def _rows_of_chunk(hidden: Tensor, weight: Tensor, share: Share) -> int:
    vocab_size = weight.shape[0] if share is None else max(share.sizes)  # the ranks' chunks have the same rows
    return chunk_rows(vocab_size, has_half_matmul(hidden.device))


@torch.compiler.disable
def chunked_token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, share: Share = None
) -> Tensor:
    """Return the loss (N,), fp32, of each token, some rows of logits at a time. Arguments as of chunked_loss."""
    return _ChunkedTokenLosses.apply(hidden, weight, bias, targets, _rows_of_chunk(hidden, weight, share), share)


class _ChunkedLoss(torch.autograd.Function):
    """The loss and its gradients, chunk by chunk: logits, and sums over rows and chunks, are in fp32. torch's
    linear_cross_entropy (2.13), under each of its policies, rounds to the half precision of its inputs: the gradient
    of the weight after every chunk, each token's loss (a sum would keep two digits), and so the gradient of the
    output, 1 over the number of tokens, which in bf16 scales all gradients by up to 1.004."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rows: int,
        needs_grad: Sequence[bool],
        share: Share,
        terms: TokenLoss,
        teacher: Tensor | None,
        compiled: Callable[..., Tensor] | None,
    ) -> Tensor:
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        loss, divergence = torch.zeros((2,), dtype=torch.float32, device=hidden.device)
        size = len(weight)
        vocab_size = size if share is None else sum(share.sizes)
        weight, bias = _cast(hidden, weight, bias)
        totals = [
            torch.zeros_like(tensor, dtype=dtype) if needed and tensor is not None else None
            for tensor, needed, dtype in zip((hidden, weight, bias), needs_grad, (hidden.dtype, *2 * [torch.float32]))
        ]
        for start in chunk_starts(len(hidden), rows):
            chunk = hidden[start : start + rows].to(weight.dtype)
            target = targets[start : start + rows]
            is_ignored = (target == IGNORE)[:, None]
            if compiled is not None:
                gradient = _padded_gradient(weight, len(chunk), size)
                logits = _logits(chunk, weight, bias, size)
                loss += compiled(logits, target, gradient[:, :size], *terms[:2]).sum()
                _add_gradients(totals, start, gradient, weight, chunk, is_ignored=is_ignored)
                continue
            scores = _scores(chunk, weight, bias, target, share=share, size=size)
            loss += _loss_of_chunk(scores, is_ignored, vocab_size, terms)
            soft = None
            if terms.distillation is not None:
                assert teacher is not None, "terms that distil need a teacher's states"
                of_teacher = terms.distillation.of_teacher(teacher[start : start + rows])
                losses, soft = terms.distillation.with_gradient(scores.log_probabilities, of_teacher)
                divergence += losses.masked_fill(is_ignored[:, 0], 0).sum()
            if not any(needs_grad):
                continue
            at_target = scores.at_target * (terms.hard_weight * (1 - terms.label_smoothing))
            gradient = _gradient_of_logits(scores._replace(at_target=at_target), vocab_size, terms, soft)
            if weight.dtype == torch.float32:
                gradient = gradient.to(hidden.dtype).float()
            else:
                gradient = _to_padded(weight, gradient)
            _add_gradients(totals, start, gradient, weight, chunk, is_ignored=is_ignored)
        if share is not None:
            loss = share.summed(loss)
        if terms.distillation is not None:
            loss = terms.hard_weight * loss + terms.distillation.weight * divergence
        grad_hidden, grad_weight, grad_bias = totals
        ctx.gradients = grad_hidden, None if grad_weight is None else grad_weight[:size], grad_bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        ctx.gradients = None
        scaled = (
            None if gradient is None else gradient.float().mul_(scale).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes)
        )
        return *scaled, None, None, None, None, None, None, None


class _ChunkedTokenLosses(torch.autograd.Function):
    """The loss of each token. Only the backward pass knows the factor of each token's loss, so it computes the logits
    again: the head costs a third more than in _ChunkedLoss, and nothing but its inputs is kept."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, rows: int, share: Share
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.rows = rows
        ctx.share = share
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        size = len(weight)
        weight, bias = _cast(hidden, weight, bias)
        for start in chunk_starts(len(hidden), rows):
            chunk = hidden[start : start + rows].to(weight.dtype)
            target = targets[start : start + rows]
            log_probabilities, target, *_ = _scores(chunk, weight, bias, target, share=share, size=size)
            losses[start : start + rows] = F.nll_loss(log_probabilities, target, ignore_index=IGNORE, reduction="none")
        return losses if share is None else share.summed(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        dtypes = [None if each is None else each.dtype for each in (weight, bias)]
        needs = ctx.needs_input_grad
        size = len(weight)
        weight, bias = _cast(hidden, weight, bias)
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None
        for start in chunk_starts(len(hidden), ctx.rows):
            chunk = hidden[start : start + ctx.rows].to(weight.dtype)
            target = targets[start : start + ctx.rows]
            scale = scales[start : start + ctx.rows].masked_fill(target == IGNORE, 0)[:, None]
            scores = _scores(chunk, weight, bias, target, share=ctx.share, size=size)
            gradient = _gradient_of_logits(scores).mul_(scale)
            gradient = gradient if weight.dtype == torch.float32 else _to_padded(weight, gradient)
            if grad_hidden is not None:
                grad_hidden[start : start + ctx.rows] = gradient @ weight
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, chunk)
            if grad_bias is not None:
                grad_bias += gradient[:, :size].float().sum(dim=0)
        of_head = [
            None if each is None else each[:size].to(dtype) for each, dtype in zip((grad_weight, grad_bias), dtypes)
        ]
        return grad_hidden, *of_head, None, None, None


def _cast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast weight and bias from fp32 to the dtype of the hidden states; the weight stays fp32 where products are in
    fp32. Where products are in half precision the weight is padded with rows of zeros to a multiple of 64: on an H100
    a vocabulary of 50,257 took longer than one of 128,256, although its rows were aligned in memory."""
    dtype = weight.dtype
    if dtype == torch.float32:
        dtype = hidden.dtype
        bias = None if bias is None else bias.to(dtype)
    if not has_half_matmul(hidden.device):
        return weight.to(dtype).float(), bias
    num_padding = -len(weight) % GPU_VOCABULARY_MULTIPLE
    if dtype == torch.float32 or not num_padding:
        return weight.to(dtype), bias
    padded = weight.new_zeros((len(weight) + num_padding, weight.shape[1]), dtype=dtype)
    padded[: len(weight)] = weight
    return padded, bias


def _add_gradients(
    totals: Iterable[Tensor | None], start: int, gradient: Tensor, weight: Tensor, chunk: Tensor, *, is_ignored: Tensor
) -> None:
    """Add a chunk's gradients to `totals` (of hidden states, weight and bias; None: not needed), from the gradient of
    its logits (N, V or more). Ignored rows count as zeros."""
    of_hidden, of_weight, of_bias = totals
    if of_hidden is not None:
        of_hidden[start : start + len(chunk)] = (gradient @ weight).masked_fill_(is_ignored, 0)
    if of_weight is not None:
        _add_product(of_weight, gradient.T, chunk.masked_fill(is_ignored, 0))
    if of_bias is not None:
        of_bias += ((~is_ignored).to(gradient.dtype).T @ gradient)[0, : len(of_bias)]


def loss_and_gradient(
    logits: Tensor, target: Tensor, gradient: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the loss (N,), fp32, of each row of logits (N, V), fp32, against targets (N,), 0 where a row is ignored.
    The gradient (N, V) of the logits is written into `gradient`. When compiled it takes two passes: both read the
    logits, and the gradient is written once (10 bytes per logit in half precision). As separate operations it takes 22
    to 28."""
    log_sums = logits.logsumexp(-1)
    is_kept = target != IGNORE
    columns = torch.arange(logits.shape[1], device=logits.device)
    at_target = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    losses = log_sums - (1 - label_smoothing) * at_target
    slope = (logits - log_sums[:, None]).exp()
    if z_loss:
        losses = losses + z_loss * log_sums.square()
        slope = slope * (1 + 2 * z_loss * log_sums)[:, None]
    slope = torch.where(columns == target[:, None], slope - (1 - label_smoothing), slope)
    if label_smoothing:
        losses = losses - label_smoothing * logits.mean(-1)
        slope = slope - label_smoothing / logits.shape[1]
    gradient.copy_(torch.where(is_kept[:, None], slope, 0.0))
    return losses.masked_fill(~is_kept, 0.0)


@functools.cache
def compiled_chunk(device: torch.device) -> Callable[..., Tensor] | None:
    """Return `loss_and_gradient` compiled for a device; None where chunks are computed by separate operations: on
    devices other than CUDA, and where torch's compiler does not work. If it fails at this very function, that runs
    uncompiled."""
    if device.type != "cuda" or not has_half_matmul(device):
        return None
    if fault := failing_compiler(device):
        warnings.warn(f"the loss is not compiled, and takes longer: {fault}", stacklevel=2)
        return None
    return with_eager_fallback(torch.compile(loss_and_gradient), loss_and_gradient)


def with_eager_fallback(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, which after its compiler's first failure warns and calls the function itself."""
    chosen = [compiled]

    def call(*arguments: Any) -> Any:
        if chosen[0] is function:
            return function(*arguments)
        try:
            return compiled(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model's code may raise anything
            first = str(error).strip().partition("\n")[0][:60]
            warnings.warn(f"the loss is not compiled: {type(error).__name__}: {first}", stacklevel=2)
            chosen[0] = function
            return function(*arguments)

    return call


class Scores(NamedTuple):
    """The log probabilities of some rows, fp32, and what is needed to compute their loss and its gradient."""

    log_probabilities: Tensor  # (N, V)
    target: Tensor  # (N,), among them; IGNORE also where another rank has it
    at_target: Tensor  # (N, 1) or (1, 1), added to the gradient at the target: -1; 0 where another rank has it
    log_sums: Tensor  # (N, 1), the logsumexp of the logits


def _scores(chunk: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, share: Share, size: int) -> Scores:
    logits = _logits(chunk, weight, bias, size)
    if share is None:
        log_probabilities = F.log_softmax(logits, dim=-1)
        log_sums = logits[:, :1] - log_probabilities[:, :1]
        return Scores(log_probabilities, target, log_probabilities.new_full((1, 1), -1), log_sums)
    log_probabilities, log_sums = share.log_softmax(logits)
    target, is_own = share.own(target)
    return Scores(log_probabilities, target.masked_fill(~is_own, IGNORE), -is_own[:, None].float(), log_sums)


def _loss_of_chunk(scores: Scores, is_ignored: Tensor, vocab_size: int, terms: TokenLoss) -> Tensor:
    """Return the summed loss of some rows; under tensor parallelism this rank's part of it. `is_ignored`: (N, 1)
    whether a row has no target on any rank."""
    log_probabilities, target, _, log_sums = scores
    loss = F.nll_loss(log_probabilities, target, ignore_index=IGNORE, reduction="sum")
    if smoothing := terms.label_smoothing:
        over_vocabulary = log_probabilities.sum(dim=-1, keepdim=True).masked_fill_(is_ignored, 0).sum()
        loss = (1 - smoothing) * loss - smoothing / vocab_size * over_vocabulary
    if terms.z_loss:
        loss = loss + terms.z_loss * log_sums[:, 0].masked_fill(target == IGNORE, 0).square().sum()
    return loss


def _gradient_of_logits(
    scores: Scores, vocab_size: int = 1, terms: TokenLoss = CROSS_ENTROPY, soft: Tensor | None = None
) -> Tensor:
    """Return the gradient of the logits, in the memory of the log probabilities: probabilities, less 1 at the target,
    plus the gradients of `terms` and the teacher. `soft`: (N, V) the gradient of the divergence. It adds up to 0 over
    the vocabulary, so it is that of the logits."""
    log_probabilities, targets, at_target, log_sums = scores
    target = targets[:, None]
    gradient = log_probabilities.exp_()
    if terms.z_loss or soft is not None:
        factor = terms.hard_weight * (1 + 2 * terms.z_loss * log_sums)
        gradient.mul_(factor)
    gradient.scatter_add_(1, target.clamp(min=0), at_target.expand(target.shape))
    if soft is not None and terms.distillation is not None:
        gradient.add_(soft, alpha=terms.distillation.weight)
    smoothing = terms.hard_weight * terms.label_smoothing / vocab_size
    return gradient.sub_(smoothing) if smoothing else gradient


@functools.cache
def has_half_matmul(device: torch.device) -> bool:
    """Return whether a device multiplies half-precision matrices with sums in fp32; asked of torch, but of a CPU,
    where this may be slow."""
    if device.type == "cpu":
        return False
    element = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(element, element, out_dtype=torch.float32)
    except RuntimeError:  # NotImplementedError is a RuntimeError
        return False
    return True


@functools.cache
def adds_half_products(device: torch.device) -> bool:
    """Return whether a device adds products of half-precision matrices to a matrix in fp32, in place (torch before
    pytorch/pytorch#167931 did not)."""
    total = torch.ones(8, 8, device=device)
    half = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 9).all())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total (M, N), fp32, += left (M, K) @ right (K, N)."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif adds_half_products(total.device):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _padded_gradient(weight: Tensor, rows: int, size: int) -> Tensor:
    """Return a new matrix for the gradient of some rows of logits, as wide as the weight has rows; 0 from `size`
    on."""
    padded = weight.new_empty(rows, len(weight))
    padded[:, size:] = 0
    return padded


def _to_padded(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of logits (N, V) in the weight's dtype, with one column per row of the weight."""
    padded = _padded_gradient(weight, *gradient.shape)
    padded[:, : gradient.shape[1]] = gradient
    return padded


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, size: int) -> Tensor:
    """Return logits (N, V), fp32, of hidden states (N, H), any dtype, and the first `size` rows of a weight."""
    if weight.dtype == torch.float32:
        return F.linear(hidden, weight, None if bias is None else bias.float())
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)[:, :size]
    return logits if bias is None else logits.add_(bias)
