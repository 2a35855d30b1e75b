#!/bin/sh
# make_model: the same options give the same bytes, whatever the threads; another seed gives others; the parts of a
# split model are complete. Usage: make_model_test.sh MAKE_MODEL LLAMA_GGUF_SPLIT TOKENIZER_MODEL
set -eu
make_model=$1
gguf_split=$2
tokenizer=$3
[ -e "$tokenizer" ] || { echo "no tokenizer model at $tokenizer: skipped"; exit 77; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { echo "make_model_test: $1" >&2; exit 1; }
make() { "$make_model" --tokenizer "$tokenizer" "$@"; }
# The header with the vocabulary is well below a MiB; the rest is tensors.
tensors_of() { tail -c +1048577 "$1" | sha256sum; }

for arch in qwen3moe qwen3next deepseek2 gpt-oss llama; do
  make --arch $arch --seed 7 --threads 1 --out "$folder/one.gguf"
  make --arch $arch --seed 7 --threads 3 --out "$folder/two.gguf"
  make --arch $arch --seed 8 --out "$folder/other.gguf"
  cmp -s "$folder/one.gguf" "$folder/two.gguf" || fail "$arch: two runs with one seed differ"
  [ "$(tensors_of "$folder/one.gguf")" != "$(tensors_of "$folder/other.gguf")" ] || fail "$arch: the seed has no effect"
done

# Large enough for the experts to draw from the stock of rows.
make --experts 128 --ff 512 --experts-used 8 --layers 1 --threads 1 --out "$folder/one.gguf"
make --experts 128 --ff 512 --experts-used 8 --layers 1 --threads 2 --split 3 --out "$folder/parts.gguf"
[ "$(ls "$folder" | grep -c '^parts-0000[123]-of-00003.gguf$')" = 3 ] || fail "not three parts: $(ls "$folder")"
"$gguf_split" --merge "$folder/parts-00001-of-00003.gguf" "$folder/merged.gguf" > "$folder/log" 2>&1 ||
  fail "llama-gguf-split cannot merge: $(tail -n 1 "$folder/log")"
size=$(($(stat -c %s "$folder/one.gguf") - 1048576))
[ "$(tail -c $size "$folder/one.gguf" | sha256sum)" = "$(tail -c $size "$folder/merged.gguf" | sha256sum)" ] ||
  fail "the merged parts hold other tensors than the whole"

if make --split 4000 --out "$folder/many.gguf" 2> "$folder/log"; then fail "more parts than tensors were accepted"; fi
grep -q -- '--split must be at most' "$folder/log" || fail "no clear refusal: $(cat "$folder/log")"
[ -z "$(ls "$folder" | grep '\.tmp$' || true)" ] || fail "temporary files are left"
echo "make_model_test: passed"
