#!/usr/bin/env bash
# Make the Python environment (.venv) for a device. Safe to run again: finished steps are skipped, a broken one is
# continued. The log of every step is kept in .venv/setup.log.
#
#   env/setup.sh cpu                              everything runs on this machine, no accelerator
#   env/setup.sh npu                              the job side on an Ascend node (CANN stack comes with the image)
#   env/setup.sh npu --stack a2-0.7.0             the job side and a whole stack of env/stacks, in its order
#   env/setup.sh cpu --wheels /path/to/wheels     install from a folder of wheels only (air-gapped site)
#   env/setup.sh cpu --extra-index URL            also look there, for example for CPU builds of torch
#
# ATLASRL_VENV (default .venv), ATLASRL_PYTHON (default: the newest of python3.12, 3.11, 3.10, python3 that fits).
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
venv=${ATLASRL_VENV:-$root/.venv}
pip_options=()
stack=
stack_options=()

fail() { echo "error: $1" >&2; exit "${2:-1}"; }

device=${1:-}
case $device in
    cpu | npu) shift ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
    *) fail "which device? env/setup.sh cpu or env/setup.sh npu" 2 ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) [ -d "${2:-}" ] || fail "--wheels ${2:-}: no such folder" 2
                  pip_options+=(--no-index --find-links "$2"); stack_options=(--wheels "$2"); shift 2 ;;
        --stack) [ "$device" = npu ] || fail "--stack is for npu; the cpu has one stack" 2
                 [ -f "$root/env/stacks/${2:-}.yaml" ] || [ -f "${2:-}" ] ||
                     fail "--stack ${2:-}: no such stack; there are $(cd "$root/env/stacks" && echo *.yaml | sed 's/\.yaml//g')" 2
                 stack=$2; shift 2 ;;
        --extra-index) [ -n "${2:-}" ] || fail "--extra-index needs a URL" 2
                       pip_options+=(--extra-index-url "$2"); shift 2 ;;
        *) fail "unknown option $1; see env/setup.sh --help" 2 ;;
    esac
done

# --- which Python -------------------------------------------------------------------------------------------------
fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
for python in ${ATLASRL_PYTHON:-python3.11 python3.12 python3.10 python3}; do
    command -v "$python" >/dev/null && fits "$python" && break
    python=
done
[ -n "$python" ] || fail "no Python 3.10 to 3.12 found; install one (Debian 12: apt-get install python3 python3-venv) or name it in ATLASRL_PYTHON"

# --- steps: each leaves a stamp with the hash of what it did ----------------------------------------------------------
number=0
steps=$([ "$device" = cpu ] && echo 6 || echo 4)
step() { # step NAME REMEDY FILE-OR-TEXT-THAT-DECIDES -- COMMAND...
    local name=$1 remedy=$2 key stamp start
    key=$(cat "$3" 2>/dev/null || echo "$3"); shift 4
    key=$(printf '%s' "$key $*" | sha256sum | cut -c1-16)
    number=$((number + 1)); stamp=$venv/.step-$number
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then return; fi
    start=$SECONDS
    echo "[$number/$steps] $name"
    if ! "$@" </dev/null 2>&1 | tee -a "$venv/setup.log" | progress; then
        echo "--- last lines of $venv/setup.log" >&2; tail -5 "$venv/setup.log" >&2
        fail "step $number ($name) failed; likely $remedy; then run env/setup.sh $device again, it continues here"
    fi
    echo "$key" >"$stamp"
    echo "      done in $((SECONDS - start)) s"
}
progress() { # pip's own words, one package at a time, on one line of a terminal
    if [ -t 1 ]; then
        sed -u -n 's/^\(Collecting\|Downloading\|Building wheel for\|Installing collected packages\) *\(.*\)/\1 \2/p' |
            while IFS= read -r line; do printf '\r\033[K      %.100s' "$line"; done
        printf '\r\033[K'
    else
        cat >/dev/null
    fi
}
pip() { "$venv/bin/python" -m pip install --no-compile --disable-pip-version-check --no-input "${pip_options[@]}" "$@"; }
constrained() { # the exact versions this was tested with, for the Python they were resolved on
    local file=$root/env/constraints-$device.txt
    if [ -f "$file" ] && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        pip -c "$file" "$@"
    else
        pip "$@"
    fi
}
unused='/site-packages/(.+/tests?/|pip/|setuptools/|torch/testing/_internal/|transformers/models/(?!auto|deepseek|llama|qwen))'
compile() { # a first step after 46 s instead of 18 s is what missing bytecode costs; a third of it would be for files no job imports
    "$venv/bin/python" -m compileall -q -j 0 -x "$unused" "$venv/lib" "$root/pylib" "$root/ckpt_tools" >/dev/null 2>&1 || true
}
prove() { PYTHONPATH="$root/pylib:$root" "$venv/bin/python" -m atlasrl.installed --device "$device"; }

network="no network or a package index that is down; on an air-gapped site use --wheels DIR"
mkdir -p "$venv" 2>/dev/null || fail "cannot write $venv; set ATLASRL_VENV to a folder you own"
step "environment $venv with $($python --version)" "the venv module is missing: apt-get install python3-venv" "$($python --version)" -- \
    "$python" -m venv "$venv"
if [ "$device" = cpu ]; then
    step "torch 2.13.0 (CPU)" "$network, or no CPU build there: give one with --extra-index" torch==2.13.0 -- pip torch==2.13.0
    step "libraries" "$network" "$root/env/requirements-cpu.txt" -- constrained torch==2.13.0 -r "$root/env/requirements-cpu.txt"
    step "verl 0.7.0, megatron-core, mbridge" "$network" "$root/env/requirements-cpu-nodeps.txt" -- \
        pip --no-deps -r "$root/env/requirements-cpu-nodeps.txt"
else
    step "libraries" "$network" "$root/env/requirements-npu.txt" -- pip -r "$root/env/requirements-npu.txt"
fi
step "bytecode" "a full disk" "$(cat "$root"/env/requirements-"$device"*.txt)" -- compile
step "proof: versions and imports" "a package of another environment on PYTHONPATH" "$(cat "$root"/env/requirements-"$device"*.txt)" -- prove
if [ -n "$stack" ]; then
    PYTHONPATH="$root/pylib:$root" "$venv/bin/python" -m atlasrl.install "$stack" "${stack_options[@]}"
fi
touch "$venv/ready-$device"
echo "environment ready: $venv"
