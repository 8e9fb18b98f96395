# shellcheck shell=bash
# needs: bin/farblk
# The main job over RoCE and iWARP: a file, through FUSE, for fio and for a loop mount.
# shellcheck source=scripts/vm/farblk.sh
. "${BASH_SOURCE[0]%/*}/../farblk.sh"

one_disk
for link in rxe siw; do fuse_round "$link" "${address[$link]}"; done

# a file mounted over a file
touch "$scratch/one"
connected "file over file" -a "${address[siw]}" -n "$nqn" --export "fuse=$scratch/one"
is "file over file: its path" "$scratch/one" "$(export_of fuse)"
is "file over file: its size" "$disk_bytes" "$(stat -c %s "$scratch/one")"
attempt "file over file: write" dd if=/dev/urandom of="$scratch/one" bs=1M count=2 conv=notrunc,fsync status=none
disconnected "file over file"
is "file over file: the file beneath is empty again" 0 "$(stat -c %s "$scratch/one")"
