#!/usr/bin/env bash
# Run the tests that need no PyTorch on another version of Python, where it is installed: other_python.sh 3.13
# They serve the bundle that MINILM_BUNDLE names.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
environment=.pythons/$version

python=
for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "Python $version is not installed: its tests were not run"
    exit 0
fi

if [ pyproject.toml -nt "$environment/ready" ] || [ constraints.txt -nt "$environment/ready" ]; then
    "$python" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[openvino,test]'
    touch "$environment/ready"
fi
echo "$("$environment/bin/python" --version), without PyTorch"
if [ "$version" = 3.12 ]; then
    # What Python dropped or changed after 3.11 shows on the newest, which runs all of them. Of a version between, it
    # remains to be seen that its packages install, that all modules load, and that a server and a client talk.
    tests=(tests/test_modules.py tests/test_tensors.py tests/client/test_client.py tests/server/test_tls.py
        tests/server/grpc_api/test_methods.py)
else
    # Which module an export misses first is told for an environment that has the others.
    tests=(tests/test_modules.py tests/test_tensors.py tests/bench tests/cli tests/client tests/hostile tests/server
        --deselect "tests/cli/test_main.py::test_a_missing_module_names_its_extra")
fi
OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest --without-torch "${tests[@]}"
