#!/usr/bin/env bash
# Install what the tests of the page need and this machine lacks: install_for_tests.sh node chromium
# As root on Debian and its like with apt-get; elsewhere it says what is missing.
set -euo pipefail

has_chromium() {
    # The tests take the first of these.
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

has_node() {
    command -v npm && command -v node && [ "$(node --version | sed 's/^v\([0-9]*\).*/\1/')" -ge 20 ]
}

missing() {
    for tool in "$@"; do
        "has_$tool" > /dev/null || echo "$tool"
    done
}

explain() {
    echo "The tests of the page need Node.js 20 or later with npm, and Chromium. Missing here: $*." >&2
    echo "Install it, for instance as root on Debian 13: apt-get install nodejs npm chromium" >&2
    exit 1
}

lacking=$(missing "$@")
[ -n "$lacking" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    explain $lacking
fi
packages=()
for tool in $lacking; do
    case $tool in
        chromium) packages+=(chromium) ;;
        node) packages+=(nodejs npm) ;;
    esac
done
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "${packages[@]}"
lacking=$(missing "$@")  # an older distribution has an older Node.js
[ -z "$lacking" ] || explain $lacking
