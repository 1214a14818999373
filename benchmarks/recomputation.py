"""The time of forward and backward passes with each way of recomputing activations, against that of none.

    python benchmarks/recomputation.py                # a Llama with 8 layers of 256, fp32, 8 rows of 64 tokens
    python benchmarks/recomputation.py --width 16 --rows 1 --tokens 8     # the time of the host, whatever it computes

One process with one thread, no optimizer. Times are the processor's, so they do not count what other programs take.
The ways take turns; each time is divided by that of `none` in the same round, and the table has the median of these
ratios and their quartiles, the median time of a layer beyond that of `none`, and what the FLOPs of the passes say.
`dispatch modes` is `selective` through torch's own contexts, as `zerofit plan` and torch.compile trace it.
"""

import argparse
import copy
import statistics
import time

import torch
from provenance import provenance
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from zerofit.model.recomputation import enable_recomputation
from zerofit.record.terminal import table

WAYS = {"none": False, "full": True, "selective": "selective", "dispatch modes": "selective", "2": 2}
NOT_COUNTED = 2  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256, help="of hidden states; a multiple of 8")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    inputs = torch.randint(0, 4096, (options.rows, options.tokens), generator=torch.Generator().manual_seed(0))
    flops = {}
    for way, model in make_models(options.layers, options.width, is_traced=True).items():
        with FlopCounterMode(display=False) as counted:
            step(model, inputs)
        flops[way] = counted.get_total_flops()
    models = make_models(options.layers, options.width)
    rounds = [
        {way: seconds(model, inputs) for way, model in models.items()} for _ in range(NOT_COUNTED + options.rounds)
    ][NOT_COUNTED:]
    rows = [["gradient_checkpointing", "time, of none", "quartiles", "ms a layer", "FLOPs, of none"]]
    for way in models:
        ratios = [times[way] / times["none"] for times in rounds]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        beyond = statistics.median(times[way] - times["none"] for times in rounds) * 1e3 / options.layers
        rows.append(
            [
                way,
                f"{statistics.median(ratios):.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{beyond:.2f}",
                f"{flops[way] / flops['none']:.2f}",
            ]
        )
    print(table(rows), "", provenance("one process", "torch", "transformers"), sep="\n")


def make_models(layers: int, width: int, is_traced: bool = False) -> dict[str, torch.nn.Module]:
    """{way: a model}, all with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=4096,
        use_cache=False,
    )
    first = AutoModelForCausalLM.from_config(config).train()
    models = {way: copy.deepcopy(first) for way in WAYS}
    for way, which in WAYS.items():
        if which:
            enable_recomputation(models[way], which, is_traced or way == "dispatch modes")
    return models


def step(model: torch.nn.Module, inputs: torch.Tensor) -> None:
    model(input_ids=inputs, labels=inputs).loss.backward()
    model.zero_grad()


def seconds(model: torch.nn.Module, inputs: torch.Tensor) -> float:
    start = time.process_time()
    step(model, inputs)
    return time.process_time() - start


if __name__ == "__main__":
    main()
