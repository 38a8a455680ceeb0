"""The work of the scripts that time other trainers: that of launch/bench.py without its flags."""

import argparse
import dataclasses
import json
import resource
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from launch.bench import MODEL, WORK


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, and the prompts and responses of one step; all responses have `gen_len` tokens."""

    part: str
    vocab: int
    runs: int
    layers: int = MODEL["layers"]
    width: int = MODEL["width"]
    heads: int = MODEL["heads"]
    kv_heads: int = MODEL["kv_heads"]
    d_ff: int = MODEL["d_ff"]
    prompts: int = WORK["prompts"]
    group: int = WORK["group"]
    prompt_len: int = WORK["prompt_len"]
    gen_len: int = WORK["gen_len"]

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def sampled_tokens(self) -> int:
        return self.responses * self.gen_len

    @property
    def trained_tokens(self) -> int:
        """Tokens of the rows of an update, prompts included."""
        return self.responses * (self.prompt_len + self.gen_len)


def parse(description: str | None) -> Work:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("part", choices=("rollout", "update", "step"))
    parser.add_argument("--vocab", type=int, default=MODEL["vocab"])
    parser.add_argument("--runs", type=int, default=3)
    return Work(**vars(parser.parse_args()))


def prompt_texts(work: Work, seed: int) -> list[str]:
    """Returns prompts of random tokens, written as numbers."""
    tokens = np.random.default_rng(seed).integers(1, work.vocab, (work.prompts, work.prompt_len))
    return [" ".join(map(str, row)) for row in tokens]


def even_share(tokens: Sequence[int]) -> float:
    """A reward that differs between responses."""
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def timed(once: Callable[[], None], runs: int) -> list[float]:
    """Returns the seconds of each run, after one that compiles or fills caches."""
    once()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(work: Work, parts: Mapping[str, Callable[[Work], tuple[list[float], int]]]) -> None:
    """Prints the seconds of the part's runs, its tokens and the process's peak memory."""
    seconds, tokens = parts[work.part](work)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = {"seconds": seconds, "tokens": tokens, "peak_rss_mb": kilobytes * 1024 / 1e6}
    print(json.dumps(values), flush=True)
