#!/usr/bin/env bash
# A real Slurm of one node on this machine, for tests: munged, slurmctld and slurmd of its own, with every file and
# socket of theirs in FOLDER, on ports that were free. A Slurm that the machine already has is not touched.
#
#   slurm_local.sh start FOLDER    starts it and waits until the node takes jobs (partition: local)
#   eval "$(slurm_local.sh env FOLDER)"    sbatch, srun, squeue and sinfo of this shell then talk to it
#   slurm_local.sh stop FOLDER     ends its jobs and daemons, and removes FOLDER
#
# Needs no systemd. SLURM_LOCAL_START_SECONDS (60) is how long a start may take. Status 2: the machine or the folder
# cannot be used, and the line on stderr says why.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"

PATH=$PATH:/usr/sbin:/sbin # where Debian puts the daemons, and a user's PATH may not look
DAEMONS=(munged slurmctld slurmd)
START_SECONDS=${SLURM_LOCAL_START_SECONDS:-60}
STOP_SECONDS=20
STARTS=3 # a port that was free may be taken before the daemon has it

usage() {
  say 'usage: slurm_local.sh start|stop|env FOLDER'
  exit 2
}

# until_true SECONDS COMMAND...: asks again five times a second; 1 when the time is over.
until_true() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.2
  done
}

check_machine() {
  local name
  for name in munged slurmctld slurmd sbatch srun squeue scancel sinfo; do
    if ! command -v "$name" >/dev/null; then
      say "there is no $name here; on Debian or Ubuntu: apt-get install slurm-wlm munge"
      return 2
    fi
  done
}

# A folder that did not exist or is empty, so that stop can remove all of it.
check_folder() {
  if [ -n "$(ls -A "$FOLDER" 2>/dev/null)" ]; then
    say "$FOLDER is not empty"
  elif [ "${#FOLDER}" -gt 90 ]; then # a socket's path has 107 characters at most
    say "the path $FOLDER is too long for a socket: 90 characters at most"
  elif [[ $FOLDER = *[!A-Za-z0-9_./-]* ]]; then
    say "the path $FOLDER has characters that slurm.conf cannot hold"
  elif (umask 077 && mkdir -p -- "$FOLDER") && [ -w "$FOLDER" ]; then
    return 0
  else
    say "cannot write to $FOLDER"
  fi
  return 2
}

# free_port: one that nobody listens on; below the ports that systems give to clients.
free_port() {
  local port
  while :; do
    port=$((15000 + RANDOM % 15000))
    (: </dev/tcp/127.0.0.1/"$port") 2>/dev/null || break
  done
  printf '%s\n' "$port"
}

# at_least MAJOR.MINOR "slurm-wlm 24.11.5"
at_least() { printf '%s\n' "$1" "${2##* }" | sort -C -V; }

write_configuration() {
  rm -rf "${FOLDER:?}"/*
  mkdir "$FOLDER/state" "$FOLDER/spool"
  # A munge key is random bytes that only its owner may read.
  (umask 077 && head -c 1024 /dev/urandom >"$FOLDER/munge.key")
  # No cgroups and no accounting: they need systemd or a database. config_overrides: the node has the CPUs that stand
  # here, however many the machine has.
  cat >"$FOLDER/slurm.conf" <<END
# Written by slurm_local.sh.
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
CredType=cred/munge
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=2
MailProg=/bin/true
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
  # Since 23.11 slurmd wants cgroups though no plugin uses them, unless this says otherwise; 22.05 does not know it.
  if at_least 23.11 "$(slurmd -V)"; then printf 'CgroupPlugin=disabled\n' >"$FOLDER/cgroup.conf"; fi
}

# daemon NAME COMMAND...: in the foreground of a session of its own, so that its process number is known.
daemon() {
  local name=$1
  shift
  setsid "$@" >>"$FOLDER/$name.log" 2>&1 </dev/null &
  printf '%s\n' "$!" >"$FOLDER/$name.process"
  until_true "$START_SECONDS" runs_or_gone "$name" "$!"
}

process_of() { cat "$FOLDER/$1.process" 2>/dev/null; }

# The number is its daemon's still, and not of another process that has it now.
runs() {
  local process
  process=$(process_of "$1") && [ "$(cat "/proc/$process/comm" 2>/dev/null)" = "$1" ]
}

# Before it is itself, it is setsid.
runs_or_gone() { runs "$1" || ! kill -0 "$2" 2>/dev/null; }

all_run() { runs munged && runs slurmctld && runs slurmd; }

munge_answers() { munge -n -S "$FOLDER/munge.socket" >/dev/null 2>&1; }

node_is_idle() { [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; }

no_jobs() { [ -z "$(squeue -h -o %i 2>/dev/null)" ]; }

ended() { ! runs "$1"; }

# Whether they became ready is asked afterwards: a daemon that ends, because its port was taken, ends the waiting.
munge_ready_or_broken() { munge_answers || ! runs munged; }

node_ready_or_broken() { node_is_idle || ! all_run; }

start_daemons() {
  write_configuration
  # --force: only this user's processes have to reach the socket, and FOLDER may be closed to others.
  daemon munged munged --foreground --force --key-file="$FOLDER/munge.key" --socket="$FOLDER/munge.socket" \
    --pid-file="$FOLDER/munged.pid" --seed-file="$FOLDER/munged.seed"
  until_true "$START_SECONDS" munge_ready_or_broken && runs munged || return 1
  daemon slurmctld slurmctld -D -i -f "$SLURM_CONF"
  daemon slurmd slurmd -D -N localhost -f "$SLURM_CONF"
  until_true "$START_SECONDS" node_ready_or_broken && all_run
}

end_daemons() {
  local name
  for name in "${DAEMONS[@]}"; do
    if runs "$name"; then kill "$(process_of "$name")" 2>/dev/null || true; fi
  done
  for name in "${DAEMONS[@]}"; do
    until_true "$STOP_SECONDS" ended "$name" || kill -KILL -- "-$(process_of "$name")" 2>/dev/null || true
  done
}

# Ends what start began, and keeps nothing: for the end of a start that did not come to its own.
give_up() {
  end_daemons
  tail -n 5 "$FOLDER"/*.log >&2 || true
  rm -rf "$FOLDER"
}

start() {
  local attempt
  check_machine && check_folder || return
  trap give_up EXIT
  trap 'exit 130' INT TERM HUP
  for ((attempt = 1; attempt <= STARTS; attempt++)); do
    if start_daemons; then
      trap - EXIT
      return 0
    fi
    all_run && break # they had their time; with other ports they would not do better
    end_daemons
  done
  say "Slurm did not start; the ends of its logs:"
  return 1
}

# Slurm itself ends the jobs: it knows which processes are theirs.
end_jobs() {
  runs slurmctld || return 0
  scancel --user="$(id -un)" 2>/dev/null || true
  until_true "$STOP_SECONDS" no_jobs && return 0
  say "jobs of $FOLDER have not ended in $STOP_SECONDS seconds"
  return 1
}

stop() {
  local status=0
  is_ours || return
  end_jobs || status=1
  end_daemons
  rm -rf "$FOLDER"
  return "$status"
}

is_ours() {
  grep -q 'slurm_local' "$SLURM_CONF" 2>/dev/null && return 0
  say "$FOLDER holds no Slurm that this script started"
  return 2
}

if [ "$#" -ne 2 ] || [ -z "$2" ]; then usage; fi
case $2 in
  /*) FOLDER=${2%/} ;;
  *) FOLDER=$PWD/${2%/} ;;
esac
export SLURM_CONF=$FOLDER/slurm.conf
case $1 in
  start) start ;;
  stop) stop ;;
  env) is_ours && printf 'export SLURM_CONF=%q\n' "$SLURM_CONF" ;;
  *) usage ;;
esac
