# shellcheck shell=bash
# Sourced: which of the installed kernels the virtual machine boots.

# vm_kernel prints the release of a kernel that has an image and the drivers the tests need, or nothing. 6.12 first,
# because the figures in the documentation were taken on it; else the newest from 6.1 on.
vm_kernel() {
  local release best='' series
  [[ $(uname -m) == x86_64 ]] || return 0
  for release in $(find /lib/modules -mindepth 1 -maxdepth 1 -printf '%f\n' 2>/dev/null | sort -V); do
    vm_kernel_fits "$release" || continue
    series=${release%%[-+]*}
    [[ $best == 6.12.* && $series != 6.12.* ]] || best=$release
  done
  [[ -z $best ]] || echo "$best"
}

vm_kernel_fits() { # RELEASE
  local driver
  [[ -n $(vm_kernel_image "$1") ]] || return 1
  [[ $(printf '%s\n6.1\n' "$1" | sort -V | head -n 1) == 6.1 ]] || return 1
  for driver in nvmet-rdma nvme-rdma rdma_rxe nbd null_blk dm-delay 9p overlay; do
    vm_kernel_has "$1" "$driver" || return 1
  done
  vm_kernel_has "$1" siw || [[ -n $(vm_siw_source "$1") && -e /lib/modules/$1/build ]]
}

vm_kernel_has() { # RELEASE DRIVER
  grep -qs "/$2\.ko" "/lib/modules/$1/modules.order" "/lib/modules/$1/modules.builtin" "/lib/modules/$1/modules.dep"
}

vm_kernel_image() { # RELEASE
  local f
  for f in "/boot/vmlinuz-$1" "/lib/modules/$1/vmlinuz"; do
    [[ -r $f ]] && { echo "$f"; return; }
  done
}

# vm_siw_source prints the source archive of that kernel's series, from which siw can be built.
vm_siw_source() { # RELEASE
  local f
  for f in "/usr/src/linux-source-$(cut -d. -f1,2 <<<"$1").tar".*; do
    [[ -r $f ]] && { echo "$f"; return; }
  done
}
