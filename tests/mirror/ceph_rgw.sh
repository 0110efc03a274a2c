#!/usr/bin/env bash
# A real Ceph RADOS Gateway on loopback: one monitor, one store daemon, one gateway, signatures checked.
#
#   ceph_rgw.sh up DIR GATEWAY_PORT MONITOR_PORT     keys tester / very-secret-key
#   ceph_rgw.sh down DIR
set -euo pipefail
action=$1 dir=$2
export PATH="$PATH:/usr/sbin:/sbin"

if [ "$action" = down ]; then
    for name in rgw osd mon; do
        file=$dir/run/$name.pid
        [ -s "$file" ] && kill -9 "$(cat "$file")" 2>/dev/null || true
    done
    exit 0
fi

port=$3 monitor=$4
mkdir -p "$dir"/{mon,osd,rgw,log,run}
cat >"$dir/ceph.conf" <<CONF
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$monitor/0]
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = $dir/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
osd objectstore = memstore
memstore device bytes = 2147483648
run dir = $dir/run
admin socket = $dir/run/\$cluster-\$name.asok
log file = $dir/log/\$name.log
mon data = $dir/mon
osd data = $dir/osd
rgw data = $dir/rgw
osd memory target = 939524096
rgw frontends = beast endpoint=127.0.0.1:$port
rgw dns name = 127.0.0.1
rgw thread pool size = 16
rgw enable usage log = false
rgw enable gc threads = false
rgw enable lc threads = false
mon data avail warn = 1
mon data avail crit = 1
CONF
conf=(-c "$dir/ceph.conf")
key() { ceph-authtool "$dir/keyring" "$@" >/dev/null; }
key --create-keyring --gen-key -n mon. --cap mon 'allow *'
key --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
key --gen-key -n client.rgw --cap mon 'allow rwx' --cap osd 'allow rwx'
key --gen-key -n osd.0 --cap mon 'allow *' --cap osd 'allow *'
fsid=$(awk '/fsid/{print $3}' "$dir/ceph.conf")
monmaptool --create --addv a "[v2:127.0.0.1:$monitor]" --fsid "$fsid" "$dir/monmap" --clobber >/dev/null
ceph-mon "${conf[@]}" --mkfs -i a --monmap "$dir/monmap" --keyring "$dir/keyring" >/dev/null
ceph-mon "${conf[@]}" -i a --pid-file "$dir/run/mon.pid"
for _ in $(seq 1 100); do timeout 5 ceph "${conf[@]}" mon stat >/dev/null 2>&1 && break; sleep 0.2; done
uuid=$(cat /proc/sys/kernel/random/uuid)
ceph "${conf[@]}" osd new "$uuid" >/dev/null
ceph-osd "${conf[@]}" -i 0 --mkfs --osd-uuid "$uuid" >/dev/null 2>&1
ceph-osd "${conf[@]}" -i 0 --pid-file "$dir/run/osd.pid" >/dev/null 2>&1
for _ in $(seq 1 200); do timeout 5 ceph "${conf[@]}" osd stat 2>/dev/null | grep -q '1 up' && break; sleep 0.2; done
radosgw "${conf[@]}" -n client.rgw --pid-file "$dir/run/rgw.pid" >/dev/null 2>&1
admin=(timeout 120 radosgw-admin "${conf[@]}" -n client.rgw)
"${admin[@]}" user create --uid tester --display-name tester --access-key tester --secret-key very-secret-key >/dev/null
"${admin[@]}" user create --uid reader --display-name reader --access-key reader --secret-key very-secret-key \
    --op-mask=read >/dev/null
