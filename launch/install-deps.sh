#!/usr/bin/env bash
# Installs what the build and the tests need: Debian 12, Ubuntu 24.04. Asks apt only for what is missing, so a second run
# is done at once. Never touches CUDA, NCCL or drivers: their versions are the site's choice.
#   launch/install-deps.sh [--tests] [--dev] [--dry-run]
# --tests: what tests/launch starts; --dev: clang-format and clang-tidy; --dry-run: print what would be installed and stop
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config git ca-certificates ccache
  openmpi-bin libopenmpi-dev
  libhdf5-dev hdf5-tools
  libboost-program-options-dev nlohmann-json3-dev libfmt-dev libpcre2-dev libedit-dev libhwloc-dev libssl-dev
  doctest-dev
  clang libclang-rt-dev # libFuzzer
)
dry=no
for option in "$@"; do
  case "$option" in
    # A scheduler and hosts of the tests' own. Where systemd runs, Debian starts munged; nothing else runs outside a test.
    --tests) packages+=(slurmctld slurmd slurm-client munge iproute2) ;;
    --dev) packages+=(clang-format-14 clang-tidy-14) ;;
    --dry-run) dry=yes ;;
    *) echo "install-deps: unknown option $option (known: --tests, --dev, --dry-run)" >&2 && exit 2 ;;
  esac
done

# shellcheck source=/dev/null
. /etc/os-release
case "${ID:-} ${VERSION_ID:-}" in
  "debian 12" | "ubuntu 24.04") ;;
  *)
    echo "install-deps: ${PRETTY_NAME:-this system}: package names are known for Debian 12 and Ubuntu 24.04 only;" \
      "install their counterparts of: ${packages[*]}" >&2
    exit 3
    ;;
esac

missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing+=("$p")
done
if [ $dry = yes ]; then
  echo "install-deps: ${#packages[@]} packages needed, ${#missing[@]} missing${missing[*]:+: ${missing[*]}}"
  exit 0
fi
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps: neither root nor sudo; missing packages: ${missing[*]}" >&2
    exit 3
  fi
  as_root=(sudo)
fi
echo "install-deps: installing ${missing[*]}"
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
