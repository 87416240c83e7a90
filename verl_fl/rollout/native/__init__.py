"""The built-in rollout engine: continuous batching over any Hugging Face causal LM, in plain torch."""
