"""One request of every kind, sent to each release so that later releases can repeat it.

Cases are added but never changed, because earlier recordings refer to them.
"""

from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole, Pooling
from attnlens.v1.tensor_pb2 import DataType

FIRST, SECOND = "the cat sat on the mat.", "it rained all day, and the dog slept."


def text(content: str) -> pb.Input:
    return pb.Input(text=content)


def pair(first: str, second: str) -> pb.Input:
    return pb.Input(text_pair=pb.TextPair(first=first, second=second))


def ids(*numbers: int, types: tuple[int, ...] = ()) -> pb.Input:
    return pb.Input(token_ids=pb.TokenIds(input_ids=numbers, token_type_ids=types))


ATTENTION = [
    pb.AttentionQuery(layers=[-1, 0], heads=[1]),
    pb.AttentionQuery(
        role=OutputRole.OUTPUT_ROLE_ATTENTION_WEIGHTS,
        layers=[1],
        view=pb.AttentionView.ATTENTION_VIEW_HEAD_MEAN,
    ),
]
NO_PROMPT = pb.Prompt(text="")

# Case name -> method and request.
CASES: dict[str, tuple[str, Message]] = {
    "embed": ("Embed", pb.EmbedRequest(inputs=[text(FIRST), text(SECOND), text("")])),
    "embed with all options": (
        "Embed",
        pb.EmbedRequest(
            model="small",
            inputs=[text(FIRST), text(SECOND * 4)],
            truncate=True,
            prompt=pb.Prompt(name="query"),
            pooling=Pooling.POOLING_MAX,
            normalize=True,
            dimensions=5,
            data_type=DataType.DATA_TYPE_FLOAT16,
        ),
    ),
    "embed without a prompt": ("Embed", pb.EmbedRequest(inputs=[text(FIRST)], prompt=NO_PROMPT)),
    "embed pairs": ("Embed", pb.EmbedRequest(inputs=[pair(FIRST, SECOND), pair("", SECOND), text(FIRST)])),
    "embed ids": (
        "Embed",
        pb.EmbedRequest(inputs=[ids(2, 10, 11, 3), ids(2, 5, 3, 6, 3, types=(0, 0, 0, 1, 1))]),
    ),
    "encode": ("Encode", pb.EncodeRequest(inputs=[text(FIRST)])),
    "encode attention": (
        "Encode",
        pb.EncodeRequest(inputs=[text(FIRST), text("rain")], last_hidden_state=True, attention=ATTENTION),
    ),
    "encode a pair with a prompt": (
        "Encode",
        pb.EncodeRequest(
            inputs=[pair("the caf\u00e9 is open.", SECOND)],
            prompt=pb.Prompt(text="say: "),
            attention=ATTENTION[:1],
            data_type=DataType.DATA_TYPE_FLOAT16,
        ),
    ),
    "stream": (
        "EncodeStream",
        pb.EncodeStreamRequest(
            inputs=[text(FIRST), pair(FIRST, "rain")], last_hidden_state=True, attention=ATTENTION
        ),
    ),
    "tokenize": (
        "Tokenize",
        pb.TokenizeRequest(inputs=[text(SECOND * 4), pair("rain", FIRST)], prompt=pb.Prompt(name="query")),
    ),
    "explain": ("Explain", pb.ExplainRequest(inputs=[text(FIRST), text("rain")])),
    "compare": ("Compare", pb.CompareRequest(pairs=[pb.ComparedPair(a=text(FIRST), b=text(SECOND))])),
    "list models": ("ListModels", pb.ListModelsRequest()),
    "get model": ("GetModel", pb.GetModelRequest(model="small")),
    "no such model": ("GetModel", pb.GetModelRequest(model="large")),
    "too long": ("Embed", pb.EmbedRequest(inputs=[text(FIRST), text(SECOND * 4)])),
    "wrong fields": (
        "EncodeStream",
        pb.EncodeStreamRequest(
            inputs=[ids(2, 400, 3)], prompt=pb.Prompt(name="none"), attention=[pb.AttentionQuery(layers=[7])]
        ),
    ),
    "nothing to encode": ("Encode", pb.EncodeRequest()),
}

# The same for a reranker.
RERANKER_CASES: dict[str, tuple[str, Message]] = {
    "score": ("Score", pb.ScoreRequest(query=FIRST, documents=[SECOND, "rain", ""], top_n=2)),
    "score pairs": ("Score", pb.ScoreRequest(pairs=[pb.TextPair(first=FIRST, second=SECOND)])),
    "classify": ("Classify", pb.ClassifyRequest(inputs=[pair(FIRST, SECOND), pair("rain", FIRST)])),
    "get model": ("GetModel", pb.GetModelRequest()),
    "nothing to score": ("Score", pb.ScoreRequest(query=FIRST)),
}
MODELS = {"embedder": CASES, "reranker": RERANKER_CASES}
