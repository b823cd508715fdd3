# Sourced: a Slurm of the test's own on this machine: munged, slurmctld and two slurmd, with their own state, ports and host
# names; everything is gone after stop_slurm. Needs root (the daemons' user) and Debian's slurmctld, slurmd, slurm-client, munge.

# missing_for_slurm: why there can be no Slurm here; nothing where there can.
missing_for_slurm() {
  local program
  [ "$(id -u)" -eq 0 ] || { echo "not root"; return; }
  for program in munged slurmctld slurmd sbatch srun unshare; do
    command -v "$program" >/dev/null || { echo "$program is not installed (launch/install-deps.sh --tests)"; return; }
  done
  unshare --uts true 2>/dev/null || echo "UTS namespaces are not permitted"
}

# free_ports: the first of three neighbours that nobody listens on.
free_ports() {
  local port taken
  for _ in $(seq 50); do
    port=$((20000 + RANDOM % 10000)) taken=no
    for i in 0 1 2; do (: <"/dev/tcp/127.0.0.1/$((port + i))") 2>/dev/null && taken=yes; done
    [ $taken = no ] && echo "$port" && return
  done
}

# start_slurm <folder>: returns when both nodes are idle; sets SLURM_CONF. Non-zero, with the daemons' logs, if they are not.
start_slurm() {
  site=$1 site_pids=()
  local port node
  port=$(free_ports)
  mkdir -p "$site/state" "$site"/{spool,tmp}/n{1,2}
  (umask 077 && head -c 128 /dev/urandom >"$site/munge.key")
  munged --force --key-file="$site/munge.key" --socket="$site/munge.socket" --pid-file="$site/munged.pid" \
    --log-file="$site/munged.log" --seed-file="$site/munge.seed" || return
  # proctrack and task without cgroups, for containers; more CPUs than there are; cred_expire is also how long a job that
  # was queued again waits.
  cat >"$site/slurm.conf" <<CONF
ClusterName=k3test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$site/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$site/state
SlurmdSpoolDir=$site/spool/%n
TmpFS=$site/tmp/%n
SlurmctldPidFile=$site/slurmctld.pid
SlurmdPidFile=$site/slurmd.%n.pid
SlurmctldLogFile=$site/slurmctld.log
SlurmdLogFile=$site/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 1))-$((port + 2)) CPUs=16
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=10 State=UP
CONF
  export SLURM_CONF=$site/slurm.conf
  slurmctld || return
  # A host name of its own, or Open MPI takes the two nodes for one and looks for shared memory.
  for node in n1 n2; do unshare --uts sh -c "hostname $node && exec slurmd -N $node" || return; done
  for _ in $(seq 100); do
    [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" -eq 2 ] && break
    sleep 0.1
  done
  mapfile -t site_pids < <(cat "$site"/*.pid)
  [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" -eq 2 ] && return
  tail -n 20 "$site"/*.log
  return 1
}

# daemons: pids of what start_slurm started and still runs.
daemons() {
  local pid
  for pid in "${site_pids[@]}"; do
    grep -qaF "$site" "/proc/$pid/environ" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
  done
}

stop_slurm() {
  local signal
  scancel --user=root 2>/dev/null
  wait_for_jobs 10
  for signal in TERM KILL; do
    # shellcheck disable=SC2046
    [ -n "$(daemons)" ] && kill -$signal $(daemons)
    for _ in $(seq 50); do
      [ -z "$(daemons)" ] && return
      sleep 0.1
    done
  done
}

# wait_for_jobs <seconds> [<job>]: until it, or every job, has left the queue.
wait_for_jobs() {
  for _ in $(seq $(($1 * 10))); do
    [ -z "$(squeue -h ${2:+-j "$2"} -t all -o %T 2>/dev/null | grep -E 'PENDING|RUNNING|COMPLETING|SUSPENDED|CONFIGURING')" ] && return
    sleep 0.1
  done
  return 1
}
