"""The loss over the vocabulary: a sum over the trained tokens, by default without holding all logits in memory.

After `install_loss(model, kind)` the model is called as before, and with `labels=` (or `next_tokens=`) it returns one
number: the summed cross entropy of each predicted token, without those with the label -100. The caller divides it by
the number of trained tokens in the global batch, which no single rank or micro-batch knows.

The product with the vocabulary is computed inside the head module's own forward: ZeRO-3's hooks gather a module's
weight around its forward and backward, and outside the weight is an empty tensor.

Whoever changes the loss changes it in each kind: full (`_forward_with_loss`), chunked (`_Chunked`) and liger. Before a
run preflight.check_loss compares the chosen kind with the full one. Evaluation uses the same function.
"""

import functools
import types
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from zerofit.model.attention import packed_rows
from zerofit.model.experts import Routing
from zerofit.model.families import family_of
from zerofit.recipe.errors import UserError

IGNORE = -100
CHUNK_BYTES = 128 * 2**20  # of fp32 logits: large enough for full speed, small compared with a model's activations
SMALLEST_CHUNK = 64  # rows
GPU_CHUNK_BYTES, GPU_CHUNK_ROWS = 2**30, (1024, 2048)  # with each chunk the head's whole gradient is read and written


def choose_loss(requested: str, device: torch.device) -> tuple[str, str]:
    """(kind of the loss that will run, reason as a sentence for the log).

    Raises:
        UserError: the recipe names a loss that this machine does not have.
    """
    if requested == "full":
        return "full", "full: all logits are held, as the recipe says"
    if requested == "liger":
        if device.type != "cuda" or _liger() is None:
            raise UserError("loss = liger: it needs a CUDA device and `pip install liger-kernel`. Use --loss auto")
        return "liger", "liger: Liger's fused linear cross entropy, logits are never held all at once"
    return "chunked", "chunked: logits are never held all at once, and their sums are in fp32"


@functools.cache
def _liger():
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum")


def install_loss(model: torch.nn.Module, kind: str) -> None:
    """Let `model(..., labels=...)` return the summed loss, computed by `kind` (full, chunked or liger).

    Shapes: input_ids (B, T) -> scalar. Of a causal model labels are (B, T) and not shifted: position t is trained on
    label t + 1; or they are given as `next_tokens` (B, T), shifted: position t is trained on next token t. Of an
    encoder-decoder model labels are the target (B, U), and the decoder reads it shifted right. A model with experts
    takes `is_token` (B, T), too, 0 where packed rows are filled up; its `routing` counts in training (experts.py).
    Without labels the model works as before. Can be called again to change the kind.
    """
    model.loss_kind = kind
    if "original_forward" not in model.__dict__:
        model.original_forward = model.forward
        model.routing = Routing(model) if family_of(model.config).has_experts else None
        model.forward = types.MethodType(_forward_with_loss, model)
        head = model.get_output_embeddings()
        head.original_forward = head.forward
        head.forward = types.MethodType(_head_forward, head)


def _forward_with_loss(
    self, *args, labels: torch.Tensor | None = None, next_tokens: torch.Tensor | None = None, **inputs
):
    is_token, mask = inputs.pop("is_token", None), inputs.get("attention_mask")
    if labels is None and next_tokens is None:
        return self.original_forward(*args, **inputs)
    if next_tokens is not None:
        targets = next_tokens.reshape(-1)
    elif self.config.is_encoder_decoder:
        inputs["decoder_input_ids"], targets = shifted_right(self, labels), labels.reshape(-1)
    else:
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).reshape(-1)
    if self.routing is None:
        return _summed_loss(self, targets, *args, **inputs)
    if is_token is None and mask is not None and mask.dim() == 2:
        is_token = mask
    if not self.training:
        return _summed_loss(self, targets, *args, **inputs, output_router_logits=False)
    with self.routing.watched() as router_logits:
        loss = _summed_loss(self, targets, *args, **inputs, output_router_logits=False)
    return self.routing.observe(loss, router_logits, is_token)


def _summed_loss(self, targets: torch.Tensor, *args, **inputs) -> torch.Tensor:
    if self.loss_kind == "full":
        logits = self.original_forward(*args, **inputs).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORE, reduction="sum")
    hidden = self.base_model(*args, **inputs).last_hidden_state
    return self.get_output_embeddings()(hidden.flatten(0, 1), targets, self.loss_kind)


def model_loss(model, batch) -> torch.Tensor:
    """The loss of a batch, of a model with a loss installed: summed over the batch's targets."""
    with packed_rows(batch.packed):
        return model(**batch.inputs)


def shifted_right(model, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder reads to predict `labels` (B, U): the start token, then each label but the last."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)  # some families begin differently
    start, padding = model.config.decoder_start_token_id, model.config.pad_token_id
    return F.pad(labels[:, :-1], (1, 0), value=start).masked_fill(F.pad(labels[:, :-1], (1, 0)) == IGNORE, padding)


def has_separate_body(model: torch.nn.Module) -> bool:
    """Whether the model's body can be called without its head, as the losses that do not hold all logits need it."""
    return model.base_model is not model


def _head_forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None, kind: str = ""):
    if targets is None:
        return self.original_forward(hidden)
    weight, bias = self.weight, self.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if kind == "liger":
        return _liger()(weight, hidden, targets, bias)
    with torch.autocast(hidden.device.type, enabled=False):
        return _chunked(hidden, weight, bias, targets, getattr(self, "share", None))


def chunk_rows(vocab_size: int, on_gpu: bool) -> int:
    """The rows of logits that are held at a time."""
    if not on_gpu:
        return max(SMALLEST_CHUNK, CHUNK_BYTES // (4 * vocab_size))
    smallest, largest = GPU_CHUNK_ROWS
    return min(max(GPU_CHUNK_BYTES // (4 * vocab_size) // 128 * 128, smallest), largest)


def chunk_starts(num_rows: int, rows: int) -> Iterable[int]:
    """The first row of each chunk; `zerofit plan` goes through some of them."""
    return range(0, num_rows, rows)


@torch.compiler.disable  # it would unroll the loop
def _chunked(hidden, weight, bias, targets, share=None) -> torch.Tensor:
    """The summed loss (fp32) of hidden states (N, H) against targets (N,), some rows of logits at a time.

    Args:
        share: under tensor parallelism the rows of the vocabulary that weight and bias have here (VocabularyShare).
    """
    vocab_size = weight.shape[0] if share is None else max(share.sizes)  # the ranks' chunks have the same rows
    rows = chunk_rows(vocab_size, has_half_matmul(hidden.device))
    tensors = (hidden, weight, bias)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    return _Chunked.apply(hidden, weight, bias, targets, rows, needs_grad, share)


class _Chunked(torch.autograd.Function):
    """The loss and its gradients, chunk by chunk: logits, and sums over rows and chunks, are in fp32.

    torch's linear_cross_entropy (2.13), under each of its policies, rounds to the half precision of its inputs: the
    gradient of the weight after every chunk, each token's loss (a sum would keep two digits), and so the gradient of
    the output, 1 over the number of tokens, which in bf16 scales all gradients by up to 1.004.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, rows, needs_grad, share):
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=dtype) if needed else None
            for tensor, needed, dtype in zip((hidden, weight, bias), needs_grad, (hidden.dtype, *2 * [torch.float32]))
        )
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if not has_half_matmul(hidden.device):
            weight = weight.float()
        for start in chunk_starts(len(hidden), rows):
            chunk, target = hidden[start : start + rows].to(weight.dtype), targets[start : start + rows]
            is_ignored = (target == IGNORE)[:, None]
            if share is None:
                log_probabilities = F.log_softmax(_logits(chunk, weight, bias), dim=-1)
                at_target = log_probabilities.new_full((1, 1), -1)
            else:
                log_probabilities = share.log_softmax(_logits(chunk, weight, bias))
                target, is_own = share.own(target)
                at_target, target = -is_own[:, None].float(), target.masked_fill(~is_own, IGNORE)
            loss += F.nll_loss(log_probabilities, target, ignore_index=IGNORE, reduction="sum")
            if not any(needs_grad):
                continue
            target = target[:, None]
            gradient = log_probabilities.exp_()  # of the logits: probabilities, less 1 at the target
            gradient.scatter_add_(1, target.clamp(min=0), at_target.expand(target.shape))
            if weight.dtype == torch.float32:
                gradient = gradient.to(hidden.dtype).float()
            else:
                gradient = _aligned(gradient, weight.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = (gradient @ weight).masked_fill_(is_ignored, 0)
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, chunk.masked_fill(is_ignored, 0))
            if grad_bias is not None:
                grad_bias += ((~is_ignored).to(gradient.dtype).T @ gradient)[0]
        if share is not None:
            loss = share.summed(loss)
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (
            None if gradient is None else gradient.float().mul_(scale).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes)
        )
        return *scaled, None, None, None, None


@functools.cache
def has_half_matmul(device: torch.device) -> bool:
    """Whether a device multiplies half-precision matrices with sums in fp32; asked of torch, but of a CPU, where this
    may be slow."""
    if device.type == "cpu":
        return False
    one = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except RuntimeError:  # NotImplementedError is a RuntimeError
        return False
    return True


@functools.cache
def adds_half_products(device: torch.device) -> bool:
    """Whether a device adds products of half-precision matrices to a matrix in fp32, in place (torch before
    pytorch/pytorch#167931 did not)."""
    total, half = torch.ones(8, 8, device=device), torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 9).all())


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total (M, N), fp32, += left (M, K) @ right (K, N)."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif adds_half_products(total.device):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _aligned(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix (N, V) in this precision, each of its rows at a multiple of 16 bytes also where V is odd: without
    that cuBLAS has slow kernels only. What lies between the rows is zero: a CPU's product was seen to read it."""
    rows, columns = matrix.shape
    wider = matrix.new_empty(rows, -(-columns // 8) * 8, dtype=dtype)
    wider[:, columns:] = 0
    return wider[:, :columns].copy_(matrix)


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In fp32, also where hidden states (N, H) and weight (V, H) are not."""
    if weight.dtype == torch.float32:
        return F.linear(hidden, weight, None if bias is None else bias.float())
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def loss_of_examples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of classified examples, summed: cross entropy of classes, squared error of numbers.

    Shapes: logits (B, classes) or (B, 1); labels (B,), int64 classes or float32 numbers, IGNORE or nan for padding.
    """
    logits = logits.float()
    if labels.dtype == torch.int64:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    present = ~labels.isnan()
    return F.mse_loss(logits[present, 0], labels[present], reduction="sum")


def logits_of_examples(model, batch) -> torch.Tensor:
    """(B, classes) of a batch of examples; of multiple choice (B, choices). A choice that an example does not have is
    a row of one token, and is never chosen."""
    logits = model(**batch.inputs).logits
    mask = batch.inputs["attention_mask"]
    return logits if mask.dim() == 2 else logits.masked_fill(mask.sum(-1) == 1, torch.finfo(logits.dtype).min)
