#!/usr/bin/env bash
# What only a GPU can show. No network: models have their real shapes and random weights. Results go to OUT.
#   bash benchmarks/on_gpu.sh OUT                  # quick: on_gpu.py and the page's tables, within 25 minutes
#   DATA=data bash benchmarks/on_gpu.sh OUT all    # tests/gpu and the three published comparisons as well: hours. Two
#                                                  # ranks of 23 GiB each (one GPU of 48 GiB or more is shared); DATA
#                                                  # has the data and tokenizers of docs/real-data.md
set -u
OUT=${1:?where the results are to go}
PARTS=${2:-quick}
mkdir -p "$OUT"
python benchmarks/on_gpu.py "$OUT"
python benchmarks/on_gpu.py "$OUT" --predict
[ "$PARTS" = all ] || exit

DATA=${DATA:?the folder of published data and tokenizers: see docs/real-data.md}
timeout 3600 python -m pytest tests/gpu -q > "$OUT/tests.txt" 2>&1
tail -n 3 "$OUT/tests.txt"

compare() {  # name, then options of zerofit compare
  local name=$1
  shift
  timeout 7200 python -m zerofit.cli compare "$@" --num_processes 2 --memory_limit 23GiB --steps 3 \
    --output "$OUT/$name" > "$OUT/$name.txt" 2>&1
  tail -n 12 "$OUT/$name.txt"
  rm -rf "$OUT/$name/trials"
}

compare deberta-xl-mrpc --config recipes/cls/deberta-xl-mrpc.yaml --strategies ddp,zero2 \
  --model_name_or_path null --ignore_mismatched_sizes false --config_name deberta-v2-xlarge \
  --train_tokenizer_vocab_size 8000 --train_file "$DATA/glue/MRPC/train.tsv"
compare blenderbot-400m --config recipes/seq2seq/blenderbot-400m-dialogue.yaml --strategies ddp,zero2 --granularity 4 \
  --model_name_or_path null --config_name blenderbot-400M-distill \
  --tokenizer_name "$DATA/tokenizers/blenderbot-400M-distill" --dataset_name null \
  --train_file "$DATA/dialogue/valid_freq.json"
compare gpt2-xl --config recipes/clm/gpt2-xl-wikitext2.yaml --strategies ddp,zero2,zero3_offload \
  --tokenizer_name "$DATA/tokenizers/gpt2" --dataset_name null --dataset_config_name null \
  --train_file "$DATA/wikitext-2/train.txt"
