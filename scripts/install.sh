#!/usr/bin/env bash
# Installs the project and its extras into .venv; safe to run again.
#   scripts/install.sh            everything (train, dashboard, dev)
#   scripts/install.sh plan      the planning install: no torch
# Needs: Python 3.11 or newer and a package registry. No compiler, no root.
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-all}"
case "$extras" in plan) target="." ;; *) target=".[$extras]" ;; esac
# What decides whether the environment is up to date: the dependency list and the request.
stamp=".venv/.installed"
want="$(cat pyproject.toml scripts/install.sh | sha256sum | cut -d' ' -f1) $extras"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ]; then exit 0; fi

retry() { # attempts a command up to four times: registries hiccup
  local n
  for n in 1 2 3 4; do "$@" && return 0; echo "install: attempt $n failed: $*" >&2; sleep $((n * 5)); done
  return 1
}

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "install: Python 3.11 or newer is needed; $("$python" --version) was found (set PYTHON=...)" >&2; exit 2; }
[ -x .venv/bin/python ] || "$python" -m venv .venv
retry .venv/bin/python -m pip install --quiet --disable-pip-version-check uv

# Bytecode is compiled once here: torch alone has thousands of modules, and every rank imports them.
uv=(.venv/bin/uv pip install --python .venv/bin/python --quiet --compile-bytecode)
# The CPU build of torch where there is no GPU: from a local wheel folder if one is named in
# PIP_FIND_LINKS, else from torch's own CPU channel; the plain registry is the last resort.
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }
if [ "$extras" = plan ]; then
  retry "${uv[@]}" -e "$target"
elif has_gpu; then
  retry "${uv[@]}" -e "$target"
elif [ -n "${PIP_FIND_LINKS:-}" ]; then
  retry "${uv[@]}" --find-links "$PIP_FIND_LINKS" -e "$target"
else
  "${uv[@]}" --torch-backend cpu -e "$target" || retry "${uv[@]}" -e "$target"
fi
echo "$want" > "$stamp"
echo "installed into .venv: $(.venv/bin/python -c 'import importlib.metadata as m; print("flopwright", m.version("flopwright"))')"
