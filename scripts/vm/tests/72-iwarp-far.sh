# shellcheck shell=bash
# needs: bin/farblk
# limit: 500
# Software iWARP from a host that has no RDMA device, over a cable with an MTU of 1500 and of 9000 bytes, with
# CRC32C on and off. That host sees the network only: files and NBD sockets are its exports.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

must two_hosts far 1500
must modprobe -a fuse loop
d=$(disk disk1 $((disk_bytes >> 20))) || bail "no disk"
must subsystem "$nqn" "$d"
must port 1 rdma "${address[cable]}" 4420 "$nqn"
here=(on far)
is "that host has no RDMA device" "" "$(on far rdma link show)"

connected "left to itself" -a "${address[cable]}" -n "$nqn" --export none
is "left to itself: it takes software iWARP" iwarp "$(field .provider)"
disconnected "left to itself"
refuses 'no RDMA device' on far farblk connect --provider verbs -a "${address[cable]}" -n "$nqn" --export none

for mtu in 1500 9000; do
  must cable_mtu far $mtu
  way=(--provider iwarp)
  fuse_round "MTU $mtu, CRC on" "${address[cable]}"
  way=(--provider iwarp --disable-crc)
  socket_round "MTU $mtu, CRC off" "${address[cable]}"
done
way=(--provider iwarp)
socket_round "MTU 9000, CRC on" "${address[cable]}"
