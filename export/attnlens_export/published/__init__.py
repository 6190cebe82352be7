"""What a checkpoint publishes beside its weights: modules, pooling, prompts, tokenizer, limits."""
