#!/usr/bin/env bash
# Install missing programs that tests require. Usage: install_for_tests.sh node chromium haproxy prometheus
# Installs with apt-get if run as root on a Debian-based system, otherwise lists what is missing.
set -euo pipefail

has_chromium() {
    # in the order of tests/viewer/conftest.py
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

has_node() {
    command -v npm && command -v node && [ "$(node --version | sed 's/^v\([0-9]*\).*/\1/')" -ge 20 ]
}

has_haproxy() {
    PATH=$PATH:/usr/sbin command -v haproxy
}

has_prometheus() {
    command -v prometheus && command -v promtool
}

missing() {
    for tool in "$@"; do
        "has_$tool" > /dev/null || echo "$tool"
    done
}

explain() {
    echo "Some tests require Node.js 20 or later with npm, Chromium, HAProxy and Prometheus. Missing: $*." >&2
    echo "On Debian 13, install them as root: apt-get install nodejs npm chromium haproxy prometheus" >&2
    exit 1
}

missing_tools=$(missing "$@")
[ -n "$missing_tools" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    explain $missing_tools
fi
packages=()
for tool in $missing_tools; do
    case $tool in
        chromium | haproxy | prometheus) packages+=("$tool") ;;
        node) packages+=(nodejs npm) ;;
    esac
done
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "${packages[@]}"
missing_tools=$(missing "$@")  # older distributions package older versions of Node.js
[ -z "$missing_tools" ] || explain $missing_tools
