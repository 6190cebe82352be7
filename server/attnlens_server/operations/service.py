"""All operations on one model."""

from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.operations.classify import ClassifyOperation
from attnlens_server.operations.compare import CompareOperation
from attnlens_server.operations.embed import EmbedOperation
from attnlens_server.operations.encode import EncodeOperation
from attnlens_server.operations.encode_stream import EncodeStreamOperation
from attnlens_server.operations.explain import ExplainOperation
from attnlens_server.operations.score import ScoreOperation
from attnlens_server.operations.tokenize import TokenizeOperation


class ModelService:
    """Operations on one model. Protocols pass requests and budgets, and serialize the results.

    Attributes:
        process: Process that runs them.
        model: The model.
        embed, encode, encode_stream, tokenize, explain, compare, score, classify: The operations.
    """

    def __init__(self, process: Process, model: LoadedModel) -> None:
        self.process = process
        self.model = model
        self.embed = EmbedOperation(process, model)
        self.encode = EncodeOperation(process, model)
        self.encode_stream = EncodeStreamOperation(process, model)
        self.tokenize = TokenizeOperation(process, model)
        self.explain = ExplainOperation(process, model)
        self.compare = CompareOperation(process, model)
        self.score = ScoreOperation(process, model)
        self.classify = ClassifyOperation(process, model)
