"""Sequence parallelism: the ranks of a replica split each row among them.

Each rank runs the model on its part of every row. Attention needs full rows: an all-to-all gives each rank the full
rows of some heads, and a second one gives the parts back (Ulysses, Jacobs et al. 2023, arXiv:2309.14509). Where there
are more ranks than can share the heads, the ranks pass keys and values on (RingAttention). The caller sees no
difference: the model takes full rows, and returns the loss, or the logits, of all their tokens.

Only the exchange of heads is DeepSpeed's. The attention that DeepSpeed registers with transformers discards every
mask, so that packed documents see each other; it supports only one micro-batch; and in evaluation mode a rank attends
to its own part only (runtime/sequence_parallel/ulysses_sp.py, 0.19).
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from zerofit.compat.torch import Ring
from zerofit.compat.transformers import attention_of, with_attention
from zerofit.data.collate import document_mask
from zerofit.model.attention import as_additive, has_attention_dropout
from zerofit.model.families import family_of
from zerofit.model.loss import IGNORE
from zerofit.model.tensor_parallel import reduce_from_tensor_parallel
from zerofit.recipe.errors import UserError
from zerofit.strategy.layout import ParallelLayout, sequence_groups

GPU_OUTPUTS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")  # passed to backward
SPLIT_PREFIX = "zerofit_split"  # prefix of the names of attention over split rows in transformers' registry
PAD_VALUES = {"input_ids": 0, "next_tokens": IGNORE, "position_ids": 0}
ROPE_BY_LENGTH = ("dynamic", "longrope")  # RoPE scalings that depend on a row's length; a part is shorter


def shares_heads(config: Any, degree: int) -> bool:
    """Return whether `degree` ranks can share a model's attention heads. If not, ring attention is used."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def check_sequence_parallel(config: Any, degree: int, source: str, recipe: Any, precision: str) -> None:
    """Check that `degree` ranks can split the rows of such a model. Raises UserError with all reasons why not."""
    config = config.get_text_config()
    setting = f"{source}: sequence_parallel_size = {degree}"
    use_zero3 = "Use a strategy without it, such as zero3"
    problems = []
    if not family_of(config).splits_rows:
        problems.append(f"{setting} is not supported for a {config.model_type}. {use_zero3}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or getattr(config, "sliding_window", None):
        problems.append(f"{setting}: layers of this {config.model_type} do not attend to the full row. {use_zero3}")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ROPE_BY_LENGTH:
        problems.append(f"{setting}: this {config.model_type} scales positions by the length of a row. {use_zero3}")
    if not problems and not shares_heads(config, degree):
        degrees = [n for n in range(2, config.num_attention_heads + 1) if shares_heads(config, n)]
        remedy = f"Use {' or '.join(map(str, degrees))}" if degrees else use_zero3
        reasons = {
            "supports no document mask (packing, reset_attention_mask, reset_position_ids)": recipe.is_masked,
            "has no dropout (remove it: --config_overrides attn_pdrop=0, or attention_dropout=0)": (
                recipe.trains and has_attention_dropout(config)
            ),
            f"is not in torch {torch.__version__}": importlib.util.find_spec(Ring.MODULE.rpartition(".")[0]) is None,
            "has no kernel in fp32 on a GPU": precision == "fp32" and torch.cuda.is_available(),
        }
        problems += [
            f"{setting}: the ranks cannot share {config.num_attention_heads} attention heads, and ring attention "
            f"{reason}. {remedy}"
            for reason, applies in reasons.items()
            if applies
        ]
    if problems:
        raise UserError(problems)


class SplitRows:
    """Lets the ranks of a replica split the rows of a model.

    Install the loss (model/loss.py) before. From then on `model` is called with full rows, the same on all ranks of a
    replica. Each of its modules has this object as its attribute `split_rows`.

    Attributes:
        kernel: the name of the attention over full rows in transformers' AttentionInterface.
    """

    def __init__(self, model: Any, layout: ParallelLayout) -> None:
        self.model = model
        self.size = layout.sequence
        self.rank = layout.sequence_rank
        self.active = True
        self.group = sequence_groups(layout).get_sequence_parallel_group()
        self.in_a_ring = not shares_heads(model.config.get_text_config(), self.size)
        self._exchanges: dict[int, Callable[..., Any]] = {}  # number of rows -> DeepSpeed's exchange
        self._forward_in_full = model.forward
        model.forward = self._forward
        for module in model.modules():
            module.split_rows = self
        self.attend_with(attention_of(model.config) or "sdpa")

    def attend_with(self, kernel: str) -> None:
        """Attend to full rows with this kernel, e.g. instead of a flash kernel that mixes packed documents."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self.kernel = kernel
        self._attention = AttentionInterface()[kernel]
        # A name with "flash" or "/" would make transformers load a flash kernel, or one of the hub.
        name = f"{SPLIT_PREFIX}_{kernel.replace('flash', 'f').replace('/', '_')}"
        AttentionInterface.register(name, _attend_split)
        if kernel in AttentionMaskInterface():
            AttentionMaskInterface.register(name, AttentionMaskInterface()[kernel])
        self.model.set_attn_implementation(name)

    def close(self) -> None:
        """Undo the split: each rank computes full rows again."""
        self.model.forward = self._forward_in_full
        for module in self.model.modules():
            del module.split_rows
        self.model.set_attn_implementation(self.kernel)

    @contextlib.contextmanager
    def in_full(self) -> Iterator[None]:
        """Within this context each rank computes full rows."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        if not self.active:
            return self._forward_in_full(*args, **inputs)
        width = inputs["input_ids"].shape[1]
        output = self._forward_in_full(**self._take_part(inputs))
        if torch.is_tensor(output):  # the loss
            return reduce_from_tensor_parallel(output, self.group)
        output.logits = self._gather_rows(output.logits)[:, :width]
        return output

    def _take_part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the rows, padded to a length that the ranks divide, and the mask of full rows."""
        rows, width = inputs["input_ids"].shape
        num_pieces = 2 * self.size if self.in_a_ring else self.size
        fill = -width % num_pieces
        mask = inputs.get("attention_mask")
        inputs = dict(inputs)
        packed = mask is None and "position_ids" in inputs and "cu_seq_lens_q" not in inputs
        if "labels" in inputs:  # shifted before the split: the next token may be in the next rank's part
            inputs["next_tokens"] = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=IGNORE)
        if "position_ids" not in inputs:
            inputs["position_ids"] = torch.arange(width, device=inputs["input_ids"].device).expand(rows, -1)
        positions = F.pad(inputs["position_ids"], (0, fill))  # each padding token is its own document
        for name in PAD_VALUES.keys() & inputs.keys():
            row = F.pad(inputs[name], (0, fill), value=PAD_VALUES[name])
            chunks = row.chunk(num_pieces, dim=1)
            local = [chunks[self.rank], chunks[-1 - self.rank]] if self.in_a_ring else [chunks[self.rank]]
            inputs[name] = torch.cat(local, dim=1)
        if fill and "cu_seq_lens_q" in inputs:  # the padding is one more document
            ends = torch.cat([inputs["cu_seq_lens_q"], inputs["cu_seq_lens_q"].new_tensor([width + fill])])
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), max(inputs["max_length_q"], fill))
        inputs["attention_mask"] = self._mask(mask, positions, packed, fill)
        return inputs

    def _mask(self, mask: Any, positions: torch.Tensor, packed: bool, fill: int) -> torch.Tensor | None:
        """Return the mask (B, 1, T, T) of full rows; None where each position sees all before it. Padding needs no
        mask: it is on the right of a row, and the loss ignores the positions that see it."""
        if packed:
            visible = document_mask((positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1))
        elif mask is not None and mask.dim() == 4:
            visible = F.pad(mask, (0, fill, 0, fill), value=True).tril()
        else:
            return None
        return as_additive(visible, self.model.dtype)

    def _gather_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts (B, T / ranks, ...) of all ranks as (B, T, ...), without a gradient."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part.detach().contiguous(), group=self.group)
        if self.in_a_ring:  # a part has one piece from the row's beginning and one from its end
            first, last = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            parts = [*first, *reversed(last)]
        return torch.cat(parts, dim=1)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attend to full rows, with the signature of transformers' AttentionInterface.

        Shapes: query, key and value (B, heads, T / ranks, D) -> ((B, T / ranks, H, D), None).
        """
        if not self.active:
            return self._in_full(module, query, key, value, attention_mask, *args, **kwargs)
        if self.in_a_ring:
            output = RingAttention.apply(query, key, value, self.group, kwargs.get("scaling"))
            return output.transpose(1, 2).contiguous(), None
        rows, heads, width, _ = query.shape
        if kwargs.get("position_ids") is None:  # GPT-2 does not pass position_ids on
            first = self.rank * width
            kwargs["position_ids"] = torch.arange(first, first + width, device=query.device).repeat(rows, 1)
        if attention_mask is not None and attention_mask.shape[-1] != width * self.size:
            attention_mask = None  # transformers made it from the positions of this part, not of full rows
        groups = getattr(module, "num_key_value_groups", None)
        output, weights = self._exchange(query, key)(module, query, key, value, attention_mask, *args, **kwargs)
        if groups is not None:  # the exchange changes it where ranks share a key/value head
            module.num_key_value_groups = groups
        return output.view(rows, width, heads, -1), weights

    def _in_full(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._attention(with_attention(module, self.kernel), *args, **kwargs)

    def _exchange(self, query: torch.Tensor, key: torch.Tensor) -> Callable[..., Any]:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        num_rows = query.shape[0]
        if num_rows not in self._exchanges:
            self._exchanges[num_rows] = UlyssesSPAttentionHF(
                self._in_full,
                batch_size=num_rows,
                attn_head_count=query.shape[1],
                attn_head_size=query.shape[3],
                kv_head_count=key.shape[1],
                num_hidden_layers=0,
                process_group=self.group,
                seq_length_is_variable=True,
            )
        return self._exchanges[num_rows]


def _attend_split(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.split_rows.attend(module, *args, **kwargs)


class RingAttention(torch.autograd.Function):
    """Causal attention to full rows, without dropout. Each rank has a part of the rows and all heads, and the ranks
    pass keys and values on to each other (Liu et al. 2023, arXiv:2310.01889).

    The ring and the merging of its parts are torch's (zerofit.compat.torch.Ring). With a causal mask the first ranks
    would wait for the last. So torch's ring expects two pieces of a row on each rank, one from the row's beginning and
    one from its end.

    Shapes: query (B, H, T / ranks, D), key and value (B, key/value heads, T / ranks, D) -> (B, H, T / ranks, D).
    """

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, scale: float | None
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        kernel = Ring.kernels(query.device)[0]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
            return kernel(query, *(tensor.repeat_interleave(groups, dim=1) for tensor in (key, value)), **options)

        output, log_sums, *remaining = Ring().forward(group, attend, query, key, value, scale=scale)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.groups = groups
        ctx.group = group
        ctx.scale = scale
        ctx.gpu_outputs = dict(zip(GPU_OUTPUTS, remaining, strict=False))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once only: a recomputed layer unpacks its tensors once
        kernel = Ring.kernels(gradient.device)[1]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
            key, value = (tensor.repeat_interleave(ctx.groups, dim=1) for tensor in (key, value))
            of_query, *of_repeated = kernel(query=query, key=key, value=value, dropout_p=0.0, **options)
            return of_query, *(gradient.unflatten(1, (-1, ctx.groups)).sum(2) for gradient in of_repeated)

        of_query, of_key, of_value = Ring().backward(
            ctx.group, attend, gradient.contiguous(), *saved, scale=ctx.scale, **ctx.gpu_outputs
        )
        return of_query, of_key, of_value, None, None
