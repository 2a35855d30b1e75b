#!/usr/bin/env bash
# long.sh MAKE_MODEL EQUAL_TO_STOCK TOKENIZER_MODEL
#
# Guards against parity that holds for short answers only: an order of summation that flips near ties, or a list of
# resident experts that outlives its slots. 512 greedy tokens of three small models, the logits of every token bit for
# bit as stock's, at the smallest budget, half of the experts and all of them, with 1 and 2 threads.
set -euo pipefail
make_model=$1; equal_to_stock=$2; tokenizer=$3
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
failed=0; passed=0

check() { # NAME MAKE_MODEL-OPTIONS...
  local name=$1; shift
  "$make_model" --tokenizer "$tokenizer" --seed 23 --layers 2 --width 128 --experts 16 --experts-used 3 \
    --out "$folder/model.gguf" "$@" >/dev/null
  if "$equal_to_stock" "$folder/model.gguf" --lengths 9 --ubatch 512 --threads 1,2 --budgets min,50%,100% --decode 512 \
      >"$folder/log" 2>&1; then
    passed=$((passed + 1)); printf 'equal    %-20s %s\n' "$name" "$(tail -1 "$folder/log" | sed 's/.*: //')"
  else
    failed=$((failed + 1)); printf 'DIFFERS  %s\n' "$name"; tail -5 "$folder/log"
  fi
}

check qwen3next-q4_0  --arch qwen3next --ff 64 --type q4_0
check deepseek2-q8_0  --arch deepseek2 --ff 64 --type q8_0 --dense-layers 1 --shared-experts 1
check gpt-oss-mxfp4   --arch gpt-oss --ff 128 --type mxfp4
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" = 0 ] && [ "$passed" = 3 ]
