"""`attnlens attend` with words, without special tokens, with means and rollouts."""

import json
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from attnlens.reductions import AttentionReduction, TextUnits, reduce
from attnlens_client import AttentionQuery, Client, EncodedText
from served import ServerProcess

Run = Callable[..., subprocess.CompletedProcess[str]]

SENTENCE = "The unbelievably tired animal didn't cross."


@pytest.fixture
def attend(run: Run, minilm_server: ServerProcess) -> Run:
    def run_attend(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
        return run("attend", SENTENCE, "--address", minilm_server.address, *args, **options)

    return run_attend


@pytest.fixture
def whole(minilm_server: ServerProcess) -> EncodedText:
    """Return all weights of the sentence, (L, H, T, T)."""
    with Client(minilm_server.address) as client:
        [result] = client.encode([SENTENCE], attention=AttentionQuery())
    return result


def made_of(whole: EncodedText, reduction: AttentionReduction) -> np.ndarray:
    """Return the reference reduction of the mean over heads."""
    tokens = whole.tokens
    text = TextUnits.of(
        [token.word_index for token in tokens], [token.is_special for token in tokens], [False] * len(tokens)
    )
    [result] = reduce(list(whole.weights), reduction, text, is_mean_of_heads=True)
    assert isinstance(result.data, np.ndarray)
    return np.asarray(result.data[0])


def test_words_without_special_tokens_are_shown_as_a_table(attend: Run, whole: EncodedText) -> None:
    lines = attend("--words", "--no-special", "--layer", "mean").stdout.splitlines()
    assert " ".join(" ".join(lines[:2]).split()) == (
        "all-MiniLM-L6-v2, mean of layers 0-5, mean of 12 heads, 15 tokens as 9 words, without special "
        "tokens, which had 52 % of the weight"
    )
    weights = made_of(whole, AttentionReduction(level="words", special_tokens="drop", layers="mean"))
    shown = [[float(number) for number in line.split()[2:]] for line in lines[-9:]]
    np.testing.assert_allclose(shown, weights, atol=0.00501)
    assert [line.split()[1] for line in lines[-9:-6]] == ["The", "unbelievably", "tired"]


def test_word_of_several_tokens_is_found_by_its_spelling_and_by_its_tokens(
    attend: Run, whole: EncodedText
) -> None:
    weights = made_of(whole, AttentionReduction(level="words", layers="rollout"))
    for name in ("unbelievably", "##bel", "2"):
        output = attend("--words", "--rollout", "--token", name).stdout
        assert "rollout of layers 0-5, mean of 12 heads" in output
        assert "Word 2, 'unbelievably', attends to:" in output
        assert f"{weights[2].max():.4f}     0 [CLS]" in output


def test_json_lists_the_tokens_of_each_word_and_the_removed_weight(attend: Run, whole: EncodedText) -> None:
    answer = json.loads(attend("--json", "--words", "--no-special", "--rollout").stdout)
    weights = made_of(whole, AttentionReduction(level="words", special_tokens="drop", layers="rollout"))
    np.testing.assert_allclose(answer["weights"], weights, atol=1e-6)
    assert answer["units"][1] == {"text": "unbelievably", "tokens": [2, 3, 4, 5, 6]}
    assert (answer["layers"], answer["layer_reduction"]) == ([0, 1, 2, 3, 4, 5], "rollout")
    assert len(answer["special_token_mass"]) == len(answer["units"]) == 9


def test_json_of_the_largest_weights_includes_the_remaining_mass(attend: Run, whole: EncodedText) -> None:
    answer = json.loads(attend("--json", "--top", "3", "--layer", "2", "--head", "mean").stdout)
    weights = whole.weights[2].mean(axis=0)
    assert answer["layer"] == 2
    assert np.array(answer["indices"]).shape == (15, 3)
    np.testing.assert_allclose(answer["weights"], -np.sort(-weights, axis=-1)[:, :3], atol=1e-6)
    np.testing.assert_allclose(np.sum(answer["weights"], axis=-1) + answer["remaining_mass"], 1, atol=1e-5)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--layer", "x"], "invalid value for '--layer': 'x' is neither an integer nor 'mean' or"),
        (["--layer", "6"], "invalid value for '--layer': 6: all-MiniLM-L6-v2 has the layers 0 to 5"),
        (["--rollout", "--head", "3"], "--rollout combines all layers and the mean of heads: omit --layer"),
        (["--gates", "--words"], "--gates excludes --rollout, --words, --no-special and means"),
        (["--composed", "--no-special"], "--composed excludes --rollout and --no-special"),
    ],
)
def test_incompatible_options_are_a_usage_error(attend: Run, args: list[str], line: str) -> None:
    result = attend(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"attnlens attend: {line}")


def test_text_without_words_is_an_error(run: Run, minilm_server: ServerProcess) -> None:
    result = run("attend", "", "--address", minilm_server.address, "--no-special")
    assert (result.returncode, result.stdout) == (1, "")
    assert "TEXT has only special tokens: omit --no-special" in result.stderr


def test_all_layers_and_heads_are_one_object(attend: Run, whole: EncodedText) -> None:
    answer = json.loads(attend("--json", "--layer", "all", "--head", "all").stdout)
    np.testing.assert_allclose(answer["weights"], whole.weights, atol=1e-6)
    assert (answer["axes"], answer["layers"]) == (["layers", "heads"], list(range(6)))
    assert ("layer" in answer, "layer_reduction" in answer) == (False, False)
    answer = json.loads(attend("--json", "--layer", "all").stdout)
    np.testing.assert_allclose(answer["weights"], whole.weights.mean(axis=1), atol=1e-6)
    assert answer["axes"] == ["layers"]
    answer = json.loads(attend("--json", "--layer", "2", "--head", "all", "--top", "3").stdout)
    np.testing.assert_allclose(answer["weights"], -np.sort(-whole.weights[2], axis=-1)[..., :3], atol=1e-6)
    assert (answer["axes"], answer["layer"], answer["heads"]) == (["heads"], 2, list(range(12)))
    assert np.array(answer["remaining_mass"]).shape == (12, 15)


def test_all_heads_of_words_without_special_tokens(attend: Run) -> None:
    args = ("--words", "--no-special", "--layer", "all", "--head", "all")
    answer = json.loads(attend("--json", *args).stdout)
    assert np.array(answer["weights"]).shape == (6, 12, 9, 9)
    assert np.array(answer["special_token_mass"]).shape == (6, 12, 9)
    lines = attend(*args).stdout.splitlines()
    assert lines[-1].startswith("--json prints all weights")
    assert [line.split()[:2] for line in lines[-73:-1]] == [[str(at // 12), str(at % 12)] for at in range(72)]


def test_each_layer_has_a_line_about_its_weights(attend: Run, whole: EncodedText) -> None:
    shown = attend("--layer", "all").stdout
    assert "which may be neighbors, too" in " ".join(shown.split())
    lines = shown.splitlines()[-7:-1]
    for layer, line in enumerate(lines):
        weights = whole.weights[layer].mean(axis=0).astype(np.float64)
        previous = 100 * np.diagonal(weights, -1).sum() / 15
        special = 100 * weights[:, [0, 14]].sum() / 15
        entropy = -(weights * np.log2(weights)).sum(axis=-1).mean()
        figures = [float(number) for number in line.split()[:6]]
        assert figures[0] == layer
        assert figures[2] == pytest.approx(previous, abs=0.51)
        assert figures[4] == pytest.approx(special, abs=0.51)
        assert figures[5] == pytest.approx(2**entropy, abs=0.051)
        assert float(line.split()[6]) == pytest.approx(weights[:, 1:14].max(), abs=0.0051)


def test_one_token_is_shown_for_each_head(attend: Run, whole: EncodedText) -> None:
    lines = attend("--layer", "3", "--head", "all", "--token", "tired", "--top", "2").stdout.splitlines()
    for head, line in enumerate(lines[-12:]):
        row = whole.weights[3, head, 7]
        assert line.split()[:2] == [str(head), f"{row.max():.2f}"]
        assert line.split()[2] == whole.tokens[int(row.argmax())].text
    refused = attend("--layer", "all", "--top", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
