"""Generated strings through every scorer: python -m tests.studies.fuzz_scorers [--strings=20000]

Prints a line per scorer. A string may run out of time or raise: that costs the string its verdict.
Among the strings are responses that are right; exits 0 if every one of them was found right and no
worker was lost.
"""

import argparse
import collections
import random
import sys
import time

from dapo_jax.rewards.pool import RewardPool
from dapo_jax.rewards.scorers import SCORERS
from dapo_jax.rewards.types import Task

WORDS = r"""Answer: #### \boxed{ } { $ \( \) \[ \frac{ \sqrt \text{ \left( \right) ^ _ 9**9**9**9
    9^{9^{9^{9}}} \infty 1/0 0.1 1,000 1{,}000 - + \pi x = \le \\ \begin{pmatrix} \end{pmatrix} \cup
    {1,2} \int_0^1 \sum_{n=1}^{\infty} ! 99999999999999999999! \% \$ \mathrm{ #"""
PIECES = [*WORDS.split(), "answer :", "[1, 2)", "\n", " ", "\t", "\x00", "\u202e", "\ud800"]
PIECES += ["\U0001f600", "\u0663", "\uff05"]


def string(rng: random.Random) -> str:
    """Pieces of LaTeX and of mischief; now and then very long or deeply nested."""
    kind = rng.random()
    if kind < 0.02:
        return "\\boxed{" + rng.choice(PIECES) * rng.randrange(1000, 20_000)
    if kind < 0.04:
        n = rng.randrange(50, 2000)
        return "\\boxed{" + "\\sqrt{" * n + "2" + "}" * n + "}"
    if kind < 0.06:
        return "Answer: " + "".join(chr(rng.randrange(0x10FFFF)) for _ in range(50))
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 25)))
    return rng.choice(["", "Answer: ", "\\boxed{", "#### ", "$"]) + text


def right(number: int) -> str:
    """A response that every scorer holds for right when the number is the answer."""
    return f"so\n#### {number}\n\\boxed{{{number}}}\nAnswer: {number}"


def main(argv: list[str]) -> int:
    """0 if no worker was lost and no string spoilt the verdict on another."""
    parser = argparse.ArgumentParser(description="fuzzes the scorers")
    parser.add_argument("--strings", type=int, default=20_000)
    parser.add_argument("--scorers", default=",".join(SCORERS))
    parser.add_argument("--timeout_seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    names, failures = arguments.scorers.split(","), 0
    with RewardPool(names, workers=2, timeout_seconds=arguments.timeout_seconds) as pool:
        for name in names:
            rng, start = random.Random(arguments.seed), time.monotonic()
            texts = [string(rng) for _ in range(arguments.strings)]
            answers = [string(rng) for _ in range(arguments.strings)]
            # The state in which a string leaves a worker shows in the verdicts on the next ones.
            probes = range(0, arguments.strings, 20)
            for i in probes:
                texts[i], answers[i] = right(i), str(i)
            found = [s.scores for s in pool.score([Task((name,), *x) for x in zip(texts, answers)])]
            notes = collections.Counter(s.partition(":")[0] for s in found if isinstance(s, str))
            wrong = [i for i in probes if isinstance(found[i], str) or not found[i][0].correct]
            failures += notes["worker died"] + len(wrong)
            print(
                f"{name:22s} {len(found):,} strings in {time.monotonic() - start:.0f} s, "
                f"without a verdict: {dict(notes) or 'none'}, "
                f"right ones found wrong: {len(wrong)} of {len(probes)}",
                flush=True,
            )
            for i in wrong[:5]:
                print(f"    {texts[i]!r}: {found[i]}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
