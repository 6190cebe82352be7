"""Explanations at the service level: dense layers, excluded prompts, limits and older bundles."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from onnx import helper

from attnlens.explanations import (
    ExplainLevel,
    ExplainMethod,
    PairMatrix,
    exclude_token,
    pooling_weights,
)
from attnlens.pooling import Pooling
from attnlens.reductions import AttentionReduction
from attnlens_server.bundle import open_bundle
from attnlens_server.clients import Client
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Budget, Reservation
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.engine import Engine, Item, ItemResult
from attnlens_server.engine.batch import Batch
from attnlens_server.engine.engine import Lanes
from attnlens_server.errors import (
    DeadlineError,
    GraphUnavailableError,
    InvalidFieldsError,
    NotSupportedError,
    OverloadedError,
    RequestTooLargeError,
    ResponseTooLargeError,
    StartupError,
    TooExpensiveError,
)
from attnlens_server.operations.attention import AttentionQuery
from attnlens_server.operations.compare import CompareRequest, Comparison
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.explain import ExplainRequest, ExplanationTarget
from attnlens_server.operations.explanations import Explanation, Text
from attnlens_server.operations.graph_runs import num_masked_runs
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.service import ModelService
from attnlens_server.text import EncodedInput, Input, TokenIds, TokenSource
from compatibility.record import make_bundle
from model_services import serve
from stored_bundle import STORED_BUNDLE
from tampered import change_graph, constant, manifest_of, put_hashes_right, through

CONTRIBUTIONS = "onnx/model_contributions.onnx"
TEXTS = ["the man and the cat", "a cat", "in the house of the old man"]
MASKED = (ExplainMethod.LEAVE_ONE_OUT,)
NORM = (ExplainMethod.CONTRIBUTION_NORM,)

Open = Callable[..., AbstractAsyncContextManager[ModelService]]


@pytest.fixture(scope="module")
def dense_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with a dense layer that excludes prompts from pooling. The bundle also contains fp16."""
    directory = tmp_path_factory.mktemp("dense") / "bundle"
    make_bundle(directory)
    with manifest_of(directory) as manifest:
        manifest["pooling"]["exclude_prompt"] = True
        manifest["faithfulness"] = [
            {"method": "EXPLAIN_METHOD_CONTRIBUTIONS", "rank_correlation": 0.85, "num_texts": 25}
        ]
    return directory


@pytest.fixture
def copied(dense_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dense_bundle, tmp_path / "bundle"))


@asynccontextmanager
async def serving(
    directory: Path, *, max_response_bytes: int = 1 << 20, **options: Any
) -> AsyncIterator[ModelService]:
    config = ServerConfig(bundle=directory, threads=2, lanes=2, **options)
    bundle = open_bundle(directory, config.precision)
    engine = Engine(bundle, config)
    engine.start(max_tokens=32)
    costs = ReplyCosts(
        max_response_bytes, 64, lambda tokens: 50 * len(tokens.ids), serialization_copies=2, sending_copies=1
    )
    service = serve(bundle, config, engine, max_tokens=40, costs=costs)
    yield service
    service.process.workers.close()
    engine.close()


def budget(service: ModelService, deadline: float | None = None) -> Budget:
    return Budget(Reservation(service.process.admission), deadline)


async def explain(service: ModelService, *texts: str, **fields: Any) -> list[Explanation]:
    job = ExplainRequest(inputs=[Input(text=text) for text in texts], **fields)
    return (await service.explain(job, budget(service))).texts


async def compare(service: ModelService, a: str, b: str, **fields: Any) -> list[Comparison]:
    fields = {"matrix": PairMatrix.INPUT, **fields}
    job = CompareRequest(inputs=[Input(text=a)], second_inputs=[Input(text=b)], **fields)
    return (await service.compare(job, budget(service))).pairs


async def vectors(service: ModelService, *texts: str, **fields: Any) -> np.ndarray:
    job = EmbedRequest(inputs=[Input(text=text) for text in texts], normalize=True, **fields)
    return (await service.embed(job, budget(service))).embeddings.astype(np.float64)


# --- completeness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", [*Pooling, None])
async def test_scores_sum_to_the_total_with_dense_layers_and_excluded_prompt(
    dense_bundle: Path, pooling: Pooling | None
) -> None:
    async with serving(dense_bundle) as service:
        for fields in ({}, {"dimensions": 4}):
            common: dict[str, Any] = {"pooling": pooling, "prompt": Prompt(name="query"), **fields}
            own = await vectors(service, *TEXTS, **common)
            [other] = await vectors(service, "the cat", **fields, pooling=pooling, prompt=Prompt(text=""))
            towards = {
                "target": ExplanationTarget(to=Input(text="the cat")),
                "target_prompt": Prompt(text=""),
            }
            for target, direction in (({}, own), (towards, [other] * len(own))):
                found = await explain(service, *TEXTS, **common, **target)
                for text, vector, each in zip(found, own, direction, strict=True):
                    [scores] = text.scores
                    assert text.target_value == pytest.approx(each @ vector, abs=1e-5)
                    assert scores.sum == pytest.approx(each @ vector, abs=2e-5)


NOT_MEASURED: dict[str, dict[str, Any]] = {
    "another text": {"target": ExplanationTarget(to=Input(text="the cat"))},
    "a contrast": {"target": ExplanationTarget(contrast=(Input(text="the cat"), Input(text="a house")))},
    "a direction": {"target": ExplanationTarget(direction=np.eye(10, dtype=np.float32)[0])},
    "words": {"level": ExplainLevel.WORDS},
    "a prompt": {"prompt": Prompt(name="query")},
    "another pooling": {"pooling": Pooling.CLS},
    "fewer dimensions": {"dimensions": 4},
}


@pytest.mark.parametrize("question", NOT_MEASURED)
async def test_faithfulness_is_only_stated_for_questions_that_were_measured(
    dense_bundle: Path, question: str
) -> None:
    """The export measures tokens of texts of 5 to 128 tokens towards the text's own embedding."""
    async with serving(dense_bundle) as service:
        no_prompt: dict[str, Any] = {"prompt": Prompt(text=""), "methods": service.explain.methods}
        for fields, expected in (({}, 0.85), (NOT_MEASURED[question], None)):
            [text] = await explain(service, TEXTS[0], **no_prompt | fields)
            stated = {scores.method: scores.faithfulness for scores in text.scores}
            assert stated.pop(ExplainMethod.CONTRIBUTIONS) == expected
            assert set(stated.values()) == {None}  # this bundle has no figures of other methods
        [short] = await explain(service, TEXTS[1], **no_prompt)
        ids, empty = TokenIds(input_ids=(2, 5, 6, 7, 8, 9, 3)), Prompt(text="")
        job = ExplainRequest(inputs=[Input(token_ids=ids)], prompt=empty)
        [of_ids] = (await service.explain(job, budget(service))).texts
        [pair] = await compare(service, TEXTS[0], TEXTS[2], prompt=empty, prompt_b=empty)
        for text in (short, of_ids, pair.a, pair.b):
            assert [scores.faithfulness for scores in text.scores] == [None] * len(text.scores)


@pytest.mark.parametrize("pooling", [*Pooling, None])
async def test_input_matrix_sums_to_the_total_with_dense_layers_and_excluded_prompt(
    dense_bundle: Path, pooling: Pooling | None
) -> None:
    async with serving(dense_bundle) as service:
        for dimensions in (0, 4):
            common: dict[str, Any] = {"pooling": pooling, "dimensions": dimensions}
            prompts = {"prompt": Prompt(name="query"), "prompt_b": Prompt(text="")}
            [pair] = await compare(service, TEXTS[0], TEXTS[2], **common, **prompts)
            [first] = await vectors(service, TEXTS[0], **common, prompt=Prompt(name="query"))
            [second] = await vectors(service, TEXTS[2], **common, prompt=Prompt(text=""))
            assert pair.matrix is not None
            assert pair.matrix.baseline_row is not None
            assert pair.matrix.baseline_column is not None
            assert pair.matrix.baseline is not None
            rows = pair.matrix.values.sum(axis=1) + pair.matrix.baseline_column
            columns = pair.matrix.values.sum(axis=0) + pair.matrix.baseline_row
            np.testing.assert_allclose(rows, pair.a.scores[0].values, atol=1e-4)
            np.testing.assert_allclose(columns, pair.b.scores[0].values, atol=1e-4)
            total = rows.sum() + pair.matrix.baseline_row.sum() + pair.matrix.baseline
            assert total == pytest.approx(first @ second, abs=1e-4)


async def test_norm_is_computed_over_the_contributions_to_each_component(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        for dimensions in (10, 4):
            for level in ExplainLevel:
                common: dict[str, Any] = {"dimensions": dimensions, "level": level}
                columns = []
                for unit_vector in np.eye(dimensions, dtype=np.float32):
                    [text] = await explain(
                        service, TEXTS[2], target=ExplanationTarget(direction=unit_vector), **common
                    )
                    columns.append(text.scores[0].values)
                for target in (ExplanationTarget(), ExplanationTarget(to=Input(text="the cat"))):
                    [found] = await explain(service, TEXTS[2], methods=NORM, target=target, **common)
                    [scores] = found.scores
                    np.testing.assert_allclose(scores.values, np.linalg.norm(columns, axis=0), rtol=1e-5)
                    assert (scores.baseline, scores.expected_sum) == (None, None)


async def test_long_direction_scales_the_scores_until_they_overflow(dense_bundle: Path) -> None:
    fields: dict[str, Any] = {"methods": (ExplainMethod.CONTRIBUTIONS, *MASKED), "head_contributions": True}
    async with serving(dense_bundle) as service:
        [own] = await vectors(service, TEXTS[0])
        direction = own.astype(np.float32)
        [near] = await explain(service, TEXTS[0], target=ExplanationTarget(direction=direction), **fields)
        for scale in (1e36, 1e-36):
            target = ExplanationTarget(direction=(direction * scale).astype(np.float32))
            [far] = await explain(service, TEXTS[0], target=target, **fields)
            assert far.target_value == pytest.approx(scale, rel=1e-5)
            for one, other in zip(near.scores, far.scores, strict=True):
                np.testing.assert_allclose(other.values, one.values * scale, rtol=1e-5)
                assert other.sum == pytest.approx(one.sum * scale, rel=1e-5)
            assert near.head_contributions is not None
            assert far.head_contributions is not None
            np.testing.assert_allclose(far.head_contributions, near.head_contributions * scale, rtol=1e-5)
        columns = []  # for each component
        for unit_vector in np.eye(10, dtype=np.float32):
            target = ExplanationTarget(direction=unit_vector)
            [text] = await explain(service, TEXTS[0], target=target, pooling=Pooling.CLS)
            columns.append(text.scores[0].values)
        token = int(np.argmax(np.abs(columns).sum(axis=0)))
        assert np.abs(columns)[:, token].sum() > 1
        longest = ExplanationTarget(direction=np.float32(3.4e38) * np.sign(np.array(columns)[:, token]))
        with pytest.raises(
            InvalidFieldsError, match=r"direction is too long, .* overflows float32"
        ) as caught:
            await explain(service, TEXTS[0], target=longest, pooling=Pooling.CLS)
        assert [violation.field for violation in caught.value.violations] == ["direction"]


async def test_leaving_out_tokens_of_an_excluded_prompt_has_an_effect(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        [text] = await explain(service, TEXTS[0], prompt=Prompt(name="query"), methods=MASKED)
        values = text.scores[0].values
        assert np.isnan(values[[0, -1]]).all()
        assert np.isfinite(values[1:-1]).all()
        assert values[1] != 0  # a prompt token
        [text] = await explain(
            service, TEXTS[0], prompt=Prompt(name="query"), pooling=Pooling.CLS, methods=MASKED
        )
        first = list(text.tokens.sources).index(TokenSource.TEXT)  # the only pooled token
        assert np.flatnonzero(np.isnan(text.scores[0].values)).tolist() == [
            0,
            first,
            len(text.tokens.ids) - 1,
        ]


async def test_embeddings_in_fp16_are_explained_in_fp32(dense_bundle: Path) -> None:
    methods = (ExplainMethod.CONTRIBUTIONS, *MASKED)
    target = ExplanationTarget(to=Input(text="the cat"))
    found = []
    for precision in ("fp32", "fp16"):
        async with serving(dense_bundle, precision=precision) as service:
            found.append(await explain(service, *TEXTS, methods=methods, target=target))
    for exact, served in zip(*found, strict=True):
        assert served.target_value == pytest.approx(exact.target_value, abs=1e-6)
        for one, other in zip(exact.scores, served.scores, strict=True):
            np.testing.assert_allclose(other.values, one.values, atol=1e-6)


async def test_explanation_unsupported_with_dense_layers_is_rejected_by_name(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        assert ExplainMethod.OUTPUT_SHARE not in service.explain.methods
        assert service.compare.matrices == (PairMatrix.INTERACTION, PairMatrix.INPUT)
        with pytest.raises(
            InvalidFieldsError,
            match=r"methods\[0\] is EXPLAIN_METHOD_OUTPUT_SHARE, but embeddings of models with dense",
        ):
            await explain(service, "a cat", methods=[ExplainMethod.OUTPUT_SHARE])
        job = CompareRequest(
            inputs=[Input(text="a")], second_inputs=[Input(text="b")], matrix=PairMatrix.OUTPUT
        )
        with pytest.raises(
            InvalidFieldsError,
            match=r"matrix is PAIR_MATRIX_OUTPUT, but.* use \w+_INTERACTION or \w+_INPUT$",
        ):
            await service.compare(job, budget(service))


# --- incomplete bundles and restricted servers ----------------------------------------------------


async def test_bundle_without_contributions_names_what_is_missing_and_serves_other_methods() -> None:
    async with serving(STORED_BUNDLE) as service:
        methods = service.explain.methods
        assert methods == (*MASKED, ExplainMethod.ROLLOUT, ExplainMethod.RECEIVED_ATTENTION)
        with pytest.raises(
            NotSupportedError, match=r"has no contributions graph.*export the model again"
        ) as caught:
            await explain(service, "a cat")
        assert "or use EXPLAIN_METHOD_LEAVE_ONE_OUT" in caught.value.message
        with pytest.raises(NotSupportedError, match=r"CONTRIBUTION_NORM .*has no contributions graph"):
            await explain(service, "a cat", methods=NORM)
        [text] = await explain(service, "a cat", methods=methods)
        assert text.target_value == pytest.approx(1)
        assert text.scores[1].sum == pytest.approx(1, abs=1e-6)
        fields: dict[str, Any] = {"methods": MASKED, "matrix": PairMatrix.INTERACTION}
        [compared] = await compare(service, "a cat", "the cat", **fields)
        assert service.compare.matrices == (PairMatrix.INTERACTION,)
        lack = "PAIR_MATRIX_INPUT is not supported: .*no contributions graph.*export the model again$"
        with pytest.raises(NotSupportedError, match=lack):
            await compare(service, "a cat", "the cat", methods=MASKED)
        first, second = await vectors(service, "a cat", "the cat")
        assert compared.similarity == pytest.approx(first @ second, abs=1e-5)


async def test_contributions_of_exporter_versions_with_a_race_are_not_served(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    added = helper.make_node("ScatterND", ["direction", "input_ids", "direction"], ["sum"], reduction="add")
    change_graph(copied, CONTRIBUTIONS, lambda graph: graph.node.append(added))
    async with serving(copied) as service:
        with pytest.raises(
            NotSupportedError, match=r"CONTRIBUTIONS is not supported.*export the model again"
        ):
            await explain(service, "a cat")
        assert (await vectors(service, "a cat")).shape == (1, 10)  # other methods still work
    assert "Export the bundle again to explain embeddings by contributions" in caplog.text


async def test_disabled_explanations_are_reported(dense_bundle: Path) -> None:
    async with serving(dense_bundle, explain=False) as service:
        assert service.explain.methods == ()
        with pytest.raises(NotSupportedError, match="--no-explain"):
            await explain(service, "a cat")


@pytest.mark.parametrize(
    ("output", "factor"), [("baseline", 0.0), ("baseline", -1.0), ("token_contributions", 1.01)]
)
async def test_contributions_graph_with_wrong_sums_is_not_used(
    copied: Path, output: str, factor: float
) -> None:
    scaled = helper.make_node("Mul", ["inner", "factor"], [output])
    change_graph(copied, CONTRIBUTIONS, through(output, constant("factor", factor), scaled))
    async with serving(copied) as service:
        with pytest.raises(GraphUnavailableError, match="returned contributions that add up to"):
            await explain(service, "a cat")
        assert (await vectors(service, "a cat")).shape == (1, 10)  # other methods still work


@pytest.mark.parametrize(("input_index", "axes"), [(2, ["batch_size", "7"]), (5, ["batch_size", "2", "4"])])
def test_manifest_with_a_mismatched_contributions_graph_is_rejected(
    copied: Path, input_index: int, axes: list[str]
) -> None:
    with manifest_of(copied) as manifest:
        [graph] = [each for each in manifest["graphs"] if each["id"] == "contributions"]
        graph["inputs"][3 + input_index]["axes"] = axes
    with pytest.raises(StartupError, match="is not a contributions graph with the inputs"):
        open_bundle(copied)


async def test_zero_embedding_cannot_be_explained(copied: Path) -> None:
    weights = copied / "2_Dense" / "model.safetensors"
    zeros = {name: np.zeros_like(array) for name, array in safetensors.numpy.load_file(weights).items()}
    safetensors.numpy.save_file(zeros, weights)
    put_hashes_right(copied)
    async with serving(copied) as service:
        with pytest.raises(InvalidFieldsError, match=r"inputs\[0\] has an embedding of norm 0"):
            await explain(
                service, "a cat", methods=MASKED, target=ExplanationTarget(direction=np.ones(10, np.float32))
            )
        with pytest.raises(InvalidFieldsError, match="to has an embedding of norm 0"):
            await explain(service, "a cat", target=ExplanationTarget(to=Input(text="the cat")))


# --- limits ---------------------------------------------------------------------------------------


async def test_finished_call_releases_memory_and_slots(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        for methods in ((), MASKED, tuple(service.explain.methods)):
            memory = Reservation(service.process.admission)
            job = ExplainRequest(inputs=[Input(text=text) for text in TEXTS], methods=methods)
            await service.explain(job, Budget(memory))
            assert memory.available_bytes < service.process.admission.memory.capacity
            memory.release()
            for kind in ("embeddings", "attention", "contributions"):
                with service.process.admission.slots(kind, 4096):  # all slots are free
                    pass


async def test_cancelled_call_stops_running(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        text = "the cat and the man " * 4
        job = ExplainRequest(inputs=[Input(text=text)] * 20, methods=MASKED)
        await explain(service, text, methods=MASKED)
        embeddings = service.model.engine.lanes["embeddings"]
        before = embeddings.num_live_tokens
        await cancelled(service.explain(job, budget(service)), embeddings, before)
        await vectors(service, "a cat")
        assert embeddings.num_live_tokens - before < 10 * 20**2  # of 20 texts with at least 20 tokens each
        with service.process.admission.slots("embeddings", 4096):
            pass


async def test_cancelled_comparison_stops_running(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        [pair] = await compare(service, TEXTS[2], TEXTS[2])
        length = len(pair.a.tokens.ids)
        lane = service.model.engine.lanes["contributions"]
        before = lane.num_live_tokens
        text = [Input(text=TEXTS[2])]
        job = CompareRequest(
            inputs=text * 40, second_inputs=text * 40, matrix=PairMatrix.INPUT
        )  # 40 (10 + T + 1) runs
        await cancelled(service.compare(job, budget(service)), lane, before)
        await explain(service, "a cat")
        assert lane.num_live_tokens - before < 40 * 10 * length
        with service.process.admission.slots("contributions", 4096):
            pass


async def cancelled(call: Coroutine[Any, Any, object], lane: Any, before: int) -> None:
    """Start a call, and cancel it as soon as a lane has run its first batch."""
    running = asyncio.ensure_future(call)
    while lane.num_live_tokens == before:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_call_past_its_deadline_fails(dense_bundle: Path) -> None:
    async with serving(dense_bundle) as service:
        for methods in ((), MASKED):
            job = ExplainRequest(inputs=[Input(text="a cat")], methods=methods)
            with pytest.raises(DeadlineError):
                await service.explain(job, budget(service, time.monotonic() - 1))
        job_b = CompareRequest(
            inputs=job.inputs, second_inputs=job.inputs, methods=MASKED, matrix=PairMatrix.INPUT
        )
        with pytest.raises(DeadlineError):
            await service.compare(job_b, budget(service, time.monotonic() - 1))


async def test_short_queue_suffices_for_many_runs_of_one_text(dense_bundle: Path) -> None:
    async with serving(dense_bundle, max_concurrent_inputs=1) as service:
        [text] = await explain(service, TEXTS[2], methods=MASKED)
        with service.process.admission.slots("contributions", 1), pytest.raises(OverloadedError):
            await explain(service, "a cat")
    async with serving(dense_bundle, max_concurrent_inputs=2) as service:
        [pair] = await compare(service, TEXTS[2], "a cat")
        with service.process.admission.slots("contributions", 2), pytest.raises(OverloadedError):
            await compare(service, "a cat", "the cat", methods=MASKED)
    async with serving(dense_bundle) as service:
        [other] = await explain(service, TEXTS[2], methods=MASKED)
        [same] = await compare(service, TEXTS[2], "a cat")
    assert pair.matrix is not None
    assert same.matrix is not None
    np.testing.assert_allclose(pair.matrix.values, same.matrix.values, atol=1e-6)
    np.testing.assert_allclose(text.scores[0].values, other.scores[0].values, atol=1e-6)


async def test_oversized_response_or_call_is_rejected_before_anything_runs(
    dense_bundle: Path,
) -> None:
    async with serving(dense_bundle, max_response_bytes=1 << 9) as service:
        with pytest.raises(ResponseTooLargeError):
            await explain(service, *TEXTS)
        memory = Reservation(service.process.admission)
        memory.grow(service.process.admission.memory.capacity - 100)
        with pytest.raises(RequestTooLargeError, match="bytes of memory"):
            await service.explain(ExplainRequest(inputs=[Input(text="a cat")]), Budget(memory))
        assert service.model.engine.lanes["contributions"].num_computed_tokens == 0


async def test_too_expensive_call_is_rejected_before_anything_runs(dense_bundle: Path) -> None:
    async with serving(dense_bundle, max_computed_tokens=64) as service:
        embeddings = service.model.engine.lanes["embeddings"]
        with pytest.raises(
            TooExpensiveError, match=r"^methods\[0\] needs 99 computed .* limit is 64: .* --max-"
        ) as caught:
            await explain(
                service, "the man and the cat", prompt=Prompt(text="a cat "), methods=MASKED
            )  # 9 x 13
        assert caught.value.metadata == {"computed_tokens": "99", "max_computed_tokens": "64"}
        assert [violation.field for violation in caught.value.violations] == ["methods[0]"]
        assert embeddings.num_computed_tokens == 0
        assert len(await compare(service, "a", "the", matrix=PairMatrix.INTERACTION)) == 1
        with pytest.raises(TooExpensiveError, match=r"methods\[0\] needs 80 computed .* limit is 64"):
            await explain(service, "a", methods=NORM)  # 2 x 10 dimensions x 4 tokens
        assert len(await explain(service, "a", "the", methods=NORM, dimensions=4)) == 2
        contributions = service.model.engine.lanes["contributions"]
        before = contributions.num_computed_tokens
        with pytest.raises(TooExpensiveError, match=r"^matrix needs \d+ computed tokens"):
            await compare(service, "the cat", "the man and the cat")
        with pytest.raises(TooExpensiveError, match=r"^matrix needs \d+ of \d+ computed tokens"):
            await compare(service, "the cat", "the man and the cat", methods=MASKED)
        assert contributions.num_computed_tokens == before
        assert len(await compare(service, "a", "the", dimensions=3)) == 1


async def test_too_expensive_reductions_are_rejected_before_anything_runs(dense_bundle: Path) -> None:
    async with serving(dense_bundle, max_computed_tokens=40) as service:
        query = AttentionQuery(reduction=AttentionReduction(level="words"))
        cheap, costly = (
            EncodeRequest(inputs=[Input(text="a cat")] * count, attention=[query] * 2) for count in (1, 500)
        )
        attention = service.model.engine.lanes["attention"]
        with pytest.raises(TooExpensiveError, match=r"^attention\[0\].reduction needs \d+ computed tokens"):
            await service.encode(costly, budget(service))
        with pytest.raises(TooExpensiveError):
            [part async for part in service.encode_stream(costly, budget(service))]
        assert attention.num_computed_tokens == 0
        assert len((await service.encode(cheap, budget(service))).texts) == 1


async def test_light_call_is_served_while_heavy_calls_run(
    dense_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [Input(text="the cat and the man " * 4)]
    job = CompareRequest(inputs=text, second_inputs=text, matrix=PairMatrix.INPUT)
    async with serving(dense_bundle, max_concurrent_inputs=32, max_batch_tokens=64) as service:
        await explain(service, "a cat")  # opens the graph
        lane = service.model.engine.lanes["contributions"]
        with held_batches(lane, monkeypatch, min_tokens=20):
            heavy = [asyncio.ensure_future(service.compare(job, budget(service))) for _ in range(8)]
            while lane.num_waiting_tokens == 0 or lane.num_idle == 2:
                await asyncio.sleep(0)
            for methods in ((), MASKED):
                async with asyncio.timeout(60):
                    await explain(service, *["a cat"] * 4, methods=methods)
            assert lane.num_waiting_tokens > 0
            assert not any(call.done() for call in heavy)
        assert len({len(call.pairs) for call in await asyncio.gather(*heavy)}) == 1
        for kind in ("embeddings", "contributions"):
            with service.process.admission.slots(kind, 32):
                pass


@contextmanager
def held_batches(lane: Lanes, monkeypatch: pytest.MonkeyPatch, *, min_tokens: int) -> Iterator[None]:
    """Hold batches of texts with at least `min_tokens` tokens until the context exits.

    While shorter texts are queued, up to one held batch per thread may run, too few to complete a call.
    """
    permits, compute, submit = threading.Semaphore(0), lane._compute, lane.submit

    def compute_with_permit(batch: Batch, *args: Any, **kwargs: Any) -> list[ItemResult | None]:
        if batch.items[0].num_tokens >= min_tokens:
            permits.acquire()
        return compute(batch, *args, **kwargs)

    def submit_with_permits(items: Sequence[Item], client: Client) -> None:
        submit(items, client)
        if items[0].num_tokens < min_tokens:
            permits.release(2)

    monkeypatch.setattr(lane, "_compute", compute_with_permit)
    monkeypatch.setattr(lane, "submit", submit_with_permits)
    try:
        yield
    finally:
        permits.release(10_000)


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.MAX])
@pytest.mark.parametrize("num_excluded", [0, 2, 4])
@pytest.mark.parametrize("is_removable", [(False, True, True, True, False), (True,) * 5, (False,) * 5])
def test_runs_without_a_token_are_counted_without_listing_them(
    pooling: Pooling, num_excluded: int, is_removable: tuple[bool, ...]
) -> None:
    encoded = EncodedInput(np.zeros(5, np.int64), 5)
    weights = pooling_weights(pooling, 5, 0 if pooling is Pooling.CLS else num_excluded)
    each = [exclude_token(weights, pooling, token) for token, is_one in enumerate(is_removable) if is_one]
    count = sum(remaining is not None for remaining in each)
    assert num_masked_runs(Text(encoded, weights, is_removable)) == count
