#!/usr/bin/env bash
# A real SLURM on loopback: one munged, one slurmctld, two slurmd, all of them children of this script and under $1.
#
#   faketime -f "+0 x10" tests/e2e/slurm/up.sh DIRECTORY PORT
#
# Nothing outside DIRECTORY is written; a munge or SLURM that the machine has of its own is not touched. Under faketime
# the daemons share a clock that runs tenfold: limits of whole minutes, looked at every 30 s, take 6 s and 3 s. The
# script stays, since that clock lives as long as it does; `ready` in DIRECTORY says that every node answers.
set -euo pipefail
dir=$1
port=$2
nodes=2
export PATH="$PATH:/usr/sbin:/sbin" SLURM_CONF="$dir/slurm.conf"
mkdir -p "$dir"/{state,log,run}

dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 status=none
chmod 400 "$dir/munge.key"
munged --key-file="$dir/munge.key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed" --force 2>>"$dir/log/munged.err"

# Where the warning of a preempted job is asked for, and what needs no cgroups, depends on the version.
version=$(slurmctld -V | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
if [ "$(printf '%s\n23.02\n' "$version" | sort -V | head -n 1)" = 23.02 ]; then
    preempt="PreemptParameters=send_user_signal"
    echo "CgroupPlugin=disabled" >"$dir/cgroup.conf"
else
    preempt="SlurmctldParameters=preempt_send_user_signal"
fi

host=$(hostname -s)
{
    cat <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is queued again waits so long before it may start.
AuthInfo=socket=$dir/run/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# More cores than the machine has: emulated nodes only need to believe in them.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,sched_min_interval=0,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$preempt
JobRequeue=1
KillWait=60
OverTimeLimit=0
MinJobAge=3000
ReturnToService=2
SlurmctldTimeout=300
SlurmdTimeout=100
BatchStartTimeout=100
MessageTimeout=60
TCPTimeout=20
CompleteWait=0
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=600 PriorityTier=1 PreemptMode=REQUEUE State=UP GraceTime=300
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE DefaultTime=600 PriorityTier=10 PreemptMode=OFF State=UP
CONF
    for i in $(seq 1 $nodes); do
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + i)) CPUs=8 RealMemory=1000 State=UNKNOWN"
    done
} >"$SLURM_CONF"

slurmctld -i
for i in $(seq 1 $nodes); do
    mkdir -p "$dir/spool-n$i"
    slurmd -N "n$i"
done
# Started again by this script, so that it has the same clock: see `again` in cluster.py.
until [ "$(sinfo -h -N -p main -o '%t' | grep -cx idle)" = $nodes ]; do sleep 1; done
touch "$dir/ready"
while sleep 5; do
    if [ -e "$dir/again" ]; then
        slurmd -N "$(cat "$dir/again")"
        rm "$dir/again"
    fi
done
