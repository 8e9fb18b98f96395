# shellcheck shell=bash
# needs: bin/farblk
# The main job over RoCE and iWARP: discover, then a kernel block device that fio, ext4 and fsck are content with.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
for link in rxe siw; do
  found=$(farblk discover -a "${address[$link]}") || fail "$link: discover"
  attempt "$link: discover names the subsystem" grep -qF "$nqn" <<<"$found"
  nbd_round "$link" "${address[$link]}"
done

# E01: those who write to a file system on the device are short of memory; write-back, which needs the process, goes on.
name=E01
connected "$name" -a "${address[siw]}" -n "$nqn" --export nbd
device=$(export_of nbd) || bail "$name: no device"
process=$(sessions)
is "$name: the out-of-memory killer passes the process by" -1000 "$(cat "/proc/$process/oom_score_adj")"
at_least "$name: kB of its memory are locked" 1024 "$(awk '/^VmLck:/ {print $2}' "/proc/$process/status")"
no_flusher() { # PID: its threads without PF_MEMALLOC_NOIO, which PR_SET_IO_FLUSHER sets
  local f field
  for f in "/proc/$1"/task/*/stat; do
    { read -r -a field <"$f"; } 2>/dev/null || continue # it has ended
    ((field[8] & 0x80000)) || echo "$f"
  done
}
is "$name: all of its threads are I/O flushers" "" "$(no_flusher "$process")"
groups=$scratch/groups mnt=$scratch/mnt
mkdir -p "$groups" "$mnt"
must mount -t cgroup2 none "$groups"
echo +memory >"$groups/cgroup.subtree_control"
mkdir "$groups/tight"
attempt "$name: a group with 24 MiB of memory" bash -c "echo 24M >'$groups/tight/memory.max'"
attempt "$name: mkfs" mkfs.ext4 -q -F "$device"
attempt "$name: mount" mount "$device" "$mnt"
attempt "$name: 32 MiB of buffered writes in that group" timeout 60 bash -c \
  "echo 0 >'$groups/tight/cgroup.procs' && exec dd if=/dev/zero of='$mnt/f' bs=1M count=32 conv=fsync status=none"
attempt "$name: umount" umount "$mnt"
disconnected "$name"
rmdir "$groups/tight"
umount "$groups"
