#!/usr/bin/env bash
# A host of the fleet: it may log in to the others, runs an agent, and has its place at the relay.
#
#   host.sh NAME
set -euo pipefail
name=$1 fleet=/vagrant/fleet

install -m 600 "$fleet/id_ed25519" /root/.ssh/id_ed25519 # hosts drive each other

# The lease store is on another machine, which may be still on its way.
store=$(awk '$2 == "store" {print $1}' "$fleet/hosts")
for ((second = 0; second < 600; second++)); do
    ! timeout 2 bash -c "echo > /dev/tcp/$store/2379" 2> /dev/null || break
    sleep 1
done
credential=/var/lib/cmdop-migrate/relay.credential
for ((tries = 0; tries < 20; tries++)); do # it may be there, and slow
    [ ! -s $credential ] || break
    cmdop-migrate relay token create --host "$name" --pin "$(cat "$fleet/relay.pin")" --out $credential > /dev/null || sleep 2
done
[ -s $credential ]
systemctl --quiet enable --now cmdop-migrate-agent
cmdop-migrate doctor > /var/log/cmdop-doctor.log || { cat /var/log/cmdop-doctor.log; exit 1; }
