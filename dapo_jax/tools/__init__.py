"""Programs besides training: plan, bench, generate, score, export. Nothing imports them."""
