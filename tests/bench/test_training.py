"""bench/studies/training.py: the comparison is fair, and its numbers mean what the table says."""

import math
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import ttest_1samp, ttest_rel

from bench.studies import training
from bench.studies.training import BASELINE, PROPERTIES, ROWS, SIZES, Prose
from examples.train_masked import NOT_MASKED, SPECIAL, Trainer, draw_batches, read_prose

TINY = SIZES._replace(hidden_size=16, num_tokens=8, batch_size=4, steps=3)
VALUES, OTHERS = [2.0, 4.0, 9.0], [1.0, 1.0, 5.0]


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "HELD_OUT_TEXTS", 4)


@pytest.fixture
def prose() -> Prose:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, TINY.vocab_size, (400,), generator=random)
    return Prose(ids[:300], ids[300:])


def test_interval_agrees_with_scipy_and_with_a_calculation_by_hand() -> None:
    found = training.interval(VALUES)
    # The mean is 5, the variance 13, and the quantile of two degrees of freedom 4.303.
    assert found == pytest.approx((5.0, 4.303 * math.sqrt(13 / 3)), abs=1e-3)
    expected = ttest_1samp(VALUES, 0).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(expected)


def test_paired_interval_removes_what_seeds_have_in_common() -> None:
    found = training.paired_interval(VALUES, OTHERS)
    expected = ttest_rel(VALUES, OTHERS).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(expected)
    assert found.half < training.interval(VALUES).half
    shifted = training.paired_interval([value + 10 for value in VALUES], [value + 10 for value in OTHERS])
    assert shifted == pytest.approx(found)


def test_token_ids_do_not_depend_on_the_run() -> None:
    first, second = training.read_sorted_prose(60), training.read_sorted_prose(60)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    # The texts are those of the example, with other ids.
    tokenizer, train_ids, _held_out_ids = read_prose(60)
    vocabulary = tokenizer.get_vocab()
    spellings = sorted(vocabulary, key=lambda token: (vocabulary[token] >= len(SPECIAL), token))
    assert [spellings[token] for token in first.train[:500] if token >= len(SPECIAL)] == [
        tokenizer.id_to_token(token) for token in train_ids[:500].tolist() if token >= len(SPECIAL)
    ]


def test_models_of_a_seed_have_the_same_batches_schedule_and_initial_weights(
    prose: Prose, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: dict[str, list[tuple[object, ...]]] = {}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    step = Trainer.step

    def record(self: Trainer, input_ids: torch.Tensor, labels: torch.Tensor) -> float:
        if not steps[name]:
            state = self.model.state_dict().items()
            weights[name] = {key: tensor.clone() for key, tensor in state}
        steps[name].append((input_ids.tolist(), labels.tolist(), *self.schedule.get_last_lr()))
        return step(self, input_ids, labels)

    monkeypatch.setattr(Trainer, "step", record)
    monkeypatch.setitem(ROWS, "other seed", ROWS[BASELINE])
    for name, row in ROWS.items():
        steps[name] = []
        # Checkpoints must not disturb training.
        checkpoints = (0, 1, 3) if name == BASELINE else ()
        training.train(row, TINY, prose, seed=7 + (name == "other seed"), checkpoints=checkpoints)
    assert len(steps[BASELINE]) == TINY.steps
    others = [name for name in ROWS if name not in {BASELINE, "other seed"}]
    assert all(steps[name] == steps[BASELINE] for name in others)
    assert steps["other seed"] != steps[BASELINE]
    for name in ("1 head", "8 heads", "uniform attention", "1 head, no scaling", "big_bird"):
        assert all(torch.equal(weights[name][key], tensor) for key, tensor in weights[BASELINE].items()), name
    embedding = "encoder.embeddings.token.weight"
    assert not torch.equal(weights["other seed"][embedding], weights[BASELINE][embedding])
    assert all(torch.equal(weights[name][embedding], weights[BASELINE][embedding]) for name in others)


def test_uniform_attention_has_the_properties_of_an_even_distribution(prose: Prose) -> None:
    trainer = training.make_trainer(ROWS[BASELINE].options, TINY, seed=0)
    for layer in trainer.model.encoder.layers:
        torch.nn.init.zeros_(layer.get_parameter("attention.query.weight"))
    moment = training.observe(trainer.model, TINY, prose.held_out, step=0)
    assert moment.attention.shape == (len(PROPERTIES), TINY.num_layers, 4)
    share = 1 / TINY.num_tokens
    for name, values in zip(PROPERTIES, moment.attention, strict=True):
        expected = {"entropy": 1.0, "special": 2 * share}.get(name, share)
        torch.testing.assert_close(values, torch.full_like(values, expected))


def test_properties_are_means_over_predicted_tokens(prose: Prose) -> None:
    model = training.make_trainer(ROWS[BASELINE].options, TINY, seed=0).model.eval()
    input_ids, labels = next(draw_batches(prose.held_out, TINY, seed=1))
    found = training.attention_properties(model, input_ids, labels)
    with torch.no_grad():
        output = model.encoder(input_ids, torch.ones_like(input_ids), output_attentions=True)
    for layer, weights in enumerate(output.attentions):
        rows: list[list[float]] = []
        for text, query in (labels != NOT_MASKED).nonzero().tolist():
            row = weights[text, 2, query].double()
            entropy = -float((row * row.log()).sum()) / math.log(len(row))
            shares = [row[query - 1], row[query + 1], row[query], row[0] + row[-1]]
            rows.append([entropy, *map(float, shares)])
        torch.testing.assert_close(found[:, layer, 2], torch.tensor(rows).mean(dim=0))


def test_trained_model_differs_from_its_initial_state(prose: Prose) -> None:
    checkpoints = (0, 2, 3)
    result = training.train(ROWS[BASELINE], TINY, prose, seed=0, checkpoints=checkpoints)
    assert [moment.step for moment in result.moments] == [*checkpoints]
    assert result.loss == result.moments[-1].loss != result.moments[0].loss
    undisturbed = training.train(ROWS[BASELINE], TINY, prose, seed=0)
    assert undisturbed.loss == result.loss
    model = training.make_trainer({}, TINY, seed=0).model
    assert result.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_command_prints_both_tables_and_compares_each_row_with_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "SIZES", TINY)
    args = ["--steps", "1", "--seeds", "2", "--pictures", str(tmp_path)]
    args += ["--rows", "1 head, no scaling", "longformer"]
    monkeypatch.setattr(sys, "argv", ["training.py", *args])
    training.main()
    output = capsys.readouterr()
    lines = [[cell.strip() for cell in line.split("|")] for line in output.out.splitlines() if "|" in line]
    compared = {line[1]: line[4] for line in lines if line[1] in ROWS}
    assert compared == {
        BASELINE: "",
        "1 head": BASELINE,
        "1 head, no scaling": "1 head",
        "longformer": BASELINE,
    }
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == ["training_attention.png", "training_losses.png"]
    assert [line[1] for line in lines if len(line) == len(PROPERTIES) + 4] == ["step", "---", "0", "1"]
    # The differences of the table are those of the losses of each seed.
    losses = {
        line.rsplit(maxsplit=2)[0]: [float(loss) for loss in line.rsplit(maxsplit=2)[1:]]
        for line in output.err.splitlines()
    }
    mean = sum(a - b for a, b in zip(losses["longformer"], losses[BASELINE], strict=True)) / 2
    [row] = [line for line in lines if line[1] == "longformer"]
    assert float(row[5].split()[0]) == pytest.approx(mean, abs=6e-4)


def test_single_seed_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["training.py", "--seeds", "1"])
    with pytest.raises(SystemExit):
        training.main()
    assert "--seeds 1: must be at least 2" in capsys.readouterr().err
