"""Tensor parallelism without launches: two processes share the layers of each family and find what one process finds;
pieces of shares are put together; what cannot be split is refused."""

import itertools
import os
import sys

import pytest
import torch
from helpers import TINY, check_refusal, forked, loss_and_gradients, refusal, small_sizes, tensor_group, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForTokenClassification

from zerofit.checkpoint.writer import ShardReader, write_shard
from zerofit.model import chunked_loss
from zerofit.model.parameters import count_parameters
from zerofit.model.tensor_parallel import check_split, cut_for, draw_share, join_shares, split_model
from zerofit.recipe import ClmRecipe
from zerofit.strategy.sequence import check_sequence_parallel
from zerofit.strategy.state import STATE_KINDS, Shard

RANKS = 2
LLAMA = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "max_position_embeddings": 64}  # fmt: skip
MODELS = {  # the vocabulary has 97 rows, which 2 does not divide
    "llama, tied": ("llama", {"intermediate_size": 96}),
    "llama, untied": ("llama", {**LLAMA, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {**LLAMA, "tie_word_embeddings": False, "sliding_window": 8}),
    "olmo2": ("olmo2", {**LLAMA, "pad_token_id": 0, "eos_token_id": 1}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 96}),
}
PADDING = 19  # a token of the batch whose embedding gets no gradient


def model_of(name: str):
    family, changes = MODELS[name]
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():  # no zeros and ones: gradients that vanish would show nothing
            parameter += 0.05 * torch.randn_like(parameter)
    if name == "llama, untied":
        model.get_input_embeddings().padding_idx = PADDING
    return model.train()


def batch_of() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (3, 21), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :9] = labels[2, 5:] = -100
    return {"input_ids": ids, "labels": labels}


def figures_of(model, join) -> dict:
    """The loss and gradients under each loss, the logits, and what the model writes; whole ones through `join`."""
    found = {}
    for kind in ("full", "chunked"):
        loss, gradients = loss_and_gradients(model, kind, batch_of())
        parameters = dict(model.named_parameters())
        found[kind] = loss, {name: join(gradient, parameters[name]) for name, gradient in gradients.items()}
    ids = batch_of()["input_ids"]
    with torch.no_grad():
        found["logits"] = model.eval()(input_ids=ids).logits
        found["written"] = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0)
    found["parameters"] = count_parameters(model), sum(parameter.numel() for parameter in model.parameters())
    return found


# Values that a model's code draws, or gives to a layer as it is made, in ways of their own.
DRAWN = {
    "apertus": AutoModelForCausalLM,
    "xlm-roberta": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
    "modernbert": AutoModelForTokenClassification,
    "olmo_hybrid": AutoModelForCausalLM,
}


def received(family: str) -> dict[str, torch.Tensor]:
    """The weights of a model that the first rank draws."""
    config = AutoConfig.for_model(family, **{**small_sizes(family), "vocab_size": 97})

    def make():
        torch.manual_seed(7)
        return DRAWN[family].from_config(config)

    return {name: each.detach() for name, each in draw_share(make, lambda model: None).named_parameters()}


def share(rank: int, folder: str) -> None:
    """What each process does."""
    tensor = tensor_group(rank, RANKS, folder)

    def join(gradient, parameter):
        cut = getattr(parameter, "cut", None)
        return gradient if cut is None else join_shares(gradient, cut, tensor)

    chunked_loss.CHUNK_BYTES, chunked_loss.MIN_CHUNK_ROWS = 4 * 97 * 16, 16
    found = {}
    for name in MODELS:
        model = model_of(name)
        split_model(model, tensor)
        found[name] = figures_of(model, join)
    found["received"] = {family: received(family) for family in DRAWN}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("tensor")
    forked(__file__, folder, processes=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_find_what_one_finds(ranks, name, monkeypatch):
    monkeypatch.setattr("zerofit.model.chunked_loss.CHUNK_BYTES", 4 * 97 * 16)
    monkeypatch.setattr("zerofit.model.chunked_loss.MIN_CHUNK_ROWS", 16)
    expected = figures_of(model_of(name), lambda gradient, parameter: gradient)
    for found in (rank[name] for rank in ranks):
        for kind in ("full", "chunked"):
            (loss, gradients), (right, whole) = found[kind], expected[kind]
            torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
            assert gradients.keys() == whole.keys()
            for parameter, gradient in gradients.items():
                largest = whole[parameter].abs().max().item()
                torch.testing.assert_close(gradient, whole[parameter], rtol=1e-4, atol=1e-5 * largest, msg=parameter)
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
        assert torch.equal(found["written"], expected["written"])
        (counted, held), ((parameters, _), total) = found["parameters"], expected["parameters"]
        assert counted == (parameters, parameters), "the whole model counts"
        assert total / 2 < held < 0.55 * total


@pytest.mark.parametrize("family", DRAWN)
def test_random_weights_of_any_code_are_those_of_one_process(ranks, family):
    expected = received(family)
    for rank in ranks:
        assert rank["received"][family].keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in rank["received"][family].items())


SHAPES = {"columns": (12, 5), "rows": (6, 8), "fused": (4, 24), "bias": (24,), "norm": (7,), "vocabulary": (13, 3)}


def shards_of(tensor: int, data: int, tensor_rank: int, data_rank: int, owned: bool) -> list[Shard]:
    """What a rank has: of each share an equal part a replica, as ZeRO-3 cuts it."""
    shards, dims = [], {"columns": (0, 1), "rows": (1, 1), "fused": (1, 3), "bias": (0, 3), "vocabulary": (0, 1)}
    for name, shape in SHAPES.items():
        divided = name in dims and tensor > 1
        cut = cut_for(shape, dims[name][0], tensor_rank, tensor, dims[name][1]) if divided else None
        size = torch.Size(shape).numel() if cut is None else cut.numel
        part = -(-size // data)
        start, stop = min(data_rank * part, size), min((data_rank + 1) * part, size)
        if start < stop and (cut is not None or tensor_rank == 0 or not owned):
            shards.append(Shard(name, shape, start, stop, cut))
    return shards


def values_of(kind: str, shard: Shard) -> torch.Tensor:
    whole = torch.arange(float(torch.Size(shard.shape).numel())).view(shard.shape) + 1000 * STATE_KINDS.index(kind)
    return (whole if shard.cut is None else shard.cut.of(whole)).flatten()[shard.start : shard.stop]


LAYOUTS = ((1, 1), (1, 3), (2, 2), (4, 3))  # tensor, data


@pytest.mark.parametrize(("written", "read"), itertools.product(LAYOUTS, LAYOUTS))
def test_what_one_layout_writes_any_other_reads(tmp_path, written, read):
    tensor, data = written
    for rank in range(tensor * data):
        shards = shards_of(tensor, data, rank % tensor, rank // tensor, owned=True)
        tensors = {f"{kind}/{shard.name}": values_of(kind, shard) for shard in shards for kind in STATE_KINDS}
        write_shard(tmp_path, rank, shards, {name: tensor.contiguous() for name, tensor in tensors.items()})
    reader = ShardReader(tmp_path)
    assert reader.shapes == SHAPES
    for name, shape in SHAPES.items():
        whole = Shard(name, shape, 0, torch.Size(shape).numel())
        assert torch.equal(reader.weight(name), values_of("weight", whole).view(shape))
    tensor, data = read
    for rank in range(tensor * data):
        for shard in shards_of(tensor, data, rank % tensor, rank // tensor, owned=False):
            for kind in STATE_KINDS:
                assert torch.equal(reader.read(kind, shard), values_of(kind, shard)), (rank, shard)


def test_a_share_that_is_missing_is_noticed(tmp_path):
    shards = shards_of(2, 1, 0, 0, owned=True)
    tensors = {f"{kind}/{each.name}": values_of(kind, each) for each in shards for kind in STATE_KINDS}
    write_shard(tmp_path, 0, shards, tensors)
    assert torch.equal(ShardReader(tmp_path).weight("norm"), torch.arange(7.0))
    with pytest.raises(RuntimeError, match="of weight of rows, 24 elements are missing"):
        ShardReader(tmp_path).weight("rows")


@pytest.mark.parametrize(
    ("family", "changes", "size", "said"),
    [
        ("llama", {}, 4, ["does not divide the model's num_key_value_heads = 2", "Possible: the divisors of 2"]),
        ("llama", {"num_key_value_heads": 1}, 2, ["num_key_value_heads = 1", "Use a strategy without it"]),
        ("gpt2", {"n_head": 4, "n_embd": 32}, 3, ["n_head = 4, n_inner = 128", "Possible: the divisors of 4"]),
        ("gpt_neox", {"intermediate_size": 63}, 2, ["intermediate_size = 63"]),
        ("opt", {}, 2, ["tensor parallelism does not support opt", "zero3"]),
        ("qwen3", {}, 2, ["does not support qwen3"]),
    ],
)
def test_models_that_cannot_be_split(family, changes, size, said):
    config = AutoConfig.for_model(family, **{**TINY.get(family, {}), **changes})
    message = refusal(check_split, config, size, "my.json")
    assert message.startswith(f"error: my.json: tensor_parallel.autotp_size = {size}")
    for words in said:
        assert words in message


if __name__ == "__main__":
    share(int(os.environ["RANK"]), sys.argv[1])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 64,
}


def config(model_type: str = "llama", heads: int = 8, kv_heads: int = 2, **changes):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 96}
    return AutoConfig.for_model(model_type, **sizes, **changes)


@pytest.mark.parametrize(
    ("model", "degree"),
    [(config(), 2), (config(), 4), (config(), 8), (config(kv_heads=1), 2), (config("qwen2", 6, 3), 3),
     (config("mistral", sliding_window=None), 2), (AutoConfig.for_model("gpt2"), 12)],
)  # fmt: skip
def test_heads_that_the_ranks_can_share(model, degree):
    check_sequence_parallel(model, degree, "mine.json", ClmRecipe(), "fp32")


def test_more_ranks_pass_keys_and_values_on():
    plain = ClmRecipe(packing="concatenate")
    for model in (config(), config(heads=6, kv_heads=2), AutoConfig.for_model("gpt2", attn_pdrop=0.0)):
        check_sequence_parallel(model, 5, "mine.json", plain, "bf16")
    words = ["sequence_parallel_size = 5", "ring attention", "packing", "attn_pdrop=0", "Use 2 or 3 or 4 or 6 or 12"]
    check_refusal(words, check_sequence_parallel, AutoConfig.for_model("gpt2"), 5, "mine.json", ClmRecipe(), "bf16")


@pytest.mark.parametrize(
    ("model", "degree", "words"),
    [
        (config(), 3, ["sequence_parallel_size = 3", "packing", "Use 2 or 4 or 8"]),
        (config(heads=6, kv_heads=2), 3, ["reset_attention_mask", "Use 2 or 6"]),
        (config("mistral", sliding_window=64), 2, ["do not attend to the full row"]),
        (config(rope_parameters=LONGROPE), 2, ["scales positions by the length of a row"]),
        (config("gemma3_text"), 2, ["not supported for a gemma3_text", "such as zero3"]),
    ],
)
def test_the_others_are_refused_with_the_remedy(model, degree, words):
    words = ["mine.json: sequence_parallel_size = ", *words]
    check_refusal(words, check_sequence_parallel, model, degree, "mine.json", ClmRecipe(), "fp32")
