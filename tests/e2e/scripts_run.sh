#!/usr/bin/env bash
# scripts_run.sh SOURCE_FOLDER: what the README's first command promises. scripts/run without arguments lets the bundled
# model answer under a quarter of its experts' bytes and reports; with arguments they go to `sluice run`.
set -euo pipefail
top=$1
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
fail() { echo "scripts_run: $1"; cat "$folder/out" "$folder/err"; exit 1; }

"$top/scripts/run" >"$folder/out" 2>"$folder/err" || fail "exit code $?"
grep -q 'Berlin' "$folder/out" || fail "no answer"
for word in 'tokens/s' 'budget' 'hits' 'read' 'peak'; do grep -q "$word" "$folder/err" || fail "the report lacks '$word'"; done

"$top/scripts/run" -m "$top/models/tiny-qwen3next-128x8-q4_0.gguf" --budget 25% --temp 0 -n 8 -p 'What is a lighthouse?' \
  --stats "$folder/stats.json" >"$folder/out" 2>"$folder/err" || fail "exit code $? with arguments"
python3 - "$folder/stats.json" <<'PYTHON' || fail "the figures are not those of a streamed run"
import json, sys
stats = json.load(open(sys.argv[1]))
assert stats["streaming"] is True, stats
assert 0 < stats["budget_bytes"] <= stats["expert_bytes"] * 0.25, stats
assert stats["memory"]["pool_bytes"] <= stats["budget_bytes"], stats
assert stats["experts"]["evictions"] > 0 and stats["experts"]["hits"] > 0, stats
assert stats["experts"]["requests"] == stats["experts"]["hits"] + stats["experts"]["misses"], stats
assert stats["decode"]["tokens"] == 7 and stats["prefill"]["tokens"] > 0, stats
PYTHON
echo "scripts_run: passed"
