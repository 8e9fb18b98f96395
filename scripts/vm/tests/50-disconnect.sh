# shellcheck shell=bash
# needs: bin/farblk
# Disconnect takes under 5 s and leaves nothing; it refuses while a device is open, says who holds it, and can be
# forced. A connection whose process was killed is cleared away.
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

connected "killed" -a "${address[siw]}" -n "$nqn" --export nbd --export "fuse=$scratch/files"
kill -9 "$(sessions)"
attempt "killed: disconnect --all clears away (E17)" farblk disconnect --all
attempt "killed: list is well" farblk list
attempt "killed: nothing left" wait_for_nothing
connected "after" -a "${address[siw]}" -n "$nqn" --export nbd --export "fuse=$scratch/files"
disconnected "after"
refuses "not connected|no connection|no such" farblk disconnect -n "$nqn"
