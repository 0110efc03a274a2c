#!/usr/bin/env bash
# Install the Debian packages that tests of crashes, power cuts, SLURM and mirrors need: only as root, only on Debian,
# only what is missing. Elsewhere those tests skip and name the package; with CI=true they fail in its place.
set -euo pipefail

# command it brings : package
needed=(strace:strace mkfs.xfs:xfsprogs mkfs.ext4:e2fsprogs
    mkfs.exfat:exfatprogs mount.exfat-fuse:exfat-fuse
    ceph-mon:ceph-mon ceph-osd:ceph-osd ceph:ceph-common radosgw:radosgw
    slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge faketime:faketime)

missing=()
for entry in "${needed[@]}"; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${entry%%:*}" >/dev/null || missing+=("${entry##*:}")
done
if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]} (as root: apt-get install ${missing[*]}); the tests that need them will skip"
    exit 0
fi

install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1
}
echo "installing ${missing[*]}"
# The package lists may be old or absent; fetch them only if the first try says so.
install || { apt-get update -qq >/dev/null && install; } || echo "could not install ${missing[*]}"
