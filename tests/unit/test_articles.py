"""The launch scripts that articles print, run by bash with the documented line at their top.

The scripts are shortened; names and values of flags are those that were published.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from helpers import ROOT

GPT_22B = """
torchrun --nproc_per_node 8 --nnodes ${WORLD_SIZE} --node_rank ${RANK} --master_addr ${MASTER_ADDR} \\
  --master_port ${MASTER_PORT} pretrain_gpt.py --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 \\
  --sequence-parallel --recompute-activations --num-layers 48 --hidden-size 6144 --num-attention-heads 64 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 512 --train-iters 100 \\
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1 --eval-iters 40 --eval-interval 1000 \\
  --data-path /mnt/data/my-gpt2_text_document --vocab-file /mnt/data/gpt2-vocab.json \\
  --merge-file /mnt/data/gpt2-merges.txt --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 \\
  --adam-beta2 0.95 --init-method-std 0.006 --bf16 --use-flash-attn --use-distributed-optimizer \\
  --distributed-backend nccl --tensorboard-dir /mnt/data/tb --save /mnt/data/out --load /mnt/data/out \\
  --save-interval 1000
"""
CORPORA = """
python tools/preprocess_data.py --input my-corpus.json --output-prefix my-gpt2 --vocab-file gpt2-vocab.json \\
  --dataset-impl mmap --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod --workers 20 \\
  --chunk-size 25
"""


def run(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a script as docs/megatron.md says."""
    lines = re.search(r"^torchrun\(\) .*\n^python\(\) .*$", (ROOT / "docs/megatron.md").read_text(), re.MULTILINE)[0]
    (folder / "run.sh").write_text(lines + "\n" + script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "COLUMNS": "160", **variables}
    return subprocess.run(["bash", "run.sh"], cwd=folder, env=env, capture_output=True, text=True)


def test_the_training_script_of_an_article(tmp_path):
    job = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "alpha", "MASTER_PORT": "6000"}
    done = run(GPT_22B, tmp_path, **job)
    assert done.returncode == 0, done.stderr
    assert re.search(r"[23]\d carried over, \d satisfied, \d no counterpart\n", done.stdout), "and none is unknown"
    assert "model        22,074,273,792 parameters" in done.stdout
    assert "3d on 16 processes" in done.stdout
    assert "--machine_rank 1" in done.stdout.splitlines()[-1]
    written = yaml.safe_load((tmp_path / "outputs/megatron-converted/accelerate.yaml").read_text())
    assert (written["num_machines"], written["main_process_ip"]) == (2, "alpha")


def test_the_script_of_an_article_that_prepares_data(tmp_path):
    done = run(CORPORA, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2] == (
        "zerofit prepare --input my-corpus.json --output_prefix my-gpt2 --vocab_file gpt2-vocab.json "
        "--merge_file gpt2-merges.txt --append_eod --workers 20"
    )
