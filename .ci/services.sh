# Sourced by .ci/run: installs (as root, Debian) and starts the services that tests need.
# PostgreSQL and Slurm run from temporary folders on free loopback ports.
. .ci/slurm.sh
install_packages() {
  local missing=()
  for package in "$@"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
  [ "${#missing[@]}" -eq 0 ] && return 0
  local n
  for n in 1 2 3 4; do
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null && return 0
    echo "services: attempt $n to install ${missing[*]} failed" >&2
    sleep $((n * 5))
  done
  return 1
}

start_postgres() {
  local port
  pg_bin="$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -1)"
  pg_folder="$(mktemp -d)"
  port="$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
  chown postgres "$pg_folder"
  su postgres -c "$pg_bin/initdb -D $pg_folder/data -A trust -U postgres >/dev/null"
  su postgres -c "$pg_bin/pg_ctl -D $pg_folder/data -w -o '-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories=$pg_folder' -l $pg_folder/log start >/dev/null"
  su postgres -c "$pg_bin/createdb -h 127.0.0.1 -p $port -U postgres flopwright_test"
  export FLOPWRIGHT_TEST_POSTGRES_URL="postgresql+psycopg://postgres@127.0.0.1:$port/flopwright_test"
}

stop_postgres() {
  su postgres -c "$pg_bin/pg_ctl -D $pg_folder/data -m immediate stop >/dev/null" || true
  rm -rf "$pg_folder"
}

install_packages postgresql slurm-wlm munge
start_postgres
start_slurm
trap 'stop_postgres; stop_slurm' EXIT
