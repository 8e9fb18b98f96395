# shellcheck shell=bash
# The bed itself: Linux's own initiator on Linux's own target, over rxe and over siw, with the tools that the other
# tests stand on. When this fails, look no further.
# shellcheck source=scripts/vm/target.sh
. "${BASH_SOURCE[0]%/*}/../target.sh"

must links
fast=$(disk fast 64) || bail "a disk"
big=$(disk big 64 4096) || bail "a disk with 4096-byte blocks"
grown=$(growable grown 32) || bail "a disk that grows"
must subsystem -s S1 nqn.2024-01.org.example:bed "$fast" "$big" "$grown"
must port 1 rdma "${address[rxe]}" 4420 nqn.2024-01.org.example:bed
must port 2 rdma "${address[siw]}" 4420 nqn.2024-01.org.example:bed
must subsystem -a nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555 nqn.2024-01.org.example:closed "$fast"
must port 3 rdma fd00:9::1 4421 nqn.2024-01.org.example:closed

for kind in rxe siw; do
  must nvme connect -t rdma -a "${address[$kind]}" -s 4420 -n nqn.2024-01.org.example:bed -i 2
  must wait_for 5 kernel_device 3
  is "$kind: queue pairs, both ends" 6 "$(rdma resource show qp link ${kind}0/1 | grep -c 'type RC state RTS')"
  is "$kind: block size" 4096 "$(blockdev --getss "$(kernel_device 2)")"
  d=$(kernel_device 1)
  trace_on
  must fio --name=v --filename="$d" --direct=1 --rw=randwrite --bs=4k --size=1m --ioengine=libaio --iodepth=8 --verify=crc32c --verify_state_save=0 --minimal --output=/dev/null
  must dd if=/dev/zero of="$d" bs=4k count=1 oflag=direct,dsync status=none
  must blkdiscard -l 65536 "$d"
  must blkdiscard -z -l 65536 "$d"
  trace_off
  at_least "$kind: writes seen at the target" 256 "$(trace_count 'qid=[12],.*nvme_cmd_write,')"
  at_least "$kind: a write with FUA, or a flush" 1 "$(trace_count 'nvme_cmd_write.*ctrl=0x4000|nvme_cmd_flush')"
  is "$kind: deallocate" 1 "$(trace_count nvme_cmd_dsm)"
  is "$kind: write zeroes" 1 "$(trace_count nvme_cmd_write_zeroes)"
  must grow "$grown" "$([[ $kind == rxe ]] && echo 48 || echo 64)"
  must nvme disconnect -n nqn.2024-01.org.example:bed
done

# two hosts on one cable
must two_hosts far 9000
is "no RDMA device in the other host" "" "$(on far rdma link show 2>/dev/null)"
must port 4 rdma 10.9.2.1 4420 nqn.2024-01.org.example:bed
# not siw's own port: a TCP connection that leaves it at once can make the kernel's siw fault when the port goes
attempt "the other host reaches this one" on far bash -c '(exec 3<>/dev/tcp/10.9.2.1/9) 2>&1 | grep -q refused'
must cable_mtu far 1500

refuses 'no such' cat "/no such file"
attempt "nothing left of farblk" nothing_left
must port_gone 4
must one_host far
must teardown
is "the target is empty" "" "$(find "$nvmet/ports" "$nvmet/subsystems" -mindepth 1 -maxdepth 1)"
