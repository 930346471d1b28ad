#!/usr/bin/env bash
# Builds Spile as one static file, and shows that it works without any system call that is newer than Linux 4.19.
#
# With musl where Rust's library for musl is installed (scripts/setup.sh static tries to), else with glibc. docs/engines.md
# says what differs.
set -euo pipefail

readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly MACHINE="$(uname -m)"

say() { printf 'static: %s\n' "$*" >&2; }

# Succeeds when Rust's library is installed for the target $1.
has_library() {
  compgen -G "$(rustc --print sysroot)/lib/rustlib/$1/lib/libstd-*.rlib" >/dev/null
}

choose_target() {
  local musl="$MACHINE-unknown-linux-musl"
  if has_library "$musl" && command -v musl-gcc >/dev/null; then
    printf '%s\n' "$musl"
  else
    say "Rust's library for $musl or musl-gcc is missing: with glibc instead"
    printf '%s\n' "$MACHINE-unknown-linux-gnu"
  fi
}

# A static program asks for no loader of libraries.
assert_static() {
  local headers
  headers="$(readelf --program-headers "$1")"
  if [[ $headers == *INTERP* ]]; then
    say "$1 needs shared libraries"
    return 1
  fi
  file --brief "$1" 2>/dev/null || true
  ldd "$1" 2>&1 || true
}

main() {
  local target binary
  cd "$ROOT"
  target="$(choose_target)"
  # The target is named even where it is this machine's own: the flag must not reach build scripts and macros.
  RUSTFLAGS='-C target-feature=+crt-static' cargo build --release --locked --package spile --target "$target"
  binary="${CARGO_TARGET_DIR:-target}/$target/release/spile"
  assert_static "$binary"
  python3 tests/peer/old_kernel.py "$binary" demo --seconds 2
  say "$binary"
}

main "$@"
