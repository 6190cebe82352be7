"""Language models that serve as encoders: Llama and what is built like it."""
