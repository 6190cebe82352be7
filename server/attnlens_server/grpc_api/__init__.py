"""`attnlens.v1.EncoderService` over gRPC.

`methods` implements the service, `calls` runs each call, `requests` and `responses` convert messages,
`status` converts errors, and `model_info` describes the model.
"""
