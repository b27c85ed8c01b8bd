#!/usr/bin/env bash
# What does not change with the project: Debian packages, a Python environment with what cmdop-migrate imports, CRIU, the S3 server.
# Does nothing, quickly, where it was done before: vagrant/build-box runs it while it makes a box.
#
#   base.sh                     in a machine, as root; /vagrant/base is what scripts/test-vm gathered, if it did
#   base.sh --packages SUITE    which packages that are
set -euo pipefail

# Sessions, then what the suite runs in them or looks at them with. Lease store and S3 server only where the store is.
packages() {
    printf '%s\n' python3 python3-venv tini nftables iproute2 procps tar openssh-client sudo cron sqlite3 vim-tiny rsync
    [ "$1" != bookworm ] || printf '%s\n' etcd-server
}
if [ "${1-}" = --packages ]; then
    packages "$2"
    exit 0
fi

suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
done_mark=/opt/cmdop-migrate/.base
[ ! -e "$done_mark" ] || exit 0
base=/vagrant/base

missing=()
for each in $(packages "$suite"); do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$each" 2> /dev/null)" = installed ] || missing+=("$each")
done
if [ ${#missing[@]} != 0 ]; then
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends "${missing[@]}"
fi
if [ -d /run/systemd/system ]; then systemctl --quiet disable --now etcd 2> /dev/null || true; else systemctl --quiet disable etcd 2> /dev/null || true; fi

python3 -m venv /opt/cmdop-migrate
version=$(python3 -c 'import sys; print("{}.{}".format(*sys.version_info))')
# What it imports, by the names and versions the wheels were chosen by.
/opt/cmdop-migrate/bin/pip install --quiet --disable-pip-version-check --no-index --find-links "$base/wheels-$version" \
    -r "$base/requirements"
if [ "$suite" = bookworm ]; then
    /opt/cmdop-migrate/bin/pip install --quiet --disable-pip-version-check --no-index --no-deps "$base"/store/*.whl
fi
mkdir -p /var/lib/cmdop-migrate
chmod 755 /var/lib/cmdop-migrate
[ ! -d "$base/criu" ] || cp -a "$base/criu" /var/lib/cmdop-migrate/
touch "$done_mark"
