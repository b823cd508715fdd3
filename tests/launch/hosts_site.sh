# Sourced: hosts of the test's own on this machine: a network and a host name each (namespaces), joined by a bridge in a
# namespace of its own, so that this machine's network stays as it is. Needs root and iproute2.

# missing_for_hosts: why there can be none; nothing where there can.
missing_for_hosts() {
  local program
  [ "$(id -u)" -eq 0 ] || { echo "not root"; return; }
  for program in ip tc unshare nsenter; do
    command -v "$program" >/dev/null || { echo "$program is not installed (launch/install-deps.sh --tests)"; return; }
  done
  unshare --net --uts --mount true 2>/dev/null || { echo "namespaces for network, names and mounts are not permitted"; return; }
  unshare --net sh -c 'ip link add br0 type bridge && ip link add veth0 type veth peer name veth1' 2>/dev/null ||
    echo "this kernel has no bridge or no veth"
}

# start_hosts <folder> <n>: h1 to hn, 10.77.0.1 to n. Sets rsh_agent, a program for mpirun's plm_rsh_agent.
start_hosts() {
  site=$1 site_hosts=()
  local i
  mkdir -p "$site"
  printf '127.0.0.1 localhost\n' >"$site/hosts"
  for ((i = 1; i <= $2; i++)); do printf '10.77.0.%d h%d\n' "$i" "$i" >>"$site/hosts"; done
  hold switch unshare --net --uts sh -c 'hostname switch && exec sleep 600' || return
  in_host switch ip link set lo up || return
  in_host switch ip link add br0 type bridge || return
  in_host switch ip link set br0 up || return
  for ((i = 1; i <= $2; i++)); do
    hold "h$i" unshare --net --uts --mount sh -c "mount --bind '$site/hosts' /etc/hosts && hostname h$i && exec sleep 600" || return
    in_host switch ip link add "h$i" type veth peer name eth0 netns "$(cat "$site/h$i.pid")" || return
    in_host switch ip link set "h$i" master br0 up || return
    in_host "h$i" ip link set lo up || return
    in_host "h$i" ip addr add "10.77.0.$i/24" dev eth0 || return
    in_host "h$i" ip link set eth0 up || return
  done
  rsh_agent=$site/rsh
  cat >"$rsh_agent" <<AGENT
#!/bin/sh
# HOST COMMAND...: what ssh would do.
host=\$1 && shift
exec nsenter -t "\$(cat "$site/\$host.pid")" -n -u -m sh -c "\$*"
AGENT
  chmod +x "$rsh_agent"
}

# hold <host> <command that becomes sleep>: keeps a host's namespaces.
hold() {
  local host=$1 pid
  shift
  "$@" </dev/null >/dev/null 2>&1 &
  pid=$!
  disown  # or this shell tells of its end
  echo $pid >"$site/$host.pid"
  site_hosts+=("$host")
  for _ in $(seq 100); do
    [ "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)" = "sleep 600 " ] && return
    sleep 0.05
  done
  return 1
}

# in_host <host> <command ...>
in_host() {
  local host=$1
  shift
  nsenter -t "$(cat "$site/$host.pid")" -n -u -m "$@"
}

# processes_on <host> <program's path>: pids of its processes with that name space for the network.
processes_on() {
  local process net
  net=$(readlink "/proc/$(cat "$site/$1.pid")/ns/net")
  for process in /proc/[0-9]*; do
    [ "$(readlink "$process/exe" 2>/dev/null)" = "$2" ] && [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$net" ] &&
      echo "${process#/proc/}"
  done
}

# stop_hosts: whatever still runs there goes too.
stop_hosts() {
  local host process net
  for host in "${site_hosts[@]}"; do
    net=$(readlink "/proc/$(cat "$site/$host.pid")/ns/net") || continue
    for process in /proc/[0-9]*; do
      [ "$(readlink "$process/ns/net" 2>/dev/null)" = "$net" ] && kill -KILL "${process#/proc/}" 2>/dev/null
    done
  done
}
