#!/usr/bin/env bash
# What every machine of the fleet has: cmdop-migrate from the wheel of this checkout, its own SSH key, root's access to it.
#
#   project.sh NAME SECONDS    SECONDS: since the epoch, now
set -euo pipefail
name=$1 fleet=/vagrant/fleet

# A machine that was put back from a snapshot has that moment's time.
[ "$(date +%s)" -ge "$(($2 - 60))" ] || date -s "@$2" > /dev/null

wheel=$(echo /vagrant/project/*.whl)
installed=/opt/cmdop-migrate/.project
if ! cmp -s "$wheel" "$installed"; then
    /opt/cmdop-migrate/bin/pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --force-reinstall "$wheel"
    cp "$wheel" "$installed"
fi
# Below /, so that nothing is started: each machine has its own part to play.
DESTDIR=/ /vagrant/project/scripts/install --command /opt/cmdop-migrate/bin/cmdop-migrate > /dev/null
systemctl daemon-reload

put() { install -D -m "$1" -o root -g root "$2" "$3"; }
put 600 "$fleet/hostkeys/$name" /etc/ssh/ssh_host_ed25519_key
put 644 "$fleet/hostkeys/$name.pub" /etc/ssh/ssh_host_ed25519_key.pub
rm -f /etc/ssh/ssh_host_rsa_key* /etc/ssh/ssh_host_ecdsa_key*
install -d -m 700 /root/.ssh
put 600 "$fleet/id_ed25519.pub" /root/.ssh/authorized_keys
put 644 "$fleet/known_hosts" /etc/ssh/ssh_known_hosts
put 600 "$fleet/aws" /root/.aws/credentials
put 644 "$fleet/config-$name.toml" /etc/cmdop-migrate/config.toml
put 600 "$fleet/keys" /var/lib/cmdop-migrate/keys
grep -q ' host-a$' /etc/hosts || cat "$fleet/hosts" >> /etc/hosts
systemctl restart ssh
