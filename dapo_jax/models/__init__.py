"""The decoder, its log-probs, its layout on a mesh, and its Hugging Face weights."""
