"""`inference.GRPCInferenceService`, the Open Inference Protocol, for clients of Triton and KServe.

`models` names the models and tensors, `requests` and `tensors` read requests, `responses` serializes results,
and `methods` implements the service with the calls and errors of `grpc_api`.
"""
