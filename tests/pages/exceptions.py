"""Which blocks of the pages are not run here, and why. All others are: see `reader.py`.

An entry takes in every block of its page whose first line has the words; empty words take in the whole page.
"""

# (page, words) -> the test that runs them or compares them with executed code, relative to tests/.
ELSEWHERE = {
    ("docs/bundle.md", "--faithfulness"): "export/faithfulness/test_faithfulness.py",
    ("docs/configuration.md", "{"): "export/test_configuration_page.py",
    ("docs/ecosystem.md", '"""A bundle in '): "ecosystem/test_docs.py",
    ("docs/ecosystem.md", "// A bundle in "): "ecosystem/test_docs.py",
    ("docs/how_attention_works.md", ""): "analysis/teach/test_page.py",
    ("docs/integrations.md", '"""'): "integrations/test_pages.py",
    ("docs/integrations.md", "python with_"): "integrations/test_recipes.py",
    ("docs/layouts.md", "# -1 is a dynamic axis"): "export/layouts/test_layouts.py",
    ("docs/layouts.md", "{"): "export/layouts/test_layouts.py",
    ("docs/mechanisms.md", "{"): "model/test_mechanisms_page.py",
    ("docs/request_path.md", "python tests/request_path.py"): "docs/test_request_path.py",
    ("docs/runtimes.md", "--runtime all"): "runtimes/test_parity.py",
    ("docs/settings.md", "log-level"): "docs/test_settings_pages.py",
    ("docs/tls.md", ""): "docs/test_tls_page.py",
}

# (page, words) of command lines that stand in the help of their commands too: cli/test_help_examples.py runs
# them, with a small checkpoint in the place of one from the hub.
IN_HELP = {
    ("README.md", "attnlens export"),
    ("docs/tutorial.md", "attnlens export"),
    ("docs/bundle.md", "attnlens export sentence"),
    ("docs/bundle.md", "--against transformers"),
    ("docs/operations.md", "attnlens bench"),
    ("docs/operations.md", "serve sentence-transformers/"),
}

GPU = "needs an NVIDIA GPU"
INSTALLS = "installs or starts what a machine has once; tests/installed/test_unit.py verifies the unit"
MAKE = "CI runs the commands of this target, or it writes into the checkout"
MINUTES = "exports MiniLM in another precision, which takes minutes; tests/export has tests of each"
PLACEHOLDER = "has a placeholder"
PROCESSOR = "its figures depend on the processor; tests/export/engines has the command's tests"

# (page, words) -> why nothing runs them.
NOT_RUN = {
    ("README.md", "make "): MAKE,
    ("docs/tutorial.md", "make "): MAKE,
    ("CONTRIBUTING.md", "make "): MAKE,
    ("docs/README.md", "make "): MAKE,
    ("bench/README.md", "make "): MAKE,
    ("docs/architecture.md", "make "): MAKE,
    ("docs/compatibility.md", "make "): MAKE,
    ("docs/containers.md", "docker "): "needs a daemon; tests/installed/test_image.py takes the same steps",
    ("docs/bundle.md", "--engine openvino"): PROCESSOR,
    ("docs/bundle.md", "export SOURCE"): PLACEHOLDER,
    ("docs/operations.md", "pip install '.[openvino]'"): "the environment of the tests has it",
    (
        "docs/operations.md",
        "--engine openvino",
    ): "needs bf16; server/engine/runtimes/test_openvino.py serves with it where it is",
    ("docs/layouts.md", "export SOURCE"): PLACEHOLDER,
    ("docs/layouts.md", "tritonserver "): "no package of pip has the program",
    ("docs/layouts.md", "ovms "): "no package of pip has the program",
    ("docs/operations.md", "NAME"): PLACEHOLDER,
    ("docs/operations.md", "--precision int8"): MINUTES,
    ("docs/operations.md", "--output bundles/minilm --precision fp16"): MINUTES,
    ("docs/operations.md", "serve bundles/minilm --provider cuda"): GPU,
    ("docs/operations.md", "gpu/bin/pip"): GPU,
    ("docs/operations.md", "gpu/bin/attnlens info"): GPU,
    ("docs/operations.md", "gpu/bin/attnlens embed"): GPU,
    ("docs/operations.md", "gpu/bin/python"): GPU,
    ("docs/systemd.md", "/opt/attnlens"): INSTALLS,
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
    ("docs/explanations.md", "  =  "): "a formula",
    ("docs/explanations.md", "g ←"): "a formula",
    ("docs/layouts.md", "models"): "a list of files",
    ("docs/mechanisms.md", ""): "a formula",
    ("docs/operations.md", "2,000 random texts"): "figures of one machine",
    ("docs/performance.md", "batch x length"): "figures of one machine",
}

# What stands between two blocks of such a page goes on: the names of one are known in the next.
CONTINUED = {"docs/protocol.md", "docs/python.md", "docs/tutorial.md"}
