"""Runs an ablation: python launch/ablate.py --workdir=runs/table1

One run for each row of a config file and each seed, then table.md, table.csv and table.png with
intervals over seeds. Runs that are done are kept, and those of another config refused; after a stop
the same command resumes.

--workdir    directory of the ablation; a run is in WORKDIR/ROW/seed_S
--config     file with ROWS, a list of functions, whose names it takes as its argument; default
             configs/ablation.py
--model      Hugging Face directory or hub id in the place of the config's model
--rows       names separated by commas, default all
--seeds      number of seeds, 0 and on, default 5
--processes  runs at a time, default 2; each has its share of the cores
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 done, 2 the user's mistake, 1 a failure, 128 + n a signal n."""
    sys.path.insert(0, str(ROOT))
    from dapo_jax.config.cli import fail, load_config, parse_flags
    from dapo_jax.types import StopRequested, UserError

    try:
        flags = parse_flags(
            argv,
            __doc__ or "",
            text={
                "workdir": None,
                "config": "configs/ablation.py",
                "model": "",
                "rows": "",
            },
            numbers={"seeds": 5, "processes": 2},
        )
        from dapo_jax.tools.ablation import check_done, row_names, run_all, write_table

        config, model = flags["config"], flags["model"]
        rows = flags["rows"].split(",") if flags["rows"] else row_names(config)
        if len(set(rows)) < len(rows):
            raise UserError(f"--rows={flags['rows']} names a row twice: leave one out.")
        of_rows = {row: load_config(f"{config}:{row}", {}, model=model or None) for row in rows}
        for name in ("seeds", "processes"):
            if flags[name] < 1:
                raise UserError(f"--{name} must be 1 or more; got {flags[name]}.")
        workdir = Path(flags["workdir"]).expanduser().resolve()
        seeds = range(flags["seeds"])
        check_done(of_rows, seeds, workdir)
        more = [f"--model={model}"] if model else []
        run_all(config, rows, seeds, workdir, flags["processes"], more)
        print(write_table(rows, seeds, workdir))
    except (KeyboardInterrupt, StopRequested) as stop:  # the runs get it too: they save and stop
        print("stopped; the same command resumes", file=sys.stderr)
        return 128 + (2 if isinstance(stop, KeyboardInterrupt) else 15)
    except Exception as error:
        return fail(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
