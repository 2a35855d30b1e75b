#!/usr/bin/env bash
# capacity_sweep.sh MAKE_MODEL CAPACITY_SWEEP BUNDLED_MODEL [full]
#
# The bundled model and a made-up one of each architecture at pool sizes from the floor to all experts; the smallest
# made-up one at every size. "full" takes every size of all of them, with delays up to 5 ms, if SLUICE_SOAK is set.
set -euo pipefail
make_model=$1; capacity_sweep=$2; bundled=$3; full=${4:-}
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
coarse=(--sizes 4 --delay-ms 2); bundled_sizes=(--sizes 4 --delay-ms 2); fine=(--sizes all)
if [ "$full" = full ]; then
  if [ -z "${SLUICE_SOAK:-}" ]; then echo "SLUICE_SOAK is not set"; exit 77; fi
  coarse=(--sizes all); bundled_sizes=(--sizes all)
fi
n=0
sweep() { # NAME SWEEP-OPTIONS... -- MAKE_MODEL-OPTIONS...
  local name=$1 file=$folder/$1.gguf options=(); shift
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  "$make_model" --tokenizer "$bundled" --seed 23 --out "$file" "$@" >/dev/null
  printf '%-18s ' "$name"
  "$capacity_sweep" "$file" "${options[@]}"
  rm -f "$file"
  n=$((n + 1))
}
small=(--heads 2 --experts 16 --experts-used 4)
sweep smallest "${fine[@]}" -- --arch qwen3moe --layers 2 --width 64 --heads 2 --experts 8 --experts-used 2 --ff 64 --type q4_0
sweep qwen3moe "${coarse[@]}" -- --arch qwen3moe "${small[@]}" --layers 3 --width 256 --ff 256 --mixed q4_K,q6_K
sweep qwen3next "${coarse[@]}" -- --arch qwen3next "${small[@]}" --layers 4 --width 128 --ff 64 --type q4_0
sweep deepseek2 "${coarse[@]}" -- --arch deepseek2 "${small[@]}" --layers 3 --width 128 --ff 64 --type q8_0 --dense-layers 1 --shared-experts 1
sweep gpt-oss "${coarse[@]}" -- --arch gpt-oss "${small[@]}" --layers 3 --width 128 --ff 64 --type mxfp4
sweep llama "${coarse[@]}" -- --arch llama "${small[@]}" --layers 3 --width 128 --ff 64 --type f16
printf '%-18s ' bundled
"$capacity_sweep" "$bundled" "${bundled_sizes[@]}"
[ "$n" = 6 ]
