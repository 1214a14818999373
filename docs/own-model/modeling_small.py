"""A small decoder of one's own, with all that training under every strategy asks of a model (own-model.md)."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class SmallConfig(PreTrainedConfig):
    model_type = "small"

    def __init__(
        self, vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
        **kwargs,
    ):  # fmt: skip
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class Layer(GradientCheckpointingLayer):  # --gradient_checkpointing recomputes such a layer in the backward pass
    def __init__(self, config, number: int):
        super().__init__()
        self.number, self.heads, width = number, config.num_attention_heads, config.hidden_size
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask, past_key_values=None):
        """x (B, T, width), mask (B, 1, T, all keys) or None: causal."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        causal = mask is None and query.shape[2] > 1
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class SmallPreTrainedModel(PreTrainedModel):
    config_class = SmallConfig
    base_model_prefix = "model"  # the body's attribute: the loss calls the body, then the head in chunks
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Layer"]


class SmallModel(SmallPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                **kwargs):  # fmt: skip
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            before = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(before, before + input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        mask = create_causal_mask(  # positions that restart begin another document: neither sees the other
            config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
            position_ids=position_ids,
        )  # fmt: skip
        for layer in self.layers:
            x = layer(x, mask, past_key_values=past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class SmallForCausalLM(SmallPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = SmallModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, labels=None, **kwargs):
        answer = self.model(input_ids, **kwargs)
        logits = self.lm_head(answer.last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=answer.past_key_values)
