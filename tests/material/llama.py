"""A small Llama that has learnt something, as transformers keeps it and as Meta does."""

import json
import shutil
from pathlib import Path

from .texts import documents, training
from .vocabularies import write_sentencepiece

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
         "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
STEPS, ROWS, LENGTH, PEAK = 300, 4, 128, 5e-3


def write_llama(folder: Path) -> None:
    """models/llama/{hf,meta}: one model, and its tokenizer.model in both."""
    hf, meta = folder / "models" / "llama" / "hf", folder / "models" / "llama" / "meta"
    write_sentencepiece(hf, documents(), SIZES["vocab_size"])
    model = _trained(hf / "tokenizer.model")
    model.save_pretrained(hf)
    meta.mkdir()
    shutil.copy(hf / "tokenizer.model", meta)
    write_meta(meta, model)


def _trained(vocabulary: Path):
    """Some seconds of AdamW on the documents: from 6.2 (ln 512) to about 3.8 nats a token.

    In fp32 on one thread, so that sums are rounded alike every time.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.08))  # learns faster than 0.02
        model.config.initializer_range = 0.02  # what any other Llama's configuration says
        ids = _ids(vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=STEPS, pct_start=0.1)
        for _ in range(STEPS):
            starts = torch.randint(len(ids) - LENGTH, (ROWS, 1))
            batch = ids[starts + torch.arange(LENGTH)]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    torch.set_num_threads(threads)
    return model.eval()


def _ids(vocabulary: Path):
    """Training documents one after the other, <s> before each and </s> behind it."""
    import sentencepiece
    import torch

    reader = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    rows = reader.encode(training(), add_bos=True, add_eos=True)
    return torch.tensor([number for row in rows for number in row])


NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_meta(folder: Path, model, shards: int = 1) -> None:
    """consolidated.NN.pth and params.json: written here by hand, so that they can judge `zerofit convert`.

    Shards are cut as Meta cuts them: where there are fewer heads of keys and values than shards, several share one.
    """
    import torch

    config, rope = model.config, model.config.rope_parameters
    of_llama_3 = rope["rope_theta"] == 500_000.0  # embeddings are cut along the vocabulary
    tensors = {
        "tok_embeddings.weight": model.model.embed_tokens.weight,
        "norm.weight": model.model.norm.weight,
        "output.weight": model.lm_head.weight,
    }
    for number, layer in enumerate(model.model.layers):
        for ours, metas in NAMES.items():
            weight = layer.get_submodule(ours).weight
            if metas in ("attention.wq", "attention.wk"):
                weight = _interleaved(weight, config.head_dim)
            tensors[f"layers.{number}.{metas}.weight"] = weight

    def shard(name: str, tensor, index: int):
        if tensor.dim() == 1:
            return tensor
        parts = min(shards, config.num_key_value_heads) if name.endswith(("wk.weight", "wv.weight")) else shards
        across = name.endswith(("wo.weight", "w2.weight")) or (name.startswith("tok") and not of_llama_3)
        return tensor.chunk(parts, int(across))[index * parts // shards]

    for index in range(shards):
        shares = {name: shard(name, tensor, index).detach().clone() for name, tensor in tensors.items()}
        torch.save(shares, folder / f"consolidated.{index:02}.pth")
    params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
              "n_kv_heads": config.num_key_value_heads, "vocab_size": config.vocab_size, "multiple_of": 4,
              "norm_eps": config.rms_norm_eps, "max_seq_len": config.max_position_embeddings}  # fmt: skip
    if of_llama_3:
        params |= {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] == "llama3":
        params |= {"use_scaled_rope": True, "rope_scaling_factor": rope["factor"]}
    (folder / "params.json").write_text(json.dumps(params))


def _interleaved(weight, head_dim: int):
    """Meta turns neighbours 2i and 2i+1 of a head, transformers i and i + head_dim/2."""
    heads = weight.view(-1, 2, head_dim // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)
