# shellcheck shell=bash
# needs: bin/farblk
# limit: 500
# The other direction: Linux's own initiator on farblk's target, over siw to software iWARP, which runs where there is
# no RDMA device, and over rxe to RDMA hardware's interface.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

must two_hosts far 1500
must links rxe
file=$scratch/disk
must mkfifo "$scratch/control"
has_size() { [[ $(blockdev --getsize64 "$(kernel_device "$1")") == "$2" ]]; } # NSID BYTES
gone() { ! kernel_device "$1"; }

# start_target [PREFIX...] -- ADDRESS PROVIDER: its commands go to descriptor 5
start_target() {
  local prefix=() address provider
  while [[ $1 != -- ]]; do prefix+=("$1") && shift; done
  address=$2 provider=$3
  rm -f "$file"
  truncate -s 16M "$file"
  "${prefix[@]}" farblk target --control -v --listen "$address:4420" -n "$nqn" --file "$file" --provider "$provider" \
    <"$scratch/control" >"$scratch/target.log" 2>&1 &
  target=$!
  exec 5>"$scratch/control"
  wait_for 10 listening "$provider" || bail "the target does not listen" "$(cat "$scratch/target.log")"
}
listening() {
  kill -0 "$target" || exit 1
  if [[ $1 == iwarp ]]; then on far ss -Hltn 'sport = :4420' | grep -q .; else rdma resource show cm_id | grep -q 'LISTEN.*4420'; fi
}
# sane NAME ADDRESS: what nvme-cli shows of it
sane() {
  attempt "$1: nvme discover" bash -c "nvme discover -t rdma -a $2 -s 4420 | grep -F '$nqn'"
  attempt "$1: nvme connect" nvme connect -t rdma -a "$2" -s 4420 -n "$nqn" -i 2
  wait_for 5 kernel_device 1 || bail "$1: the kernel shows no device" "$(dmesg | tail)"
  device=$(kernel_device 1)
  local controller
  controller=/dev/$(basename "$(dirname "$(grep -lx "$nqn" /sys/class/nvme/nvme*/subsysnqn | head -n 1)")")
  attempt "$1: list-subsys" bash -c "nvme list-subsys | grep -F '$nqn' && nvme list-subsys | grep -F '$2'"
  nvme id-ctrl "$controller" -o json >"$scratch/ctrl" || fail "$1: id-ctrl"
  is "$1: id-ctrl's subsystem" "$nqn" "$(jq -r .subnqn "$scratch/ctrl")"
  attempt "$1: id-ctrl has a model, a serial and a limit" jq -e '(.mn | test("[a-z]"; "i")) and (.sn | test("[0-9a-z]"; "i")) and .mdts > 0 and .ioccsz >= 4' "$scratch/ctrl"
  nvme id-ns "$device" -o json >"$scratch/ns" || fail "$1: id-ns"
  is "$1: id-ns' size" $((16 << 20)) "$(jq '.nsze * (if .lbafs[.flbas % 16].ds == 12 then 4096 else 512 end)' "$scratch/ns")"
}

for kind in siw rxe; do
  if [[ $kind == siw ]]; then
    at=10.9.2.2
    start_target nsenter --net=/run/netns/far -- "$at" iwarp
  else
    at=${address[rxe]}
    start_target -- "$at" verbs
  fi
  sane "$kind" "$at"
  fio_verify "$kind" "$device" --numjobs=2 --size=4m --offset_increment=4m
  file_system "$kind" "$device"

  echo "resize 1 24M" >&5
  attempt "$kind: the kernel sees the namespace grow" wait_for 10 has_size 1 $((24 << 20))
  echo "add 8M" >&5
  attempt "$kind: the kernel sees a second one" wait_for 10 has_size 2 $((8 << 20))
  attempt "$kind: it can be written" dd if=/dev/urandom of="$(kernel_device 2)" bs=1M count=8 oflag=direct status=none
  echo "remove 2" >&5
  attempt "$kind: the kernel sees it go" wait_for 10 gone 2

  attempt "$kind: nvme disconnect" nvme disconnect -n "$nqn"
  kill "$target"
  exec 5>&-
  if wait "$target"; then ok "$kind: the target ends well"; else fail "$kind: the target ends well" "$(tail "$scratch/target.log")"; fi
done
