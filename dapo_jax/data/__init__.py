"""Problems: sources, records, prompts, tokenizer, and their order in training."""
