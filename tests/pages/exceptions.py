"""Code blocks that the page tests do not run, with reasons. `reader.py` runs all other blocks.

An entry matches every block on its page whose first line contains the words. Empty words match all blocks.
"""

# (page, words) -> the test that runs them or compares them with executed code, relative to tests/.
ELSEWHERE = {
    ("docs/access.md", ""): "docs/test_access_page.py",
    ("docs/bundle.md", "--faithfulness"): "export/faithfulness/test_faithfulness.py",
    ("docs/configuration.md", "{"): "export/test_configuration_page.py",
    ("docs/ecosystem.md", '"""A bundle in '): "ecosystem/test_docs.py",
    ("docs/ecosystem.md", "// A bundle in "): "ecosystem/test_docs.py",
    ("docs/how_attention_works.md", ""): "analysis/teach/test_page.py",
    ("docs/http.md", "8080/classify"): "server/http_api/test_predict.py",
    ("docs/http.md", "8080/predict"): "server/http_api/test_predict.py",
    ("docs/http.md", "8080/rerank"): "server/http_api/test_rerank.py",
    ("docs/http.md", "8080/score"): "server/http_api/test_rerank.py",
    ("docs/http.md", "8080/v2/rerank"): "server/http_api/test_rerank.py",
    ("docs/http_native.md", "from collections.abc"): "server/http_api/test_asgi.py",
    ("docs/http_native.md", "uvicorn "): "server/http_api/test_asgi.py",
    ("docs/http_native.md", "from pathlib"): "server/http_api/test_asgi.py",
    ("docs/integrations.md", '"""'): "integrations/test_pages.py",
    ("docs/integrations.md", "python with_"): "integrations/test_recipes.py",
    ("docs/operations.md", "attnlens serve bundles/minilm --auto"): "cli/sources/test_measured.py",
    ("docs/operations.md", "prometheus --config"): "deploy/test_monitoring.py",
    ("docs/operations.md", "promtool "): "deploy/test_monitoring.py",
    ("docs/pitfalls.md", "attnlens check-layer"): "cli/commands/test_check_layer.py",
    ("docs/layouts.md", "# -1 is a dynamic axis"): "export/layouts/test_layouts.py",
    ("docs/layouts.md", "{"): "export/layouts/test_layouts.py",
    ("docs/mechanisms.md", "{"): "model/test_mechanisms_page.py",
    ("docs/request_path.md", "python tests/request_path.py"): "docs/test_request_path.py",
    ("docs/runtimes.md", "--runtime all"): "runtimes/test_parity.py",
    ("docs/rerank.md", ""): "server/test_classifiers.py",
    ("docs/scaling.md", "http_options"): "bulk/test_ray.py",
    ("docs/scaling.md", "import ray"): "bulk/test_ray.py",
    ("docs/settings.md", "log-level"): "docs/test_settings_pages.py",
    ("docs/tls.md", ""): "docs/test_tls_page.py",
    ("docs/typescript.md", ""): "typescript/test_page.py",
}

# (page, words) of command lines that also occur in a help text: cli/test_help_examples.py runs them with a
# small checkpoint instead of a hub checkpoint.
IN_HELP = {
    ("README.md", "attnlens export"),
    ("docs/tutorial.md", "attnlens export"),
    ("docs/bundle.md", "attnlens export sentence"),
    ("docs/bundle.md", "--source sentence-transformers/"),
    ("docs/operations.md", "attnlens bench"),
    ("docs/operations.md", "serve sentence-transformers/"),
}

GPU = "needs an NVIDIA GPU"
INSTALLS = "installs or starts a system service; tests/installed/test_unit.py verifies the unit"
MAKE = "CI runs the commands of this target, or it writes into the checkout"
MINUTES = "exports MiniLM in another precision, which takes minutes; tests/export covers each precision"
CLUSTER = "needs a cluster; tests/installed/test_kubernetes.py checks the manifests"
PROXY = "settings of the system; tests/hostile/test_proxy.py and test_proxied_tokens.py run the configuration"
PLACEHOLDER = "has a placeholder"
OPENAI = "needs the package openai, which the test environment does not contain"
PROCESSOR = "its output depends on the processor; tests/export/engines tests the command"

# (page, words) -> the reason why the blocks are not run.
NOT_RUN = {
    ("README.md", "make "): MAKE,
    ("docs/bulk.md", "attnlens embed 'data/*.parquet'"): "needs several machines; tests/bulk covers both",
    ("docs/tutorial.md", "make "): MAKE,
    ("CONTRIBUTING.md", "make "): MAKE,
    ("docs/README.md", "make "): MAKE,
    ("bench/README.md", "make "): MAKE,
    ("docs/architecture.md", "make "): MAKE,
    ("docs/compatibility.md", "make "): MAKE,
    ("docs/containers.md", "docker "): "needs Docker; tests/installed/test_image.py runs the same steps",
    ("docs/bundle.md", "--engine openvino"): PROCESSOR,
    ("docs/bundle.md", "export SOURCE"): PLACEHOLDER,
    ("docs/operations.md", "pip install '.[openvino]'"): "already installed in the test environment",
    (
        "docs/operations.md",
        "--engine openvino",
    ): "needs bf16; server/engine/runtimes/test_openvino.py serves with it if available",
    ("docs/http.md", "from openai import OpenAI"): OPENAI,
    ("docs/layouts.md", "export SOURCE"): PLACEHOLDER,
    ("docs/layouts.md", "tritonserver "): "the program cannot be installed with pip",
    ("docs/kubernetes.md", "kubectl "): CLUSTER,
    ("docs/kubernetes.md", "helm "): CLUSTER,
    ("docs/kubernetes.md", "attnlens key "): CLUSTER,
    ("docs/kubernetes.md", "from attnlens_client"): CLUSTER,
    ("docs/kubernetes.md", "readinessProbe"): "a variant of a manifest",
    ("docs/proxy.md", "apt-get "): PROXY,
    ("docs/operations.md", "python -m bench"): "takes minutes",
    ("docs/proxy.md", "python -m bench"): "takes minutes",
    ("docs/sizing.md", "python -m bench"): "takes a minute, and prints figures of one machine",
    (
        "docs/proxy.md",
        "server local ",
    ): "a part of a file; tests/hostile/test_proxied_servers.py has the line",
    ("docs/proxy.md", "ATTNLENS_JWT_KEY"): PROXY,
    ("docs/proxy.md", "search-service "): PROXY,
    ("docs/oip.md", "perf_analyzer "): "the program cannot be installed with pip on all systems",
    ("docs/layouts.md", "ovms "): "the program cannot be installed with pip",
    ("docs/operations.md", "pip install '.[otel]'"): "already installed in the test environment",
    ("docs/operations.md", "NAME"): PLACEHOLDER,
    ("docs/operations.md", "--precision int8"): MINUTES,
    ("docs/operations.md", "--output bundles/minilm --precision fp16"): MINUTES,
    ("docs/operations.md", "serve bundles/minilm --provider cuda"): GPU,
    ("docs/operations.md", "gpu/bin/pip"): GPU,
    ("docs/operations.md", "make test-cuda"): GPU,
    ("docs/operations.md", "gpu/bin/attnlens info"): GPU,
    ("docs/operations.md", "gpu/bin/attnlens embed"): GPU,
    ("docs/operations.md", "gpu/bin/python"): GPU,
    ("docs/scaling.md", "python -m bench"): "takes minutes",
    ("docs/scaling.md", "serve deploy "): "needs a cluster; bulk/test_ray.py runs this configuration",
    ("docs/systemd.md", "/opt/attnlens"): INSTALLS,
    ("docs/systemd.md", "attnlens deploy "): INSTALLS,
    ("docs/systemd.md", "attnlens key "): INSTALLS,
    ("docs/systemd.md", "chmod "): INSTALLS,
    ("docs/systemd.md", "cp "): INSTALLS,
    ("docs/systemd.md", "install -"): INSTALLS,
    ("docs/systemd.md", "systemctl "): INSTALLS,
    ("docs/systemd.md", "journalctl "): INSTALLS,
    ("docs/troubleshooting.md", "..."): PLACEHOLDER,
    (
        "docs/troubleshooting.md",
        "attnlens check",
    ): "takes 40 s; tests/export/test_check.py checks this bundle",
}

# (page, words) -> description of a block that contains neither code nor output.
NO_CODE = {
    ("docs/architecture.md", "─▶"): "a picture",
    ("docs/bundle.md", "config.json "): "a list of files",
    ("docs/bundle.md", "onnx/model.onnx "): "a list of files",
    ("docs/explanations.md", "  =  "): "a formula",
    ("docs/explanations.md", "g ←"): "a formula",
    ("docs/layouts.md", "models"): "a list of files",
    ("docs/mechanisms.md", ""): "a formula",
    ("docs/operations.md", "2,000 random texts"): "figures of one machine",
    ("docs/performance.md", "batch x length"): "figures of one machine",
}

# Pages whose Python blocks share one namespace.
CONTINUED = {"docs/oip.md", "docs/protocol.md", "docs/python.md", "docs/rerank.md", "docs/tutorial.md"}
