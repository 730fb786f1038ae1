# Sourced by .ci/services.sh: a local Slurm of 256 pretend nodes with eight H800s each: real
# daemons, empty files for the GPUs (root, Debian; 22.05 was seen to work).
slurm_nodes=256

slurm_config() { # folder, host, port of the controller, first port of the nodes
  local memory
  memory="$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)"
  cat <<EOF
ClusterName=pretend
SlurmctldHost=$2(127.0.0.1)
SlurmctldPort=$3
AuthType=auth/munge
CredType=cred/munge
# a job that is queued again starts once its old credential is over: 120 s by default
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmUser=root
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/slurmctld.pid
SlurmdPidFile=$1/slurmd-%n.pid
SlurmctldLogFile=$1/slurmctld.log
SlurmdLogFile=$1/slurmd.log
NodeName=gpu[001-$slurm_nodes] NodeHostname=$2 NodeAddr=127.0.0.1 Port=[$4-$(($4 + slurm_nodes - 1))] Sockets=2 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=$memory Gres=gpu:h800:8 State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE
EOF
}

free_port_run() { # the first of so many free loopback ports in a row
  python3 - "$1" <<'EOF'
import socket, sys
count = int(sys.argv[1])
for start in range(21000, 32000, count):
    held = []
    try:
        for port in range(start, start + count):
            held.append(socket.create_server(("127.0.0.1", port)))
    except OSError:
        continue
    finally:
        for s in held:
            s.close()
    print(start)
    break
EOF
}

start_slurm() {
  local host node port
  host="$(hostname -s)"
  port="$(free_port_run $((slurm_nodes + 1)))"
  slurm_folder="$(mktemp -d)"
  chmod 755 "$slurm_folder"
  mkdir -p "$slurm_folder"/{state,spool,gpus}
  for node in 0 1 2 3 4 5 6 7; do : > "$slurm_folder/gpus/nvidia$node"; done
  [ -f /etc/munge/munge.key ] || /usr/sbin/mungekey --create
  mkdir -p /run/munge
  chown munge: /run/munge /etc/munge/munge.key
  pgrep -x munged >/dev/null || su -s /bin/bash munge -c /usr/sbin/munged
  export SLURM_CONF="$slurm_folder/slurm.conf"
  slurm_config "$slurm_folder" "$host" "$port" "$((port + 1))" > "$SLURM_CONF"
  printf 'AutoDetect=off\nNodeName=gpu[001-%s] Name=gpu Type=h800 File=%s/gpus/nvidia[0-7]\n' \
    "$slurm_nodes" "$slurm_folder" > "$slurm_folder/gres.conf"
  slurmctld
  for node in $(seq -f %03g 1 "$slurm_nodes"); do slurmd -N "gpu$node"; done
  local n
  for n in $(seq 60); do
    [ "$(sinfo --noheader --format=%D --states=idle 2>/dev/null || true)" = "$slurm_nodes" ] && break
    sleep 1
  done
  export FLOPWRIGHT_TEST_SLURM_CONF="$SLURM_CONF"
}

stop_slurm() {
  local pid
  for pid in "$slurm_folder"/*.pid; do kill "$(cat "$pid")" 2>/dev/null || true; done
  rm -rf "$slurm_folder"
}
