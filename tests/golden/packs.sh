#!/usr/bin/env bash
# Packs of the bundled model and of made-up ones: raw equals stock llama.cpp with plain weights bit for bit, native equals
# its default, in which weights are repacked.
#
#   packs.sh SLUICE MAKE_MODEL EQUAL_TO_STOCK MODEL
set -euo pipefail
sluice=$1 make_model=$2 equal=$3 bundled=$4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

check() { # MODEL LENGTHS
  "$sluice" pack "$1" "$folder/raw"
  "$equal" "$1" --pack "$folder/raw" --lengths "$2" --budgets min,25%,100%
  "$sluice" pack "$1" "$folder/native" --layout native
  "$equal" "$1" --pack "$folder/native" --repack --lengths "$2" --budgets min,25%,100%
  rm -r "$folder/raw" "$folder/native"
}

check "$bundled" 1,8,33,512
# Types with and without a native layout in one model; fused; biases.
for flags in "--mixed q4_K,q8_0,q5_1,iq4_nl --layers 4 --width 512 --ff 256" \
             "--arch qwen3next --fused-gate-up --type q4_0" \
             "--arch gpt-oss --type mxfp4" \
             "--arch deepseek2 --type q4_K --down-type q6_K --width 512 --ff 256"; do
  # shellcheck disable=SC2086
  "$make_model" --tokenizer "$bundled" --experts 12 --experts-used 3 $flags --out "$folder/model.gguf"
  check "$folder/model.gguf" 1,8,40
done
