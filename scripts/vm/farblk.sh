# shellcheck shell=bash
# Sourced by a guest test: farblk in it, and the rounds that several tests make through what it exports.
# A test says for each round a LINK (rxe or siw, where the target listens) and, in $way, connect's further options.
# shellcheck source=scripts/vm/target.sh
. "${BASH_SOURCE[0]%/*}/target.sh"

top=$(cd "${BASH_SOURCE[0]%/*}/../.." && pwd)
PATH=${FARBLK%/*}:$PATH
farblk version >/dev/null || bail "farblk does not start" # and is in memory from here on: its first start is none to time
nqn=nqn.2024-01.org.example:disk
scratch=/run/scratch
mkdir -p "$scratch"
way=()    # connect's options in every round, such as --provider iwarp
here=()   # a prefix for farblk and for what it exports to: (on NAME), to be on another host

# connected NAME [OPTION...]: farblk connect; what it says, in JSON, goes to said, and the test ends if it fails.
said=$scratch/said
connected() {
  local name=$1
  shift
  rm -f "$said"
  attempt "$name: connect $*" "${here[@]}" bash -c 'farblk connect -o json "$@" >'"$said" _ "${way[@]}" "$@" || true
  [[ -s $said ]] || bail "$name: connect printed nothing"
}
field() { jq -er "$1" "$said"; } # JQ_FILTER: of what connect said
export_of() { # KIND [NSID]: the path of that export
  field ".namespaces[] | select(.nsid == ${2:-1}) | .exports[] | select(.kind == \"$1\") | .path"
}
uri_of() { # KIND [NSID]
  field ".namespaces[] | select(.nsid == ${2:-1}) | .exports[] | select(.kind == \"$1\") | .uri // empty"
}
disconnected() { # NAME [NQN]: in under 5 s, with nothing left
  local begin took
  begin=$(date +%s%3N)
  attempt "$1: disconnect" "${here[@]}" farblk disconnect -n "${2:-$nqn}"
  took=$(($(date +%s%3N) - begin))
  if ((took < 5000)); then ok "$1: disconnect took $took ms"; else fail "$1: disconnect took $took ms"; fi
  attempt "$1: nothing left" wait_for_nothing
}
wait_for_nothing() { wait_for 5 nothing_left || nothing_left; }
# killed: kills the process of the only connection, farblk0, and waits until it holds nothing any more: a process that
# ends has no arguments in /proc before it closes its files, and with them its locks.
killed() {
  local p lock
  p=$(sessions)
  kill -9 "$p" || return
  for lock in /run/farblk/farblk0/lock /run/lock/farblk/nbd*.lock; do
    [[ ! -e $lock ]] || wait_for 5 flock -n -s "$lock" true || return
  done
}

# --- fio ---------------------------------------------------------------------------------------------------------

# fio_verify NAME FILE|URI [FIO OPTION...]: writes and reads back with checksums: random and sequential, blocks of
# many sizes from $smallest (512) to 1 MiB, 4 jobs at depth 32, each on its own 8 MiB.
fio_verify() {
  local name=$1 to=(--filename="$2" --direct=1 --ioengine=libaio) small=${smallest:-512} pattern
  [[ $2 != nbd*:* ]] || to=(--ioengine=nbd --uri="$2")
  shift 2
  local common=(--numjobs=4 --thread --iodepth=32 --size=8m --offset_increment=8m --verify=crc32c --verify_fatal=1
    --do_verify=1 --verify_state_save=0 --group_reporting --minimal --output="$scratch/fio.out")
  for pattern in randwrite write; do
    attempt "$name: fio $pattern, verified" "${here[@]}" fio --name=verify --rw=$pattern "${to[@]}" "${common[@]}" \
      --bssplit="$small/10:4k/40:12k/10:64k/20:256k/10:1m/10" "$@"
  done
}

# --- file systems --------------------------------------------------------------------------------------------------

# tree: a source tree in RAM, with the checksums of its files.
tree=$scratch/tree
make_tree() {
  mkdir -p "$tree"
  (cd "$top" && find . -name bin -prune -o -name .git -prune -o -type f -size -200k -print0 | head -z -n 300 | xargs -0 cp --parents -t "$tree")
  (cd "$tree" && find . -type f -print0 | sort -z | xargs -0 sha256sum) >"$scratch/tree.sums"
  [[ $(wc -l <"$scratch/tree.sums") -ge 20 ]]
}

# file_system NAME DEVICE: mkfs, mount, copy the tree, umount, check, mount again, compare.
file_system() {
  local name=$1 device=$2 at=$scratch/fs
  [[ -s $scratch/tree.sums ]] || make_tree || bail "no source tree to copy"
  mkdir -p "$at"
  attempt "$name: mkfs.ext4" mkfs.ext4 -q -F "$device"
  attempt "$name: mount" mount "$device" "$at" || return
  mountpoint -q "$at" || return
  attempt "$name: a source tree copied in" cp -a "$tree" "$at/"
  attempt "$name: umount" umount "$at"
  attempt "$name: fsck clean" fsck.ext4 -f -n "$device"
  attempt "$name: mount again" mount "$device" "$at"
  attempt "$name: checksums equal" bash -c "cd '$at/tree' && sha256sum --quiet -c '$scratch/tree.sums'"
  attempt "$name: umount again" umount "$at"
}

# --- one round through each export -----------------------------------------------------------------------------------

nbd_round() { # NAME LINK_ADDRESS
  connected "$1" -a "$2" -n "$nqn" --export nbd
  local device
  device=$(export_of nbd) || bail "$1: no nbd device in what connect said"
  is "$1: the device's size as soon as connect returns (E03)" "$disk_bytes" "$(blockdev --getsize64 "$device")"
  fio_verify "$1" "$device"
  file_system "$1" "$device"
  disconnected "$1"
}

fuse_round() { # NAME LINK_ADDRESS
  local folder=$scratch/files file loop
  mkdir -p "$folder"
  connected "$1" -a "$2" -n "$nqn" --export "fuse=$folder"
  file=$(export_of fuse) || bail "$1: no file in what connect said"
  is "$1: the file is n1" "$folder/n1" "$file"
  is "$1: the file's size" "$disk_bytes" "$(stat -c %s "$file")"
  fio_verify "$1" "$file" --file_service_type=sequential
  loop=$(losetup -f --show "$file") || bail "$1: losetup"
  file_system "$1" "$loop"
  attempt "$1: loop device freed" losetup -d "$loop"
  disconnected "$1"
}

socket_round() { # NAME LINK_ADDRESS
  local socket=$scratch/nbd.sock uri
  connected "$1" -a "$2" -n "$nqn" --export "nbd-unix=$socket"
  uri=$(uri_of nbd-unix)
  [[ -n $uri ]] || bail "$1: no URI in what connect said"
  "${here[@]}" nbdinfo --json "$uri" >"$scratch/nbdinfo.json" 2>"$scratch/nbdinfo.err"
  is "$1: nbdinfo's size" "$disk_bytes" "$(jq -r '.exports[0]["export-size"]' "$scratch/nbdinfo.json")"
  for can in flush fua trim zero multi-conn; do
    attempt "$1: nbdinfo --can $can" "${here[@]}" nbdinfo --can "$can" "$uri"
  done
  attempt "$1: nbdinfo --list" "${here[@]}" nbdinfo --list "nbd+unix:///?socket=$socket"
  attempt "$1: nbdinfo --map" "${here[@]}" nbdinfo --map "$uri"
  fio_verify "$1" "$uri"
  head -c "$disk_bytes" /dev/urandom >"$scratch/image"
  attempt "$1: nbdcopy in" "${here[@]}" nbdcopy --flush "$scratch/image" "$uri"
  attempt "$1: qemu-img compare" "${here[@]}" qemu-img compare -f raw -F raw "$scratch/image" "$uri"
  rm -f "$scratch/back"
  attempt "$1: nbdcopy out" "${here[@]}" nbdcopy "$uri" "$scratch/back"
  attempt "$1: what came back is what went in" cmp "$scratch/image" "$scratch/back"
  rm -f "$scratch/image" "$scratch/back"
  disconnected "$1"
}

# interop_round NAME LINK_ADDRESS EXPORT: what farblk wrote the kernel's own initiator reads, and the reverse, with
# the same SHA-256 over the whole namespace.
interop_round() {
  local name=$1 device sum
  connected "$name" -a "$2" -n "$nqn" --export "$3"
  device=$(export_of "${3%%=*}") || bail "$name: no export in what connect said"
  attempt "$name: farblk writes" "${here[@]}" dd if=/dev/urandom of="$device" bs=1M count=$((disk_bytes >> 20)) iflag=fullblock oflag=direct conv=fsync,notrunc status=none
  sum=$(checksum "$device")
  disconnected "$name"
  attempt "$name: the kernel connects" nvme connect -t rdma -a "$2" -s 4420 -n "$nqn" -i 2
  wait_for 5 kernel_device 1 || bail "$name: the kernel shows no device"
  is "$name: the kernel reads what farblk wrote" "$sum" "$(checksum "$(kernel_device 1)")"
  attempt "$name: the kernel writes" dd if=/dev/urandom of="$(kernel_device 1)" bs=1M count=$((disk_bytes >> 20)) iflag=fullblock oflag=direct conv=fsync status=none
  sum=$(checksum "$(kernel_device 1)")
  attempt "$name: the kernel disconnects" nvme disconnect -n "$nqn"
  connected "$name" -a "$2" -n "$nqn" --export "$3"
  device=$(export_of "${3%%=*}") || bail "$name: no export in what connect said"
  is "$name: farblk reads what the kernel wrote" "$sum" "$(checksum "$device")"
  disconnected "$name"
}

# one_disk [LINK...]: the links, and subsystem $nqn with one namespace, 48 MiB, on a port at each.
disk_bytes=$((48 << 20))
one_disk() {
  local d id=0 l
  (($#)) || set -- rxe siw
  must links "$@"
  must modprobe nbd max_part=0
  must modprobe -a fuse loop
  d=$(disk disk1 $((disk_bytes >> 20))) || bail "no disk"
  must subsystem -s SERIAL1 "$nqn" "$d"
  for l; do must port $((++id)) rdma "${address[$l]}" 4420 "$nqn"; done
}
