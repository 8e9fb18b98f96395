# shellcheck shell=bash
# needs: bin/farblk
# Disconnect takes under 5 s and leaves nothing; it refuses while a device is open, says who holds it, and can be
# forced, also when the target hangs. A connection whose process was killed is cleared away.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
mkdir -p "$scratch/files" "$scratch/mnt"
hold() { # FILE: opens it in a process called holder
  bash -c 'exec -a holder sleep 1000' <"$1" &
  holder=$!
  wait_for 3 test "/proc/$holder/fd/0" -ef "$1"
}
release() {
  kill "$holder"
  wait "$holder" 2>/dev/null
}
refused_while_open() { # NAME FILE
  hold "$2" || fail "$1: held"
  refuses "(in use|open|busy).*$holder" farblk disconnect -n "$nqn"
  attempt "$1: still usable" dd if="$2" of=/dev/null bs=4k count=1 status=none
}
for link in rxe siw; do
  connected "$link" -a "${address[$link]}" -n "$nqn" --export nbd
  device=$(export_of nbd)
  refused_while_open "$link, nbd" "$device"
  release
  is "$link: disconnect itself is no user" "farblk0 disconnected" "$(farblk disconnect farblk0 <"$device" 2>&1)"
  attempt "$link: nothing left" wait_for_nothing

  connected "$link" -a "${address[$link]}" -n "$nqn" --export nbd
  disconnected "$link"

  connected "$link" -a "${address[$link]}" -n "$nqn" --export nbd
  refused_while_open "$link, nbd" "$device"
  attempt "$link: disconnect --force" farblk disconnect -n "$nqn" --force
  release # the kernel keeps the device's number until then
  attempt "$link: nothing left" wait_for_nothing

  connected "$link" -a "${address[$link]}" -n "$nqn" --export nbd
  attempt "$link: mkfs" mkfs.ext4 -q -F "$device"
  attempt "$link: mount" mount "$device" "$scratch/mnt"
  refuses "mounted|in use" farblk disconnect -d "$device"
  attempt "$link: umount" umount "$scratch/mnt"
  attempt "$link: disconnect by the device (H16)" farblk disconnect -d "$device"
  attempt "$link: nothing left" wait_for_nothing

  connected "$link" -a "${address[$link]}" -n "$nqn" --export "fuse=$scratch/files"
  refused_while_open "$link, fuse" "$scratch/files/n1"
  attempt "$link: disconnect --force" farblk disconnect --force -n "$nqn"
  release
  attempt "$link: nothing left" wait_for_nothing
done

# The target answers no I/O, and processes wait for it. Keep-alives go on.
hung=nqn.2024-01.org.example:hung
d=$(disk disk2 16) || bail "a disk"
d=$(mapped hung "$d") || bail "a device that can hang"
must subsystem "$hung" "$d"
for id in 1 2; do must ln -s "$nvmet/subsystems/$hung" "$nvmet/ports/$id/subsystems/"; done
waits() { [[ $(state_of "$1") == D ]]; } # PID
gone() { ! kill -0 "$1"; }               # PID
for link in rxe siw; do
  connected "$link, hung" -a "${address[$link]}" -n "$hung" --export nbd
  device=$(export_of nbd)
  must dmsetup suspend --nolockfs hung
  dd if="$device" of=/dev/null bs=4k count=1 iflag=direct status=none 2>/dev/null &
  reader=$!
  dd if=/dev/zero of="$device" bs=4k count=1 seek=100 conv=fsync status=none 2>/dev/null &
  writer=$!
  for p in "$reader" "$writer"; do wait_for 5 waits "$p" || fail "$link, hung: process $p waits"; done
  refuses 'in use|open' farblk disconnect -n "$hung"
  begin=$(date +%s%3N)
  attempt "$link, hung: disconnect --force (H23)" farblk disconnect -n "$hung" --force
  took=$(($(date +%s%3N) - begin))
  # 4 s by design: 2.5 s for requests that do not end, 1.5 s for the controller; the rest is for slow starts of processes
  if ((took < 5500)); then ok "$link, hung: it took $took ms"; else fail "$link, hung: it took $took ms"; fi
  for p in "$reader" "$writer"; do
    if ! wait_for 2 gone "$p"; then
      fail "$link, hung: process $p still waits, in state $(state_of "$p")"
    elif wait "$p"; then
      fail "$link, hung: process $p saw no error"
    else
      ok "$link, hung: a process that waited got an error"
    fi
  done
  attempt "$link, hung: nothing left" wait_for_nothing
  must dmsetup resume hung
done

connected "killed" -a "${address[siw]}" -n "$nqn" --export nbd --export "fuse=$scratch/files"
attempt "killed: the process" killed
attempt "killed: disconnect --all clears away (E17)" farblk disconnect --all
attempt "killed: list is well" farblk list
attempt "killed: nothing left" wait_for_nothing

connected "orphan" -a "${address[siw]}" -n "$nqn" --export nbd
device=$(export_of nbd)
attempt "orphan: the process is killed" killed
must rm -r /run/farblk/farblk0
is "orphan: disconnect --all clears a device that no folder tells of" "$device disconnected" "$(farblk disconnect --all)"
attempt "orphan: nothing left" wait_for_nothing

connected "after" -a "${address[siw]}" -n "$nqn" --export nbd --export "fuse=$scratch/files"
disconnected "after"
refuses "not connected|no connection|no such" farblk disconnect -n "$nqn"
