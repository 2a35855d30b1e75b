#!/usr/bin/env bash
# architectures.sh TEST_LLAMA_ARCHS REGISTER_CPU_BACKEND EQUAL_TO_STOCK
#
# Every MoE architecture that the pinned llama.cpp knows: its own test writes a small random model of each, and each is
# compared with stock llama.cpp bit for bit. Left out, because stock itself does not decode them with a causal context:
# llada-moe and rnd1 (diffusion models); and refact, whose graph never uses the experts that the file holds.
set -euo pipefail
test_llama_archs=$1; register_cpu_backend=$2; equal_to_stock=$3
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
LD_PRELOAD=$register_cpu_backend "$test_llama_archs" -o "$folder" -s 1 >"$folder/log" 2>&1 || { tail -5 "$folder/log"; exit 1; }
passed=0; failed=0; without=0
for file in "$folder"/*-moe.gguf; do
  name=$(basename "$file" -moe.gguf)
  case $name in llada-moe | rnd1 | refact) continue ;; esac
  code=0
  "$equal_to_stock" "$file" --lengths 1,2,8,33,512,700 --budgets min --decode 1 >"$folder/log" 2>&1 || code=$?
  case $code in
    0) passed=$((passed + 1)) ;;
    77) without=$((without + 1)) ;;
    *) failed=$((failed + 1)); printf 'DIFFERS  %s\n' "$name"; tail -4 "$folder/log" ;;
  esac
  rm -f "$file"
done
printf '%d passed, %d failed, %d have no routed experts in their file\n' "$passed" "$failed" "$without"
[ "$failed" = 0 ] && [ "$passed" -ge 50 ]
