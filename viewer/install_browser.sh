#!/usr/bin/env bash
# Install Chromium where the tests of the page can't find one. They take the first of these commands.
set -euo pipefail
for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" > /dev/null; then
        exit 0
    fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "The tests of the page need Chromium: install it, for instance as root with: apt-get install chromium" >&2
    exit 1
fi
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends chromium
