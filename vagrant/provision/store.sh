#!/usr/bin/env bash
# What the hosts share: an S3 server, etcd, a relay; each a service of its own.
#
#   store.sh NAME
set -euo pipefail
name=$1 fleet=/vagrant/fleet
address=$(awk -v name="$name" '$2 == name {print $1}' "$fleet/hosts")

install -D -m 600 "$fleet/relay.pem" /etc/cmdop-migrate/relay.pem
install -D -m 600 "$fleet/s3.json" /srv/s3/s3.json
install -d -m 700 /srv/s3/data /srv/etcd

unit() { # NAME COMMAND…
    local name=$1
    shift
    printf '[Unit]\nAfter=network.target\n[Service]\nExecStart=%s\nRestart=always\nRestartSec=1\nWorkingDirectory=/srv\n[Install]\nWantedBy=multi-user.target\n' \
        "$*" > "/etc/systemd/system/$name.service"
}
unit fleet-s3 /opt/cmdop-migrate/bin/weed mini -dir=/srv/s3/data -ip="$address" -ip.bind="$address" -master.telemetry=false -webdav=false \
    -admin.ui=false -s3.port=8333 -s3.port.iceberg=0 -s3.port.lance=0 -s3.config=/srv/s3/s3.json
# Emulated, it is slower than its own heartbeats expect.
unit fleet-etcd /usr/bin/etcd --name="$name" --data-dir=/srv/etcd --listen-client-urls="http://$address:2379" \
    --advertise-client-urls="http://$address:2379" --listen-peer-urls=http://127.0.0.1:2380 \
    --initial-advertise-peer-urls=http://127.0.0.1:2380 --initial-cluster="$name=http://127.0.0.1:2380" \
    --heartbeat-interval=500 --election-timeout=5000
mkdir -p /etc/systemd/system/cmdop-migrate-relay.service.d
printf '[Service]\nExecStart=\nExecStart=/usr/local/bin/cmdop-migrate relay serve --listen 0.0.0.0:7443 --cert /etc/cmdop-migrate/relay.pem\n' \
    > /etc/systemd/system/cmdop-migrate-relay.service.d/fleet.conf
systemctl daemon-reload
systemctl --quiet enable --now fleet-etcd fleet-s3 cmdop-migrate-relay

# The bucket; until there is one, the server is not ready.
/opt/cmdop-migrate/bin/python - "$address" << 'EOF'
import sys, time

import boto3
import botocore.exceptions

client = boto3.client("s3", endpoint_url=f"http://{sys.argv[1]}:8333", region_name="us-east-1")
for _ in range(150):
    try:
        client.create_bucket(Bucket="fleet")
    except client.exceptions.BucketAlreadyExists:
        break
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        trouble = error
        time.sleep(2)
    else:
        break
else:
    sys.exit(f"the S3 server does not get ready: {trouble}")
EOF
