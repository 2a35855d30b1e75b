#!/bin/sh
# scale_model at the command line: what it cannot do is told in one line and leaves no file; the same options give the
# same bytes; a model whose experts have another type still answers.
# Usage: scale_model_test.sh SCALE_MODEL MAKE_MODEL SLUICE MODEL
set -eu
scale_model=$1
make_model=$2
sluice=$3
model=$4

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { echo "scale_model_test: $1" >&2; exit 1; }
refuse() { # WANTED-TEXT OPTIONS...
  wanted=$1; shift
  if "$scale_model" "$@" > "$folder/out" 2> "$folder/err"; then fail "accepted: $*"; fi
  grep -q -e "$wanted" "$folder/err" || fail "$*: no '$wanted' in: $(cat "$folder/err")"
  [ "$(wc -l < "$folder/err")" -le 2 ] || fail "$*: more than a line: $(cat "$folder/err")"
  [ -z "$(ls "$folder" | grep -E '^no\.gguf' || true)" ] || fail "$*: a file is left"
}

"$make_model" --tokenizer "$model" --arch gpt-oss --out "$folder/oss.gguf"
head -c 1000000 "$model" > "$folder/cut.gguf"
no=$folder/no.gguf
refuse "is required" --out "$no"
refuse "no/such.gguf" --model "$folder/no/such.gguf" --out "$no"
refuse "cut.gguf" --model "$folder/cut.gguf" --out "$no"
refuse "gpt-oss model" --model "$folder/oss.gguf" --out "$no"
refuse "width-factor" --model "$model" --width-factor 2 --out "$no"
refuse "ff must be at least the model's own 64, not 32" --model "$model" --ff 32 --out "$no"
refuse "multiples of 32 weights, not 100" --model "$model" --ff 100 --out "$no"
refuse "no ggml type" --model "$model" --type q9_9 --out "$no"
refuse "importance matrix" --model "$model" --type iq2_xxs --width-factor 16 --ff 256 --out "$no"
refuse "--width-factor: .* multiples of 256 weights, not 1408" --model "$model" --type q4_K --ff 256 --out "$no"
refuse "cannot create" --model "$model" --out "$folder/no/such/folder.gguf"
refuse "is no regular file" --model "$model" --width-factor 1 --out /dev/null
cp "$model" "$folder/copy.gguf"
refuse "is the model itself" --model "$folder/copy.gguf" --out "$folder/copy.gguf"
refuse "and its disk has" --model "$model" --width-factor 64 --ff 1000000 --out "$no"
# A disk that fills up while writing.
trap '' XFSZ
(ulimit -f 20000; refuse "cannot write .*no.gguf.tmp" --model "$model" --width-factor 1 --ff 128 --out "$no")
trap - XFSZ

"$scale_model" --model "$model" --width-factor 1 --ff 96 --out "$folder/one.gguf" > /dev/null
"$scale_model" --model "$model" --width-factor 1 --ff 96 --out "$folder/two.gguf" > /dev/null
cmp -s "$folder/one.gguf" "$folder/two.gguf" || fail "two runs differ"
rm "$folder/one.gguf" "$folder/two.gguf"

"$scale_model" --model "$model" --width-factor 1 --type q8_0 --out "$folder/q8.gguf" > "$folder/out"
grep -q "8 layers of 128 experts of 70.1 KiB" "$folder/out" || fail "other sizes: $(cat "$folder/out")"
GOMP_SPINCOUNT=1000 "$sluice" run -q --temp 0 --budget 50% -m "$folder/q8.gguf" -p "What is the capital of Germany?" > "$folder/out"
grep -q Berlin "$folder/out" || fail "q8_0 answers: $(cat "$folder/out")"
[ -z "$(ls "$folder" | grep '\.tmp$' || true)" ] || fail "temporary files are left"
echo "scale_model_test: passed"
