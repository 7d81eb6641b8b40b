# Sourced by the other scripts: where things are, and how built things are kept.
#
# Whatever takes long to make (the newer QEMU, the guests, tools) is kept under .cache/NAME together with a key: the hash of
# everything it was made from. `fresh NAME FILE…` says whether what is there was made from those very files; a maker
# works in a new directory and `keep NAME` puts it in place in one step, so that an interrupted run leaves nothing half-made.
# REBUILD=1 in the environment makes everything anew.

set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${WHIMBREL_CACHE:-$root/.cache}
mkdir -p "$cache"

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# One maker at a time in one cache; the rest wait and then find it made. Scripts that call each other share the lock.
if [ -z "${WHIMBREL_CACHE_LOCKED:-}" ]; then
    command -v flock >/dev/null || die "flock is missing: install util-linux"
    exec 9>"$cache/lock"
    flock 9
    export WHIMBREL_CACHE_LOCKED=1
fi

# fresh NAME INPUT…: true when .cache/NAME was made from these inputs (files, directories, or words that name no file).
fresh() {
    name=$1; shift
    key=$(for i in "$@"; do
        if [ -d "$i" ]; then find "$i" -type f -not -path '*/target/*' | LC_ALL=C sort | xargs -r sha256sum | sed "s|$root/||"
        elif [ -f "$i" ]; then sha256sum <"$i"
        else echo "$i"; fi
    done | sha256sum | cut -c1-32)
    work=$cache/$name.new
    [ -z "${REBUILD:-}" ] && [ "$(cat "$cache/$name/key" 2>/dev/null)" = "$key" ] && return 0
    rm -rf "$work"; mkdir -p "$work"
    return 1
}

# keep NAME: what was made in $work becomes .cache/NAME.
keep() {
    echo "$key" >"$work/key"
    rm -rf "${cache:?}/$1"
    mv "$work" "$cache/$1"
}

# The distribution's lists may never have been read on a new machine: read them once, and only when something is to be fetched.
apt_update_once() {
    [ -n "${WHIMBREL_APT_UPDATED:-}" ] && return
    say "reading the distribution's package lists"
    apt-get update -qq
    export WHIMBREL_APT_UPDATED=1
}

. /etc/os-release

# The file that says where the distribution's own packages come from: the first that names its suite.
distribution_sources() {
    for file in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
        if [ -f "$file" ] && grep -qE "^[^#]*[[:space:]]$VERSION_CODENAME([[:space:]]|\$)" "$file"; then
            echo "$file"
            return
        fi
    done
    die "no file under /etc/apt names $VERSION_CODENAME: where do this machine's packages come from?"
}

# The server with the distribution's packages.
distribution_server() {
    awk '$1 == "URIs:" { print $2; exit } $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) { print $i; exit } }' \
        "$(distribution_sources)"
}
