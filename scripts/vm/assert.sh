# shellcheck shell=bash
# Sourced by a guest test: assertions, with one line of TAP each. When the script ends, the plan and a summary are
# printed; its exit status is 1 if an assertion failed, or if there was none.

assert_count=0 assert_failed=0
assert_last=$SECONDS
ok() { # NAME
  echo "ok $((++assert_count)) - $1$(assert_took)"
  assert_last=$SECONDS
}
assert_took() { ((SECONDS - assert_last < 2)) || echo " # $((SECONDS - assert_last)) s"; }
fail() { # NAME [WHY]
  echo "not ok $((++assert_count)) - $1$(assert_took)"
  assert_last=$SECONDS
  ((++assert_failed))
  [[ -z ${2:-} ]] || awk '{print "#   " $0}' <<<"$2" | tail -n 30
  return 1
}
bail() { # WHY: nothing further can be shown
  fail "$@"
  exit 1
}

# attempt NAME CMD...: asserts that CMD succeeds, and goes on.
attempt() {
  local name=$1 said
  shift
  if said=$("$@" 2>&1); then ok "$name"; else fail "$name" "exit status $? of: $*"$'\n'"$said"; fi
}

# must CMD...: like attempt, named by its own words, but the script ends when it fails.
must() { attempt "$*" "$@" || exit 1; }

# refuses PATTERN CMD...: CMD ends within 5 s (REFUSE_SECONDS) with an exit status other than 0, nothing on standard
# output, and exactly one line on standard error, which matches the extended regular expression PATTERN.
refuses() {
  local pattern=$1 status=0 begin took out err bound=${REFUSE_SECONDS:-5}
  shift
  local name="refuses: $*"
  # timeout runs programs; a function is given to a shell of its own
  [[ $(type -t "$1") != function ]] || set -- bash -c "$(declare -f "$1"); \"\$@\"" _ "$@"
  begin=$(date +%s%3N)
  out=$(timeout -k 1 $((bound + 10)) "$@" 2>/run/assert.err </dev/null) || status=$?
  took=$(($(date +%s%3N) - begin))
  err=$(cat /run/assert.err)
  local shown="exit status $status after $took ms; standard error:"$'\n'"$err"
  [[ -z $out ]] || shown+=$'\n'"standard output:"$'\n'"$out"
  if ((status == 0)); then fail "$name" "succeeded: $shown"
  elif ((took > bound * 1000)); then fail "$name" "took longer than $bound s: $shown"
  elif [[ -z $err || $err == *$'\n'* ]]; then fail "$name" "not one line: $shown"
  elif [[ -n $out ]]; then fail "$name" "spoke on standard output: $shown"
  elif ! grep -Eiq -- "$pattern" <<<"$err"; then fail "$name" "does not match /$pattern/: $shown"
  else ok "$name"; fi
}

is() { # NAME WANTED GOT
  if [[ $2 == "$3" ]]; then ok "$1"; else fail "$1" "wanted: $2"$'\n'"got:    $3"; fi
}
at_least() { # NAME LEAST GOT
  if [[ $3 =~ ^[0-9]+$ ]] && (($3 >= $2)); then ok "$1 ($3)"; else fail "$1" "wanted at least $2, got ${3:-nothing}"; fi
}

# wait_for SECONDS CMD...: runs CMD until it succeeds; fails when SECONDS have passed.
wait_for() {
  local end=$(($(date +%s%3N) + $1 * 1000))
  shift
  until "$@" >/dev/null 2>&1; do
    (($(date +%s%3N) < end)) || return 1
    sleep 0.1
  done
}

# shellcheck disable=SC2317 # called by the trap
assert_summary() {
  local status=$?
  trap - EXIT
  [[ $(type -t at_end) != function ]] || at_end
  echo "1..$assert_count"
  echo "# $((assert_count - assert_failed)) ok, $assert_failed not ok, $SECONDS s"
  ((status == 0)) || exit "$status"
  ((assert_failed == 0 && assert_count > 0)) || exit 1
}
trap assert_summary EXIT
