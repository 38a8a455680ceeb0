"""Checks this machine: python launch/check.py [--output=DIR] [--parts=device,numbers] [--minutes=9]

Runs the project's programs on the devices that are here, with random weights and no network, and
says of each whether it is ok, slow or wrong, or why it was not run. The exit status is 0 unless
something is wrong or nothing of a part was checked (1), or the command is wrong (2).

device   rates of products, memory and copies; the kernels that runs will use
numbers  attention, log-probs, sampling and cache against NumPy in float64; rollout against trainer;
         two steps of configs/tiny_dapo.py against a CPU's
rollout  tokens per second at 1, 64 and 256 sequences, against what memory and products allow
update   tokens per second, MFU and memory
step     a whole rollout step, and how long the devices are idle in it
resume   a checkpoint saved and restored

--output   directory for check.json, check.html and a log of each part, default runs/check; what is
           ok or slow in check.json is not run again
--parts    some of these, separated by commas, default all
--minutes  at most, default 9; the same command runs later what had no time
--here     run the one part in this process, without a limit of time
--tune     measure block sizes of the attention kernels instead, print the flag that sets the
           fastest in a config, and write tune.json; for TPUs
--document write the findings in docs/accelerators/ into docs/accelerators.md, and nothing else
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 nothing is wrong, 1 something is or was not checked, 2 the user's
    mistake."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, parse_flags
    from dapo_jax.types import UserError

    try:
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={"output": str(ROOT / "runs" / "check"), "parts": ""},
            numbers={"minutes": 9.0},
            switches=("here", "document", "tune"),
        )
        from dapo_jax.tools.check import page, runner

        if flags["document"]:
            page.write_document(ROOT / "docs" / "accelerators.md", ROOT / "docs" / "accelerators")
            return 0
        output = Path(flags["output"]).expanduser().resolve()
        say = lambda text: print(text, flush=True)
        parts = flags["parts"].split(",") if flags["parts"] else list(runner.PARTS)
        runner.check(output, parts, flags["minutes"])
        if flags["tune"]:
            from dapo_jax.tools.check import machine, tuning

            tuning.tune(machine.this_machine(), output, say)
            return 0
        if flags["here"]:
            from configs import tiny_dapo

            if len(parts) != 1:
                raise UserError(f"--here needs one part in --parts; got {len(parts)}.")
            runner.run_here(output, parts[0], tiny_dapo.get_config().to_dict())
            return 0
        store = runner.run(Path(__file__).resolve(), output, parts, flags["minutes"], say)
        checked = {finding.part for finding in store.findings}
        unchecked = [part for part in parts if part not in checked]
        if unchecked:
            print(f"nothing of {', '.join(unchecked)} was checked: run the same command again")
        print(f"{page.counts(store)}: {output / 'check.html'}")
    except Exception as error:
        return fail(error)
    wrong = any(finding.verdict == "wrong" for finding in store.findings)
    return 1 if wrong or unchecked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
