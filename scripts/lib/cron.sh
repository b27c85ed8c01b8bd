# shellcheck shell=bash
# What the scripts that cron, systemd timers and hooks call have in common. Sourced; needs bash, coreutils, flock, grep, sed.
#
# They run without a terminal, with whatever PATH they are given, one of a kind at a time. What they do is in
# STATE_DIR/log/cron-NAME.log; on stdout there is one line for cron's mail, or none with --quiet-ok when all went well.

# shellcheck disable=SC2034 # who sources this uses them

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH LANG="${LANG:-C.UTF-8}"
umask 077

cron_name=$(basename "$0")
cron_here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
cron_quiet=false
LOG_MAX=$((1 << 20)) LOG_KEEP=4
EXIT_BUSY=4 # as cmdop-migrate says that something is under way already

# Options of this host's scripts: DRAIN_OPTIONS, UNDRAIN_OPTIONS, REAP_OPTIONS, CHECKPOINT_OPTIONS, PRUNE_OPTIONS.
cron_defaults=${CMDOP_MIGRATE_DEFAULTS:-/etc/default/cmdop-migrate}
# shellcheck source=/dev/null
if [ -r "$cron_defaults" ]; then . "$cron_defaults"; fi

cron_say() { printf '%s: %s\n' "$cron_name" "$*"; }

# Into the log, if that can be: on a disk that is full, sessions have to go all the same.
cron_keep() { { cat >> "$cron_log"; } 2> /dev/null || cat > /dev/null; }

cron_die() { # STATUS WORDS…
    local status=$1
    shift
    cron_say "$@"
    exit "$status"
}

# The command: as set, beside us when installed, in the checkout's own environment, or on the PATH.
cron_find_command() {
    local each
    for each in "${CMDOP_MIGRATE_COMMAND:-}" "$cron_here/../../../bin/cmdop-migrate" "$cron_here/../../.venv/bin/cmdop-migrate"; do
        if [ -n "$each" ] && [ -x "$each" ]; then
            printf '%s\n' "$each"
            return
        fi
    done
    command -v cmdop-migrate || cron_die 2 "no cmdop-migrate found; install it, or set CMDOP_MIGRATE_COMMAND"
}

# Environment over config file over default, as the command itself does it.
cron_state_dir() {
    local file=${CMDOP_MIGRATE_CONFIG:-/etc/cmdop-migrate/config.toml} found=
    if [ -n "${CMDOP_MIGRATE_STATE_DIR:-}" ]; then found=$CMDOP_MIGRATE_STATE_DIR
    elif [ -f "$file" ]; then found=$(sed -n 's/^[[:space:]]*state_dir[[:space:]]*=[[:space:]]*["'\'']\([^"'\'']*\)["'\''].*/\1/p' "$file" | head -n 1); fi
    printf '%s\n' "${found:-/var/lib/cmdop-migrate}"
}

cron_rotate() {
    local size number
    size=$(stat -c %s "$cron_log" 2> /dev/null || echo 0)
    [ "$size" -gt "$LOG_MAX" ] || return 0
    for ((number = LOG_KEEP - 1; number >= 1; number--)); do
        [ ! -e "$cron_log.$number" ] || mv -f "$cron_log.$number" "$cron_log.$((number + 1))"
    done
    mv -f "$cron_log" "$cron_log.1"
}

# Called first, with the script's arguments. Leaves those that are not ours in cron_args. One of a kind at a time.
cron_begin() {
    cron_args=()
    while [ $# != 0 ]; do
        case $1 in
            --quiet-ok) cron_quiet=true ;;
            -h | --help)
                sed -n '2,/^$/s/^# \{0,1\}//p' "$(readlink -f "$0")"
                exit 0
                ;;
            *) cron_args+=("$1") ;;
        esac
        shift
    done
    [ "$(id -u)" = 0 ] || cron_die 2 "needs root"
    cron_command=$(cron_find_command) || cron_die 2 "$cron_command"
    local state
    state=$(cron_state_dir)
    cron_log=$state/log/cron-$cron_name.log
    mkdir -p "$state/log" || cron_die 2 "cannot write in $state"
    exec 9>> "$state/log/cron-$cron_name.lock"
    if ! flock --nonblock 9; then
        cron_die "$EXIT_BUSY" "runs already (process $(cat "$state/log/cron-$cron_name.lock")); nothing was done"
    fi
    { printf '%s\n' "$$" > "$state/log/cron-$cron_name.lock"; } 2> /dev/null || true # only told to who comes second
    cron_rotate || true
    printf '\n=== %s %s %s\n' "$(date '+%Y-%m-%d %H:%M:%S%z')" "$cron_name" "${cron_args[*]-}" | cron_keep
}

# cmdop-migrate WORDS…; what it says goes to the log. Sets cron_status, cron_out (last line of stdout), cron_error (first of
# stderr). The lock is not for what it leaves running (9>&-).
cron_run() {
    local out err
    out=$(mktemp) err=$(mktemp)
    printf '+ %s\n' "cmdop-migrate $*" | cron_keep
    cron_status=0
    "$cron_command" "$@" < /dev/null > "$out" 2> "$err" 9>&- || cron_status=$?
    cat "$out" "$err" | cron_keep
    cron_out=$(grep -v '^  ' "$out" | tail -n 1 || true)
    cron_error=$(sed -n 's/^cmdop-migrate: //p' "$err" | head -n 1)
    cron_lines=$(wc -l < "$out")
    rm -f "$out" "$err"
}

# The one line, and the exit status.
cron_end() { # STATUS WORDS…
    local status=$1
    shift
    printf '%s (exit %s)\n' "$*" "$status" | cron_keep
    if [ "$status" = 0 ]; then
        $cron_quiet || cron_say "ok: $*"
    else
        cron_say "NOT DONE (exit $status): $* - see $cron_log"
    fi
    exit "$status"
}
