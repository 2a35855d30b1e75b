#!/usr/bin/env bash
# synthetic.sh MAKE_MODEL EQUAL_TO_STOCK TOKENIZER_MODEL
#
# Made-up models of the architectures and layouts that differ in how experts are stored or chosen, each compared with
# stock llama.cpp bit for bit at the smallest budget, half of the experts, and all of them; and, at the smallest, by
# ggml's separate operations.
set -euo pipefail
make_model=$1; equal_to_stock=$2; tokenizer=$3
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
failed=0; passed=0

check() { # NAME MAKE_MODEL-OPTIONS...
  local name=$1 file=$folder/$1.gguf; shift
  "$make_model" --tokenizer "$tokenizer" --seed 11 --layers 4 --width 256 --experts 32 --experts-used 4 --out "$file" "$@" >/dev/null
  [ -e "$file" ] || file=$(ls "$folder/$name"-00001-of-*.gguf)
  if "$equal_to_stock" "$file" --lengths 1,2,8,33,512,700 --budgets min,50%,100% --decode 2 --verify >"$folder/log" 2>&1 &&
    "$equal_to_stock" "$file" --lengths 1,33 --budgets min --decode 2 --fused off >>"$folder/log" 2>&1; then
    passed=$((passed + 1)); printf 'equal    %-28s %s\n' "$name" "$(tail -1 "$folder/log" | sed 's/.*: //') (the last of them generic)"
  else
    failed=$((failed + 1)); printf 'DIFFERS  %s\n' "$name"; tail -5 "$folder/log"
  fi
  rm -f "$folder/$name"*.gguf
}

check qwen3moe-q4_K        --arch qwen3moe --ff 256 --type q4_K --down-type q6_K
check qwen3moe-mixed       --arch qwen3moe --ff 256 --mixed q4_K,q5_K,q6_K,iq4_xs
check qwen3moe-q8_0-split  --arch qwen3moe --ff 96  --type q8_0 --split 3
check qwen3next-q4_0       --arch qwen3next --ff 64 --type q4_0
check qwen3next-fused      --arch qwen3next --ff 256 --type iq4_nl --fused-gate-up
check deepseek2-groups     --arch deepseek2 --ff 256 --type q5_K --dense-layers 1 --shared-experts 1 --groups 4 --groups-used 2
check gpt-oss-mxfp4        --arch gpt-oss --ff 256 --type mxfp4
check mixtral-f16          --arch llama --ff 128 --type f16
check mixtral-bf16         --arch llama --ff 128 --type bf16 --scales
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" = 0 ] && [ "$passed" = 9 ]
