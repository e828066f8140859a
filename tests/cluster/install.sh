#!/usr/bin/env bash
# Install what the test cluster needs: Slurm, munge, iproute2, an ssh server. Starts none of it. Idempotent.
set -euo pipefail
wanted=(slurm-wlm slurm-wlm-basic-plugins munge iproute2 util-linux openssh-server openssh-client)
[ "${1:-}" = --accounting ] && wanted+=(slurmdbd mariadb-server)
missing=()
for package in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
[ "$(id -u)" = 0 ] || { echo "error: the test cluster needs ${missing[*]}; run: sudo $0 $*" >&2; exit 1; }

# Packages start their services on installation; a test needs the programs only. 101 is policy-rc.d's word for "forbidden".
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
options=(-o DPkg::Lock::Timeout=300 -qq)
apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null ||
    { apt-get "${options[@]}" update && apt-get "${options[@]}" install -y --no-install-recommends "${missing[@]}" >/dev/null; }
