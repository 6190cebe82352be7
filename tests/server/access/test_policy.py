"""The policy file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlens.oip import open_inference_pb2
from attnlens.v1 import encoder_service_pb2
from attnlens_server.access.policy import METHODS, Policy, Rules, read_policy
from attnlens_server.errors import StartupError
from attnlens_server.rates import UNLIMITED

EXAMPLE = """
allow_anonymous = true
open_health = false

[default]
methods = ["embeddings", "Score"]
texts_per_second = 10

[clients.search]
methods = ["*"]
models = ["minilm"]
texts_per_second = inf
tokens_per_second = 5000
burst_tokens = 20000
share = 4

[clients."spiffe://example.org/import"]
priority = "bulk"
burst_texts = 50
"""


def read(directory: Path, content: str) -> Policy:
    path = directory / "policy.toml"
    path.write_text(content)
    return read_policy(path)


def test_tables_of_clients_inherit_from_the_default(tmp_path: Path) -> None:
    policy = read(tmp_path, EXAMPLE)
    default = frozenset({"Embed", "Tokenize", "Score"})
    assert (policy.allow_anonymous, policy.open_health) == (True, False)
    assert policy.rules("unknown") == policy.rules(None) == Rules(methods=default, texts_per_second=10)
    assert policy.rules("unknown").rates == (10, 10, UNLIMITED, UNLIMITED)
    search = policy.rules("search")
    assert (search.methods, search.share, search.rates) == (METHODS, 4, (UNLIMITED, UNLIMITED, 5000, 20000))
    assert search.allows_model("minilm")
    assert not search.allows_model("other")
    bulk = policy.rules("spiffe://example.org/import")
    assert (bulk.methods, bulk.priority, bulk.rates[:2]) == (default, "bulk", (10, 50))


def test_an_empty_policy_allows_everything(tmp_path: Path) -> None:
    policy = read(tmp_path, "")
    assert policy == Policy()
    assert not policy.rules(None).has_rates
    assert all(policy.allows(None, method) for method in METHODS)


def test_methods_that_describe_the_server_are_always_allowed(tmp_path: Path) -> None:
    policy = read(tmp_path, "[default]\nmethods = []\n")
    assert policy.allows("a", "GetModel")
    assert policy.allows("a", "ModelReady")
    assert not any(policy.allows("a", method) for method in METHODS)


@given(st.lists(st.sampled_from(sorted(METHODS)), unique=True), st.sampled_from(sorted(METHODS)))
def test_the_list_of_methods_is_exactly_what_is_allowed(names: list[str], method: str) -> None:
    policy = Policy(default=Rules(methods=frozenset(names)))
    assert policy.allows("a", method) == policy.allows(None, method) == (method in names)


def test_each_method_of_the_services_is_restricted_or_describes_the_server() -> None:
    describing = {
        "ListModels",
        "GetModel",
        "ServerMetadata",
        "ModelMetadata",
        "ModelConfig",
        "RepositoryIndex",
    }
    health = {"ServerLive", "ServerReady", "ModelReady"}
    services = [
        encoder_service_pb2.DESCRIPTOR.services_by_name["EncoderService"],
        open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    ]
    names = {method.name for service in services for method in service.methods}
    assert names == (METHODS - {"Metrics", "ServerReflectionInfo"}) | describing | health


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "allow_anonymus = true",
            "unknown key 'allow_anonymus': use allow_anonymous, open_health, default, clients",
        ),
        ("open_health = 1", "open_health is 1: use true or false"),
        ("default = 1", "default is 1: use a table"),
        ("[clients]\nsearch = 1", r"table \[clients\]: search is 1: use a table \[clients.NAME\]"),
        (
            "[clients.search]\nmethod = []",
            r"table \[clients.search\]: unknown key 'method': use methods, models,",
        ),
        (
            '[default]\nmethods = ["Embd"]',
            r"methods is \['Embd'\]: use a list of \*, embeddings, .*, Classify,",
        ),
        ('[default]\nmethods = "Embed"', "methods is 'Embed': use a list"),
        ("[default]\nmodels = [1]", "models is .1.: use a list of model names"),
        ("[default]\ntexts_per_second = 0", "texts_per_second is 0: use a positive number, or inf"),
        ("[default]\ntokens_per_second = true", "tokens_per_second is True: use a positive number"),
        ("[default]\ntokens_per_second = nan", "tokens_per_second is nan"),
        (f"[default]\ntokens_per_second = 1{'0' * 400}", "tokens_per_second is 1000"),
        ("[default]\ntexts_per_second = 1\nburst_texts = inf", "burst_texts is inf: use a number from 1"),
        ("[default]\nburst_tokens = 5", "burst_tokens is set without tokens_per_second: set both"),
        ("[default]\nshare = 0", "share is 0: use a number from 0.01 to 100"),
        ("[default]\npriority = []", 'priority is .*: use "interactive" or "bulk"'),
        ("[default", "is not valid TOML"),
    ],
)
def test_invalid_policies_name_file_table_key_and_what_is_allowed(
    tmp_path: Path, content: str, message: str
) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        read(tmp_path, content)
    assert str(tmp_path / "policy.toml") in str(caught.value)


def test_a_missing_policy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read the policy .*: No such file"):
        read_policy(tmp_path / "none.toml")
