"""Problems: sources, records, prompts, tokenizer, and their order in training.

Import from the modules: `stream` loads grain, `tokenizer` transformers, `dataset` pyarrow.
"""
