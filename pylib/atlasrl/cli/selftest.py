"""The gradient self-test: trials from the command line, tables of tensors, an exit code."""

from __future__ import annotations

import sys

import click

from atlasrl.cli import command

SIZE = click.IntRange(min=1)


@command
@click.option("--backend", type=click.Choice(["megatron", "fsdp2"]), default="megatron", show_default=True)
@click.option("--workers", type=SIZE, help="Number of workers. Default: the product of the sizes below.")
@click.option("--dp", type=SIZE, help="Data-parallel replicas. Default: what the workers leave.")
@click.option("--tp", type=SIZE, default=1, help="Tensor-parallel size.")
@click.option("--pp", type=SIZE, default=1, help="Pipeline stages.")
@click.option("--ep", type=SIZE, default=1, help="Expert-parallel size.")
@click.option("--etp", type=SIZE, default=1, help="Expert-tensor-parallel size.")
@click.option("--proven", is_flag=True, help="All layouts of trainer/layout.py that fit into --workers.")
@click.option("--plain-optimizer", is_flag=True, help="Every replica keeps the whole optimizer state.")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]), default="none")
@click.option("--dynamic-batch", is_flag=True, help="Micro batches packed by tokens.")
@click.option("--clip-grad", type=float, default=1.0, show_default=True, help="Largest gradient norm.")
@click.option("--scale-gradient", multiple=True, metavar="RANK=FACTOR", help="Plant a fault; repeatable.")
@click.option("--without-fix", multiple=True, metavar="ID", help="Leave a fix of upstream code out; repeatable.")
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Checkpoint. Default: a tiny random one.")
@click.option("--batch", type=click.Path(exists=True, dir_okay=False), help="Replay a batch written with --record.")
@click.option("--record", type=click.Path(dir_okay=False), help="Write the batch to a safetensors file.")
@click.option("--rows", type=SIZE, default=8, show_default=True, help="Tensors to show per trial.")
@click.option("--json", "as_json", is_flag=True)
def main(workers, proven, rows, as_json, model, batch, record, **options):
    """Compare every gradient and updated parameter of verl's workers with an independent reference.

    \b
    bin/selftest --backend fsdp2 --workers 2
    bin/selftest --tp 2 --ep 2                               TP2 EP2 on two workers
    bin/selftest --proven --workers 4                        every layout that is called proven
    bin/selftest --workers 2 --plain-optimizer --without-fix ddp-optimizer-flag      must fail

    Exit code 0: all equal; 1: something is wrong; 2: the request cannot be served.
    """
    from atlasrl.selftest import workbench
    from atlasrl.selftest.cases import trials_of
    from atlasrl.selftest.compare import table

    trials = trials_of(workers=workers, proven=proven, **options)
    verdicts = []
    for verdict in workbench.run(trials, model=model, batch=batch, record=record):
        verdicts.append(verdict)
        if not as_json:
            _show(verdict, table(verdict, rows))
    if as_json:
        import json

        click.echo(json.dumps({"ok": all(v.ok for v in verdicts), "trials": [v.as_dict(rows) for v in verdicts]}))
    sys.exit(0 if all(verdict.ok for verdict in verdicts) else 1)


def _show(verdict, text: str) -> None:
    norms = ", ".join(f"{norm:.6f}" for norm in verdict.grad_norms)
    expected = ", ".join(f"{norm:.6f}" for norm in verdict.reference_norms)
    click.echo(f"{'passed' if verdict.ok else 'FAILED'}: {verdict.name}")
    click.echo(
        f"  gradient norms {norms}; reference {expected}; {verdict.compared} comparisons, {len(verdict.wrong)} wrong"
    )
    for problem in verdict.problems:
        click.echo(f"  {problem}")
    click.echo("\n".join("  " + line for line in text.splitlines()))


if __name__ == "__main__":
    main(prog_name="bin/selftest")
