"""The simulated device for tests: built once, and real launches of the product on it."""

import json
import sys
from pathlib import Path

import pytest
from folders import colours
from helpers import ROOT, write_records

from device.runs import Runs
from zerofit.tools.simulate import build as simgpu_build

sys.path.insert(0, str(ROOT / "benchmarks"))
import counts

STDLIB = Path(json.__file__).parent / "*.py"  # text that every machine has


@pytest.fixture(scope="session")
def device():
    """device(bytes, ...) -> what makes the environment of a launch one with simulated devices of these sizes."""
    if simgpu_build.missing():
        pytest.skip(f"the simulated device cannot be built: {simgpu_build.missing()}")
    library = simgpu_build.build_device()

    def environment(*sizes: int) -> dict[str, str]:
        return {**simgpu_build.environment(library), "SIMGPU_MEMORY": ",".join(map(str, sizes))}

    return environment


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    return write_records(tmp_path_factory.mktemp("rows") / "rows.jsonl", colours())


@pytest.fixture(scope="session")
def recipes(rows, cache) -> dict[str, list]:
    """Options of a short run of each task, from scratch and without dropout, whose noise depends on the layout.

    Weights of the tasks that predict are drawn larger than usual, so that not all predictions are the same."""
    common = ["--global_batch_size", "8", "--learning_rate", "1e-3", "--cache_dir", cache]
    no_dropout = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    pairs = [*common, "--train_file", rows, "--train_tokenizer_vocab_size", "270", "--max_eval_samples", "10",
             "--per_device_eval_batch_size", "3"]  # fmt: skip
    return {
        "clm": [
            *common, "--config_name", "gpt2", "--train_tokenizer_vocab_size", "400", "--block_size", "64",
            "--config_overrides", f"n_layer=2,n_head=2,n_embd=64,n_positions=64,{no_dropout}", "--train_file", STDLIB,
        ],
        "cls": [
            *pairs, "--model_type", "bert", "--config_overrides", "num_hidden_layers=2,hidden_size=64,"
            "num_attention_heads=2,intermediate_size=128,hidden_dropout_prob=0,attention_probs_dropout_prob=0,initializer_range=0.2",
        ],
        "seq2seq": [  # of larger weights (0.3) the CPU's own runs differ by 4e-6; smaller ones (0.2) answer nothing
            *pairs, "--config_name", "blenderbot-400M-distill", "--config_overrides", "d_model=64,encoder_layers=1,"
            "decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,encoder_ffn_dim=128,"
            "decoder_ffn_dim=128,dropout=0,init_std=0.25", "--val_max_target_length", "4", "--num_beams", "2",
        ],
    }  # fmt: skip


@pytest.fixture(scope="session")
def server(device):
    """What ranks on simulated devices are forked from."""
    return counts.rank_server()


@pytest.fixture(scope="session")
def runs(recipes, server, device, tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("device"), recipes, server, device)
