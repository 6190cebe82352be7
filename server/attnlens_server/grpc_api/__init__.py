"""`attnlens.v1.EncoderService` over gRPC: messages in and out, jobs and results between.

`methods` has the methods, `calls` the life of a call, `requests` makes jobs of messages, `responses` messages
of results, `status` tells errors, `model_info` describes the model.
"""
