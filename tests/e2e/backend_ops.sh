#!/usr/bin/env bash
# backend_ops.sh PLUGIN LLAMA_BIN
#
# ggml's own test of an operation, unmodified: every MUL_MAT_ID of test-backend-ops on our backend, compared with the
# CPU backend. Left out are the cases whose weights take seconds to make: tensors of 100 million and more elements, and
# all but the small cases of iq1, iq2 and iq3. A case may be refused only if its weight is a view (m_v is not 0): no
# model has one.
#
# Exit     0 all agree; 1 one does not, or too few were run; 77 skipped.
set -euo pipefail
[ $# = 2 ] || { echo "usage: backend_ops.sh PLUGIN LLAMA_BIN" >&2; exit 2; }
plugin=$1; program=$2/test-backend-ops
for needed in "$plugin" "$program"; do
  [ -e "$needed" ] || { echo "skipped: no $needed"; exit 77; }
done
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT

for name in $(compgen -e); do
  case $name in SLUICE_* | GGML_* | LLAMA_*) unset "$name" ;; esac
done
code=0
OMP_WAIT_POLICY=passive GGML_BACKEND_PATH=$plugin "$program" test -o MUL_MAT_ID -b SLUICE \
  -p '^(?!.*n_mats=(28|32|128),).*type_a=(?!iq[123])|m=16,' >"$folder/coloured" 2>&1 || code=$?
sed 's/\x1b\[[0-9;]*m//g' "$folder/coloured" >"$folder/log"
cases() { grep '^ *MUL_MAT_ID(' "$folder/log" | grep "$@" || true; }
ok=$(cases -c ': OK$'); failed=$(cases -c 'FAIL'); refused=$(cases -c 'not supported')
refused_wrongly=$(cases 'not supported' | grep -vc 'm_v=[1-9]' || true)
printf '%s cases OK, %s failed, %s refused (views), exit code %s\n' "$ok" "$failed" "$refused" "$code"

fail() { printf 'backend_ops: %s\n' "$1"; tail -3 "$folder/log"; exit 1; }
[ "$failed" = 0 ] || { cases FAIL | head -20; fail "results differ from the CPU backend's"; }
[ "$refused_wrongly" = 0 ] || { cases 'not supported' | grep -v 'm_v=[1-9]' | head -20; fail "cases are refused"; }
[ "$code" = 0 ] || fail "test-backend-ops ended with $code"
[ "$ok" -gt 500 ] || fail "too few cases"
