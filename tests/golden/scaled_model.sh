#!/usr/bin/env bash
# scaled_model.sh SCALE_MODEL MAKE_MODEL SCALED_MODEL MODEL REFERENCE_JSON
#
# What scale_model makes computes what its source computes: bit for bit for made-up models whose width is a multiple of
# every kernel's step, and within a bound for the trained one, whose width of 352 is not one of 64: there, padding moves
# the last half step of the router's dot products from one loop of the kernel to another.
set -euo pipefail
scale_model=$1; make_model=$2; scaled_model=$3; model=$4; reference=$5
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
failed=0

check() { # NAME SOURCE LOGIT_DIFFERENCE_MAX CHOICES_PERCENT_MAX SCALE_MODEL-OPTIONS...
  local name=$1 source=$2 bounds=("$3" "$4"); shift 4
  "$scale_model" --model "$source" --out "$folder/scaled.gguf" "$@" >/dev/null
  if "$scaled_model" "$source" "$folder/scaled.gguf" "$reference" "${bounds[@]}" >"$folder/log" 2>"$folder/err"; then
    printf 'passed   %-16s %s\n' "$name" "$(tail -1 "$folder/log")"
  else
    failed=1; printf 'DIFFERS  %s\n' "$name"; tail -8 "$folder/log" "$folder/err"
  fi
  rm -f "$folder/scaled.gguf"
}
make() { # NAME MAKE_MODEL-OPTIONS...
  "$make_model" --tokenizer "$model" --seed 11 --layers 4 --width 256 --experts 32 --experts-used 4 --out "$folder/$1" \
    "${@:2}" >/dev/null
}

make next.gguf --arch qwen3next --ff 64
check qwen3next "$folder/next.gguf" 0 0 --ff 128 --shared-ff 96
make fused.gguf --arch qwen3next --ff 256 --type q4_K --down-type q6_K --fused-gate-up
check fused-q4_K "$folder/fused.gguf" 0 0 --ff 512
make moe.gguf --arch qwen3moe --ff 96 --type q8_0 --scales --split 3
check qwen3moe-x16 "$folder/moe-00001-of-00003.gguf" 0 0 --width-factor 16 --ff 128
check trained "$model" 2 5 --ff 256
exit $failed
