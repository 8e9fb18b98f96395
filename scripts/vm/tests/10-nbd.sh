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
