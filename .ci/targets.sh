# Sourced by .ci/run after `make install`: the parsers of the export targets, each in an
# environment of its own (their pins clash). Those that need torch see that of .venv.
targets_folder="$PWD/.ci/targets/venvs"
install_target() {
  local name="$1" list=".ci/targets/$1.txt" folder="$targets_folder/$1" options=()
  local stamp="$folder/.installed"
  [ "$(cat "$stamp" 2>/dev/null || true)" = "$(sha256sum < "$list")" ] && return 0
  rm -rf "$folder"
  .venv/bin/python -m venv --without-pip "$folder"
  if grep -q 'beside the torch of .venv' "$list"; then
    options=(--no-deps)
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      > "$folder/lib/$(ls "$folder/lib")/site-packages/torch_of_venv.pth"
  fi
  local n
  for n in 1 2 3 4; do
    .venv/bin/uv pip install --quiet --python "$folder/bin/python" "${options[@]}" -r "$list" && break
    [ "$n" -lt 4 ] || { echo "targets: $name could not be installed" >&2; return 1; }
    sleep $((n * 5))
  done
  sha256sum < "$list" > "$stamp"
}
for list in .ci/targets/*.txt; do install_target "$(basename "$list" .txt)"; done
export FLOPWRIGHT_EXPORT_TARGETS="$targets_folder"
