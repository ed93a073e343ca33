# Sourced by the other scripts: goes to the repository's root, finds Python, and defines `setup_env`.
#
#   PYTHON         the interpreter to make the environment with (default: the first suitable python3)
#   DPO_PACK_VENV  the virtual environment (default: .venv in the repository)
#
# A script may set before: `constraints`, another file than constraints.txt, and `default_venv`.

fail() {
    echo "error: $*" >&2
    exit 2
}

is_suitable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        is_suitable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "dpo-pack needs Python 3.11, 3.12 or 3.13 (python3 here: $(python3 --version 2>&1));" \
        "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
    local python
    python=$(find_python) || exit 2
    echo "Making a virtual environment in $venv with $("$python" --version)"
    # Debian's python3 has no ensurepip without the package python3-venv; another pip can install pip then.
    "$python" -m venv "$venv" >/dev/null 2>&1 ||
        { "$python" -m venv --without-pip "$venv" && "$python" -m pip --python "$venv" install --quiet pip; } ||
        fail "$python cannot make a virtual environment in $venv; on Debian or Ubuntu: apt install python3-venv"
}

# Prints a hash of what an installation depends on: metadata, pins, the interpreter, the repository's path.
install_stamp() {
    "$venv/bin/python" - "$repo" "$constraints" <<'END'
import hashlib, pathlib, sys
parts = [sys.version, sys.argv[1]] + [pathlib.Path(f).read_text() for f in ("pyproject.toml", sys.argv[2])]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
END
}

# setup_env EXTRAS: installs the repository in $venv, editable, with extras such as "[dev]", unless it is installed.
setup_env() {
    local extras=$1 stamp_file=$venv/dpo_pack$1.installed
    if [[ -f $stamp_file && $(<"$stamp_file") == "$(install_stamp 2>/dev/null)" ]]; then
        return
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
    is_suitable "$venv/bin/python" || fail "$venv is no environment of Python 3.11, 3.12 or 3.13; remove it and run again"
    echo "Installing dpo-pack$extras and what it needs; the first time takes a few minutes"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".$extras" ||
        fail "pip could not install dpo-pack$extras; its messages are above"
    install_stamp >"$stamp_file"
}

[[ ${DPO_PACK_VENV:-/} == /* ]] || DPO_PACK_VENV=$PWD/$DPO_PACK_VENV
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
venv=${DPO_PACK_VENV:-$repo/${default_venv:-.venv}}
constraints=${constraints:-constraints.txt}
