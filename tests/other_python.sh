#!/usr/bin/env bash
# Run the tests that need no PyTorch on Python 3.12 to 3.14, where they are installed: other_python.sh install|test.
# The tests serve the bundle that MINILM_BUNDLE names.
set -euo pipefail
cd "$(dirname "$0")/.."

# For the versions between the oldest and the newest, it is enough that packages install, all modules load, and a client
# talks to a server. The newest one also runs what depends on asyncio, threads, sockets, TLS, processes and signals: the
# client, the protocols, the life of a server. Values in messages are tested on the oldest version alone.
tests_of() {
    echo tests/test_modules.py tests/protos/test_tensors.py tests/client/test_client.py
    if [ "$1" = "$newest" ]; then
        echo tests/client/test_{async_client,calls,embed_iter,failures,no_connection,retries,several_servers,tls}.py \
            tests/client/core tests/hostile/test_{clients,floods,messages}.py \
            tests/cli/test_main.py tests/cli/test_json_output.py \
            tests/server/grpc_api/test_{calls,health,methods,receiving,status}.py \
            tests/server/http_api/test_{asgi,native,operations,transport}.py \
            tests/server/in_process tests/server/listening tests/server/engine/test_engine.py \
            tests/server/engine/test_lanes.py tests/server/test_in_process.py tests/server/test_lifecycle.py \
            tests/server/test_access_log.py tests/server/test_tls.py
    fi
}

newest=
for version in 3.14 3.13 3.12; do
    environment=.pythons/$version
    python=
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            python=$candidate
            newest=${newest:-$version}
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "Python $version is not installed: its tests were not run"
    elif [ "$1" = test ]; then
        echo "$("$environment/bin/python" --version), without PyTorch"
        # Which module an export misses first is told for an environment that has the others.
        # shellcheck disable=SC2046
        OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest -n 2 --dist loadfile --without-torch $(tests_of "$version") \
            --deselect "tests/cli/test_main.py::test_a_missing_module_names_its_extra"
    elif [ pyproject.toml -nt "$environment/ready" ] || [ constraints.txt -nt "$environment/ready" ]; then
        "$python" -m venv --clear "$environment"
        "$environment/bin/python" -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[openvino,test]'
        touch "$environment/ready"
    fi
done
