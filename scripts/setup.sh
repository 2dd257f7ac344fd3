# Sourced by the scripts beside it: finds Python, makes .venv, installs packages. It needs bash.
# shellcheck shell=bash

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
python="$root/.venv/bin/python"

say() {
    printf '%s\n' "$*" >&2
}

# What a command of ours begins with when it needs root: nothing as root, sudo if it asks for no password, else it fails.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    else
        sudo -n "$@"
    fi
}

may_install() {
    command -v apt-get >/dev/null && as_root true 2>/dev/null
}

# Installs Debian packages without starting the services that come with them: ours are private.
install_packages() (
    say "Installing with apt-get: $*"
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ] && [ -d /usr/sbin ]; then
        # A policy that is there already is the administrator's, and stays.
        trap 'as_root rm -f "$policy"' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM
        printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
        as_root chmod 755 "$policy"
    fi
    install=(env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@")
    if ! as_root "${install[@]}" >&2; then
        as_root apt-get update >&2
        as_root "${install[@]}" >&2
    fi
)

# Prints the first Python that is new enough; one that can make environments goes before one that cannot.
find_python() {
    local candidate incomplete=
    for candidate in python3.14 python3.13 python3.12 python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                printf '%s\n' "$candidate"
                return 0
            fi
            incomplete=${incomplete:-$candidate}
        fi
    done
    printf '%s\n' "$incomplete"
    [ -n "$incomplete" ]
}

make_environment() {
    local found package
    if ! found=$(find_python); then
        say "Python 3.11 or newer is needed, and was not found."
        say "On Debian 12, Ubuntu 24.04 or newer: sudo apt-get install python3 python3-venv"
        return 2
    fi
    package="$found-venv"
    if ! "$found" -c 'import ensurepip, venv' 2>/dev/null; then
        if ! may_install || ! install_packages "$package"; then
            say "$found cannot make a virtual environment. On Debian or Ubuntu: sudo apt-get install $package"
            return 2
        fi
    fi
    say "Making .venv with $("$found" --version)"
    rm -rf -- "$root/.venv"
    if ! "$found" -m venv "$root/.venv"; then
        rm -rf -- "$root/.venv"
        say "$found could not make .venv. On Debian or Ubuntu: sudo apt-get install $package"
        return 2
    fi
}

# Makes .venv hold what a requirements file names; does nothing if it did so already.
# usage: prepare requirements.txt
prepare() {
    local wanted stamp lock
    # Two scripts at once in one checkout must not install into one another's environment.
    exec {lock}<"$root"
    if command -v flock >/dev/null; then
        flock "$lock"
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        make_environment || return
    fi
    stamp="$root/.venv/installed-$1"
    wanted=$(cd -- "$root" && cat requirements*.txt pyproject.toml | sha256sum)
    if [ "$(cat -- "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "Installing $1"
        "$python" -m pip install --quiet --disable-pip-version-check -r "$root/$1" >&2 || return
        printf '%s\n' "$wanted" >"$stamp"
    fi
    exec {lock}<&-
}

has_rabbitmq() {
    "$python" -c 'from scripts.servers.rabbitmq import installed_sbin; installed_sbin()' 2>/dev/null
}

has_postgres() {
    "$python" -c 'from scripts.servers.postgres import installed_bin; installed_bin()' 2>/dev/null
}

# RabbitMQ 4.3 is unpacked into a cache folder once; it needs apt-get and dpkg-deb, but neither root nor an installation.
prepare_rabbitmq43() {
    if ! "$python" -c 'from scripts.servers.rabbitmq43 import unpacked; unpacked()' 2>/dev/null; then
        say "Fetching RabbitMQ 4.3 from Debian (about 75 MB, once)"
        # Only its keys may be missing: a machine of another distribution has no use for them otherwise.
        if ! [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] && ! [ -e /usr/share/keyrings/debian-archive-keyring.pgp ] &&
            may_install; then
            install_packages debian-archive-keyring || true
        fi
        "$python" scripts/services.py prepare43 >/dev/null
    fi
}

# It checks the rules in deploy/; no Prometheus server is started.
has_promtool() {
    command -v promtool >/dev/null
}

# osls, the maintained fork of Serverless 3; scripts/serverless/package-lock.json pins it and all that it needs.
serverless_lock=$(sha256sum "$root/scripts/serverless/package-lock.json")
serverless_folder="${XDG_CACHE_HOME:-$HOME/.cache}/dlqbatch/osls-${serverless_lock:0:12}"
serverless="$serverless_folder/node_modules/.bin/osls"
# It would look for a newer release of itself and count its uses otherwise.
export SLS_TELEMETRY_DISABLED=1 SLS_NOTIFICATIONS_MODE=off SLS_DISABLE_AUTO_UPDATE=1

# Fetched from npm into a cache folder once; it needs npm and node 20.19, 22.13, 24 or newer. No script of a package runs.
prepare_serverless() {
    local lock unfinished="$serverless_folder.$$"
    if ! command -v npm >/dev/null && { ! may_install || ! install_packages nodejs npm; }; then
        say "Packaging for AWS needs npm, and node 20.19, 22.13, 24 or newer."
        return 4
    fi
    mkdir -p -- "${serverless_folder%/*}"
    # A folder of that name is complete; two that want it at once wait for each other.
    exec {lock}<"${serverless_folder%/*}"
    if command -v flock >/dev/null; then
        flock "$lock"
    fi
    if [ ! -x "$serverless" ]; then
        say "Fetching osls from npm (once)"
        mkdir -- "$unfinished"
        cp -- "$root"/scripts/serverless/package*.json "$unfinished"
        if ! npm ci --prefix "$unfinished" --silent --ignore-scripts --engine-strict --no-audit --no-fund >&2; then
            rm -rf -- "$unfinished"
            say "npm could not fetch osls; it needs the registry once, and node 20.19, 22.13, 24 or newer (here: $(node --version))."
            return 4
        fi
        rm -rf -- "$serverless_folder"
        mv -- "$unfinished" "$serverless_folder"
    fi
    exec {lock}<&-
}
